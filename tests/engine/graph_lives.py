"""What can become of graphs between two steps: the stress tests and the random orders run all of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

GRAPH_LIVES = (
    "one backward",
    "accumulated",
    "retained",
    "two graphs",
    "two graphs, last first",
    "dropped",
    "half read",
)


def run_step(life: str, forward: Callable[[int], torch.Tensor], last_weight: torch.Tensor) -> None:
    """Add to the gradients what one step gives whose graphs live as ``life`` says.

    Args:
        life: one of `GRAPH_LIVES`.
        forward: runs the n-th forward of the step and returns its loss.
        last_weight: a weight near the loss: its gradient alone needs little of what is saved.
    """
    loss = forward(0)
    if life == "accumulated":
        loss.backward()
        loss = forward(1)
    elif life == "retained":
        loss.backward(retain_graph=True)
    elif life == "two graphs":
        first, loss = loss, forward(1)
        first.backward()
        del first
    elif life == "two graphs, last first":
        second = forward(1)
        second.backward()
        del second
    elif life == "dropped":
        del loss
        loss = forward(1)
    elif life == "half read":  # everything may be on its way back when the graph dies
        torch.autograd.grad(loss, last_weight)
        del loss
        loss = forward(1)
    loss.backward()
