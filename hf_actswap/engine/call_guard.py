"""Rejects calls of a model that a plan cannot follow, by name and before anything is computed."""

from __future__ import annotations

import threading
from threading import get_ident

import torch
from torch import nn

from ..errors import PlanError, Problem

_THREADS = Problem(
    "model",
    "one call at a time under a plan",
    "a call in another thread while a training forward runs",
    "Let one thread train (a lock around forward and backward), or give each thread a model of its own.",
)
_TRANSFORM = Problem(
    "model",
    "loss.backward() or torch.autograd.grad",
    "a torch.func transform (grad, vmap, ...) around the model's call, which supports no saved-tensor hooks",
    "Remove the plan for this call: applied.suspend() before, applied.resume() after.",
)


class CallGuard:
    """Notes in which thread the training forward of one model runs.

    Attributes:
        thread: the thread's number; ``None``: none runs.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self._lock = threading.Lock()

    @property
    def runs_elsewhere(self) -> bool:
        """Whether a training forward runs in another thread."""
        return self.thread is not None and self.thread != get_ident()

    def enter(self, prepares: bool) -> bool:
        """Note that a call of the model starts in this thread, before its hooks run.

        Args:
            prepares: whether a forward that runs is still being prepared: on fake tensors, which any call of
                the model would meet.

        Returns:
            Whether it is a training forward, and not within another: `release` must follow.

        Raises:
            PlanError: a training forward runs in another thread.
        """
        trains = torch.is_grad_enabled()
        with self._lock:
            if self.runs_elsewhere and (prepares or trains):
                raise PlanError([_THREADS])
            if not trains or self.thread is not None:
                return False
            self.thread = get_ident()
            return True

    def release(self) -> None:
        """Note that the training forward of this thread has ended."""
        self.thread = None


def reject_transforms() -> None:
    """Raise `PlanError` inside `torch.func` transforms."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise PlanError([_TRANSFORM])


def reject_offloaded_weights(root: nn.Module) -> None:
    """Raise `PlanError` if hooks of accelerate bring weights to the device for one call each."""
    names = [
        f"{path}.{name}"
        for path, module in root.named_modules()
        if hasattr(module, "_hf_hook")
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_meta
    ]
    if names:
        found = f"{len(names)} weights on meta ({names[0]}, ...): accelerate loads them for each call"
        hint = (
            "Load the model without cpu_offload, disk_offload or a device_map that offloads. If it does not "
            "fit, quantise it, or shard it with FSDP2."
        )
        raise PlanError([Problem("model", "weights on the device", found, hint)])
