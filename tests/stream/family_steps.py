"""A step of a tiny model of each family of transformers, in chunks and whole."""

from __future__ import annotations

from typing import Any

import torch

from hf_actswap import PlanError, apply
from tests.parallel.patched_models import VOCABULARY, tiny_model

RIGHT, REJECTED, WRONG = "right", "rejected", "wrong"
LENGTH, TOKENS = 17, 5
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Relative, in fp32, as for tiles: some families compute with numbers large beside their gradients."""


def step(model: Any, family: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients by name."""
    ids = torch.randint(3, VOCABULARY - 3, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    model.zero_grad()
    call = {} if family == "xlm" else {"use_cache": False}  # it knows no cache
    loss = model(input_ids=ids, labels=labels, **call).loss
    loss.backward()
    found = {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    return float(loss), found


def streamed(family: str) -> tuple[str, str]:
    """Say whether a model of the family is right in chunks, or rejected before any gradient; and why not."""
    model = tiny_model(family, output_router_logits=False)
    loss, expected = step(model, family)
    model.zero_grad()
    try:
        with apply(model, {"stream_config": {"tokens": TOKENS}}) as applied:
            streamed_loss, found = step(model, family)
            offloads = applied.stats().offloads
    except PlanError as error:
        given = [name for name, item in model.named_parameters() if item.grad is not None]
        why = "; ".join(f"{problem.expected}: {problem.found}" for problem in error.problems)
        return (WRONG, f"gradient of {given[0]} beside an error") if given else (REJECTED, why)
    wrong = [] if offloads else ["nothing was done"]
    if not abs(streamed_loss - loss) <= LOSS_TOLERANCE * abs(loss):
        wrong.append(f"loss {streamed_loss}, not {loss}")
    wrong += [f"gradient of {name} in one of both only" for name in expected.keys() ^ found.keys()]
    small = GRADIENT_TOLERANCE * max(float(one.norm()) for one in expected.values())
    for name in expected.keys() & found.keys():
        error_of = float((found[name] - expected[name]).norm() / (expected[name].norm() + small))
        if not error_of < GRADIENT_TOLERANCE:
            wrong.append(f"gradient of {name}: {error_of:.1g}")
    return (WRONG, "; ".join(wrong[:3])) if wrong else (RIGHT, "")
