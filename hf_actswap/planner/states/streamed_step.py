"""Runs an optimizer's step bucket by bucket: the optimizer's own code on a part of the parameters at a time.

This happens in the optimizer's step pre-hook; the step call itself then finds no parameters. So it works with
everything that wraps ``optimizer.step`` (schedulers, Accelerate, a gradient scaler, other hooks).

Which optimizers can have their states on the host, and which can step part by part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from ...engine.transfer import Transfer
from ...errors import PlanError, Problem
from .state_storages import StateResidence, StateStorage, WatchedStates, of_optimizer

Closure = Callable[[], Any]
Bucket = list[list[torch.Tensor]]
"""Some parameters of each parameter group."""

_PARTS = 4
"""Number of buckets that fit the resident bytes: one is stepped, one comes, one leaves, one is in reserve."""


class StreamedStep:
    """Replaces the optimizer's step over all parameters by its own step over one bucket of them at a time.

    Args:
        optimizer: an optimizer for which `is_streamed` is true.
        residence: tracks and moves the storages of its states.

    Attributes:
        running: whether the optimizer's own code runs at present.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, residence: StateResidence) -> None:
        self._optimizer, self._residence = optimizer, residence
        self._parameters: list[list[torch.Tensor]] | None = None
        self.running = False

    @property
    def hidden(self) -> bool:
        """Whether the parameter groups have been emptied for the step call itself."""
        return self._parameters is not None

    def show(self) -> None:
        """Give the parameter groups their parameters back. Safe to call at any time."""
        parameters, self._parameters = self._parameters, None
        if parameters is not None:
            for group, own in zip(self._optimizer.param_groups, parameters, strict=True):
                group["params"] = own

    def order(self, states: WatchedStates) -> list[StateStorage]:
        """Return the storages in the order in which the step needs them."""
        return self._residence.storages_of_all(key for key in of_optimizer(self._optimizer) if key in states)

    def run(
        self,
        states: WatchedStates,
        resident_bytes: int,
    ) -> None:
        """Step all parameters that have gradients, then empty the groups for the step call itself.

        Args:
            states: the optimizer's states.
            resident_bytes: the most bytes of states on the device, unless one parameter has more.

        Raises:
            Exception: whatever the optimizer raises; it has then stepped earlier buckets.
        """
        step = type(self._optimizer).step.__wrapped__  # type: ignore[attr-defined]
        buckets = list(self._buckets(max(1, resident_bytes // _PARTS)))
        ahead = deque(self.order(states))
        self._parameters = [group["params"] for group in self._optimizer.param_groups]
        try:
            for bucket in buckets:
                keys = [parameter for parameters in bucket for parameter in parameters]
                self._bring(self._residence.storages_of_all(keys), ahead, resident_bytes)
                self._step(step, bucket)
                self._residence.refresh(keys, states)
                for storage in self._residence.storages_of_all(keys):
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
        """Bring a bucket's states to the device, and start copies of later ones as far as there is room."""
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
        """Yield parameters that have gradients, in order, with states of up to ``bucket_bytes`` each time."""
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
        """Return the bytes of a parameter's states; without any yet, twice the bytes of the parameter."""
        known = self._residence.storages_of(parameter)
        return sum(item.size_bytes for item in known) if known else 2 * parameter.nbytes


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around_it: Callable[[Closure], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with ``around_it`` applied to their closure, if there is one."""
    if len(args) > 1 and args[1] is not None:
        return (args[0], around_it(args[1]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": around_it(kwargs["closure"])}
    return args, kwargs


def call_first(closure: Closure) -> Closure:
    """Call ``closure``, as these optimizers do first; return a closure that returns the same loss."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


STREAMED: frozenset[type] = frozenset(
    {
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
    }
)
"""Optimizers that compute each parameter from its own gradient and states, and its group's settings alone."""

_ADAMS = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)
"""AdamW is an Adam."""


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers that hold it as ``optimizer`` (Accelerate's does)."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def state_bytes_beside_weights(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's states that are on the devices of their parameters."""
    return sum(
        value.nbytes
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.device == parameter.device
    )


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of states that are on the device in every step; ``None``: not known yet.

    For Adam's family they are known before its first step; for others the existing states count.
    """
    there_bytes = state_bytes_beside_weights(optimizer)
    if not isinstance(optimizer, _ADAMS):
        return there_bytes or None
    moments = sum(
        (3 if group.get("amsgrad") else 2) * sum(weight.nbytes for weight in group["params"])
        for group in optimizer.param_groups
    )
    return max(there_bytes, int(moments))  # during the first step only a part exists


def is_streamed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether stepping its parameters part by part gives bitwise the same as stepping all at once."""
    return type(optimizer) in STREAMED


def reject(optimizer: torch.optim.Optimizer, transfer: Transfer) -> None:
    """Raise if the states of ``optimizer`` cannot be moved to the host.

    Raises:
        PlanError: they cannot; the error lists each reason.
    """
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    problems = []

    def problem(expected: str, found: str, hint: str) -> None:
        problems.append(Problem("optimizer (preference: memory_saving)", expected, found, hint))

    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        problem("a torch.optim.Optimizer, whose step calls hooks", kind, "Use preference: performance.")
        raise PlanError(problems)
    if kind.startswith("bitsandbytes."):
        hint = "Use a paged one of theirs (optim: paged_adamw_8bit), which does this itself."
        problem("states that PyTorch's own operators address", kind, hint)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        problem("an optimizer with states of its own", kind, "Use FSDP2, whose states are sharded too.")
    groups = optimizer.param_groups
    for flag in ("capturable", "differentiable"):
        if any(group.get(flag) for group in groups):
            why = (
                "a captured step reads fixed addresses"
                if flag == "capturable"
                else "a graph holds the states"
            )
            problem(f"{flag}: false", f"{flag}: true", f"It cannot be served: {why}.")
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if len(devices) > 1:
        problem("parameters on one device", ", ".join(sorted(map(str, devices))), "")
    elif transfer.overlaps and next(iter(devices)).type == "cpu":
        problem("parameters on an accelerator", "on the cpu", "Their states are in host memory already.")
    if problems:
        raise PlanError(problems)
