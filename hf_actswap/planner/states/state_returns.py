"""States come back in backward, little by little, as gradients appear."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .state_residence import StateResidence
from .state_storages import StateStorage

logger = logging.getLogger(__name__)


class StateReturns:
    """Counts gradients, and starts as large a part of the copies as of the gradients of a backward are there.

    So the states on the device grow as activations fall. Which backward is the last before the step is told
    by how many gradients there were before the last step; before the first step nothing is started. With
    fewer micro-batches than last time the rest comes back in the step, with more the next forward sends it
    away.

    Args:
        residence: of the states.
        order: returns their storages as the step wants them.
        most_bytes: returns what may be on the device at most.
    """

    def __init__(
        self,
        residence: StateResidence,
        order: Callable[[], list[StateStorage]],
        most_bytes: Callable[[], int],
    ) -> None:
        self._residence, self._order, self._most_bytes = residence, order, most_bytes
        self._calls = self._calls_before = self._per_backward = 0
        self._called: set[int] = set()
        self._waiting: deque[StateStorage] | None = None
        self.stream: torch.Stream | None = None
        """Compute's in the step: FSDP2 hands gradients over on another, and the blocks must be the step's."""

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """A hook on the accumulation of each gradient."""
        self._calls += 1
        self._called.add(id(parameter))
        if not self._per_backward:
            return
        done = self._calls - (self._calls_before - self._per_backward)
        if done > 0:
            self._start(int(self._most_bytes() * min(1.0, done / self._per_backward)))

    def step_starts(self) -> None:
        """The gradients until now were those of one step."""
        self._calls_before, self._per_backward = self._calls, len(self._called)
        self._calls = 0
        self._called.clear()
        self._waiting = None

    def forward_starts(self) -> None:
        """What came back has gone again."""
        self._waiting = None

    def _start(self, wanted_bytes: int) -> None:
        if self._waiting is None:
            self._waiting = deque(self._order())
        waiting, residence = self._waiting, self._residence
        try:
            with self._on_step_stream():
                while waiting:
                    if waiting[0].place == "host":
                        if residence.device_bytes + waiting[0].size_bytes > wanted_bytes:
                            return
                        residence.start_return(waiting[0])
                    waiting.popleft()
        except torch.OutOfMemoryError:
            logger.debug("No room for optimizer states in backward: the rest comes back in the step.")
            waiting.clear()

    def _on_step_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else self.stream
