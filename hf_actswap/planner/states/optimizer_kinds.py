"""Which optimizers can have their states on the host, and which can step part by part."""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from ...engine.transfer import Transfer
from ...errors import PlanError, Problem

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
