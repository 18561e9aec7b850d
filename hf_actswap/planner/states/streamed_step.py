"""An optimizer's step, bucket by bucket, by its own code on a part of the parameters at a time.

It runs in the optimizer's pre-hook, and the call proper then finds no parameters: so it is the same for
whatever has been put around ``optimizer.step`` (schedulers, Accelerate, a gradient scaler, other hooks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .state_residence import StateResidence, of_optimizer
from .state_storages import StateStorage
from .watched_states import WatchedStates

Closure = Callable[[], Any]
Bucket = list[list[torch.Tensor]]
"""Parameters of each group."""

_PARTS = 4
"""Of what may be resident: one bucket in the step, one coming, one leaving, and one to choose from."""


class StreamedStep:
    """Replaces the optimizer's step over all parameters by its own step over one bucket of them at a time.

    Args:
        optimizer: one of those that `is_streamed`.
        residence: of its states.

    Attributes:
        running: while the optimizer's code is at work.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, residence: StateResidence) -> None:
        self._optimizer, self._residence = optimizer, residence
        self._parameters: list[list[torch.Tensor]] | None = None
        self.running = False

    @property
    def hidden(self) -> bool:
        """Whether the groups have been emptied for the call proper."""
        return self._parameters is not None

    def show(self) -> None:
        """Let the groups have their parameters again. Safe to call at any time."""
        parameters, self._parameters = self._parameters, None
        if parameters is not None:
            for group, own in zip(self._optimizer.param_groups, parameters, strict=True):
                group["params"] = own

    def order(self, states: WatchedStates) -> list[StateStorage]:
        """Return the storages in the order in which the step wants them."""
        return self._residence.of_all(key for key in of_optimizer(self._optimizer) if key in states)

    def run(
        self,
        states: WatchedStates,
        resident_bytes: int,
    ) -> None:
        """Step all parameters that have gradients, and let the call proper find none.

        Args:
            states: of the optimizer.
            resident_bytes: of states on the device at most, unless one parameter has more.

        Raises:
            Exception: of the optimizer, which has then stepped the buckets before.
        """
        step = type(self._optimizer).step.__wrapped__  # type: ignore[attr-defined]
        buckets = list(self._buckets(max(1, resident_bytes // _PARTS)))
        ahead = deque(self.order(states))
        self._parameters = [group["params"] for group in self._optimizer.param_groups]
        try:
            for bucket in buckets:
                keys = [parameter for parameters in bucket for parameter in parameters]
                self._bring(self._residence.of_all(keys), ahead, resident_bytes)
                self._step(step, bucket)
                self._residence.refresh(keys, states)
                for storage in self._residence.of_all(keys):
                    self._residence.leave(storage)
                self._residence.release(resident_bytes)
        except BaseException:
            self.show()
            raise
        for group in self._optimizer.param_groups:
            group["params"] = []

    def _step(self, step: Callable[..., Any], bucket: Bucket) -> None:
        for group, parameters in zip(self._optimizer.param_groups, bucket, strict=True):
            group["params"] = parameters
        self.running = True
        try:
            step(self._optimizer)
        finally:
            self.running = False

    def _bring(self, needed: list[StateStorage], ahead: deque[StateStorage], resident_bytes: int) -> None:
        """Have a bucket's states on the device, and others on their way as far as there is room."""
        residence = self._residence
        for storage in needed:
            if storage.place == "host":
                residence.release(resident_bytes - storage.size_bytes)
                residence.start_return(storage)
        while ahead:
            storage = ahead[0]
            if storage.place == "host":
                residence.release(resident_bytes - storage.size_bytes)
                if residence.device_bytes + storage.size_bytes > resident_bytes:
                    break
                residence.start_return(storage)
            ahead.popleft()
        for storage in needed:
            residence.bring(storage)

    def _buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Parameters that have gradients, in order, cut where their states come to ``bucket_bytes``."""
        count = len(self._optimizer.param_groups)
        bucket: Bucket = [[] for _ in range(count)]
        held_bytes = 0
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size_bytes = self._state_bytes(parameter)
                if held_bytes and held_bytes + size_bytes > bucket_bytes:
                    yield bucket
                    bucket, held_bytes = [[] for _ in range(count)], 0
                bucket[index].append(parameter)
                held_bytes += size_bytes
        yield bucket

    def _state_bytes(self, parameter: torch.Tensor) -> int:
        """Without states yet: as if there were to be two of the parameter's size."""
        known = self._residence.of(parameter)
        return sum(item.size_bytes for item in known) if known else 2 * parameter.nbytes


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around_it: Callable[[Closure], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a step's arguments with another closure, if there is one."""
    if len(args) > 1 and args[1] is not None:
        return (args[0], around_it(args[1]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": around_it(kwargs["closure"])}
    return args, kwargs


def call_first(closure: Closure) -> Closure:
    """Call it, as all of these optimizers do first; its result is what the call proper gets."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss
