"""Names what ran out of device memory under a plan, where nothing runs it again.

An error that leaves a call of the model, or a training of the Trainer, becomes a `DeviceMemoryError`: its
text says what the plan does and what to change. In a loop of one's own no call of ours is around the backward
and the optimizer's step, so there the error stays PyTorch's. Its allocator tells an observer before it raises
one, and that logs a line which says the same. The observer does not raise an error of its own: C++ code that
makes do with less memory (as cuDNN's choice of an algorithm) waits for the allocator's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..engine.hook_wrappers import Undo, entries, replace_outermost_calls
from ..engine.install import AppliedPlan
from ..engine.swapped_storages import NO_HOST_MEMORY
from ..errors import ActSwapError, short_traceback
from ..plan.in_words import plan_in_words
from .oom_guard import DeviceMemoryError, failure_of
from .phases.planner import Planner

logger = logging.getLogger(__name__)

Applied = AppliedPlan | Planner


@contextmanager
def naming_memory_errors(find: Callable[[], Applied | None]) -> Iterator[None]:
    """Raise what runs out of device memory within the block as a `DeviceMemoryError`.

    ``find`` returns what is on the model when memory has run out; ``None``: nothing, and the error stays.
    """
    try:
        yield
    except RuntimeError as error:
        failure, applied = failure_of(error), find()
        if failure is None or applied is None or isinstance(error, ActSwapError):
            raise
        text = f"Device memory ran out under a plan. {_what_to_do(applied)} ({failure.text})"
        raise DeviceMemoryError(text) from error


def name_memory_errors(model: nn.Module, applied: Applied) -> Undo:
    """Name errors of the model's calls, and log a line for those outside of them; return what ends it."""
    names = _CallsByName(applied)
    undo = replace_outermost_calls(entries(model, applied.structure), lambda _: names.around)

    def end() -> None:
        for step in undo:
            step()
        names.ended = True  # PyTorch has no way to take an observer off

    return end


class _CallsByName:
    def __init__(self, applied: Applied) -> None:
        self._applied, self._running, self._observes, self.ended = applied, 0, False, False

    def around(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @short_traceback
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._observes and torch.cuda.is_initialized():
                self._observe()
            self._running += 1
            try:
                with naming_memory_errors(lambda: self._applied):
                    return inner(*args, **kwargs)
            finally:
                self._running -= 1

        return call

    def _observe(self) -> None:
        self._observes = True
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is None or torch.cuda.get_allocator_backend() != "native":
            return
        found = weakref.ref(self)
        attach(lambda *_: None if (names := found()) is None else names.say())

    def say(self) -> None:
        """Log a line if memory has run out where no call of ours sees it."""
        applied = self._applied
        guarded = isinstance(applied, Planner) and applied.final_plan is None
        if not (self.ended or self._running or guarded):
            logger.warning(
                "Device memory ran out under a plan, outside of the model's call (backward, optimizer). %s",
                _what_to_do(applied),
            )


def _what_to_do(applied: Applied) -> str:
    plan = applied.plan
    does = f"The plan: {'; '.join(plan_in_words(plan, applied.structure))}."
    if isinstance(applied, Planner):
        return (
            f"{does} A smaller `memory.budget_gib` leaves more room beside it; in a loop of your own "
            "`Planner.micro_batch` runs a forward and its backward again."
        )
    if applied.runtime.counters.rejected[NO_HOST_MEMORY]:
        does += (
            " A part of what it swaps stayed on the device, because no host memory was left "
            "(host_memory_gib; in a rehearsal --host-memory)."
        )
    if plan.streamed is not None:
        return f"{does} Fewer tokens in a chunk (stream_config: tokens) need less, as do tiles of the loss."
    return (
        f"{does} `hf-actswap plan` says what a step needs, and finds a plan that fits. With "
        "`memory: {mode: smart_swap}` one is found while the model trains; those steps survive running out."
    )
