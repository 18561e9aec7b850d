"""Wishes that change nothing here, and wishes that this version cannot carry out yet."""

from __future__ import annotations

from ..config import ActSwapConfig
from .actions import Override
from .outline import Outline

_NO_COMMUNICATION = "tensor_parallel_size is 1: there is no communication inside layers"


def wishes_without_effect(config: ActSwapConfig, outline: Outline) -> list[Override]:
    """Return an override for each key that is set and has nothing to act on."""
    recompute, swap, parallel = config.recompute_config, config.swap_config, config.parallel_config
    found: list[tuple[str, str, str]] = []
    if not swap.swap:
        for key in ("layer_swap", "op_swap", "recompute_input", "select_recompute_input"):
            if getattr(swap, key):
                found.append((f"swap_config.{key}", "swap", "swap_config.swap is false"))
    if parallel.tensor_parallel_size == 1 and not outline.communicates:
        if recompute.select_comm_recompute:
            found.append(
                ("recompute_config.select_comm_recompute", "recompute communication", _NO_COMMUNICATION)
            )
        if recompute.select_comm_recompute_exclude:
            key = "recompute_config.select_comm_recompute_exclude"
            found.append((key, "keep communication", _NO_COMMUNICATION))
        if not recompute.mp_comm_recompute:
            found.append(("recompute_config.mp_comm_recompute", "false", _NO_COMMUNICATION))
    elif config.memory.mode != "off" and recompute.select_comm_recompute is False:
        reason = "the planner chooses, among layers that save their part and gather it again"
        found.append(("recompute_config.select_comm_recompute", "what is gathered is kept", reason))
    if parallel.tensor_parallel_size == 1:
        if recompute.recompute_slice_activation:
            found.append(("recompute_config.recompute_slice_activation", "slices", _NO_COMMUNICATION))
        if parallel.sequence_parallel_enabled:
            reason = "sequence parallelism splits the tensor-parallel group, whose size is 1"
            found.append(("parallel_config.sequence_parallel_enabled", "true", reason))
    if recompute.parallel_optimizer_comm_recompute and not outline.sharded:
        reason = (
            "weights are not gathered from an optimizer-sharding group here (FSDP2: reshard_after_forward)"
        )
        found.append(("recompute_config.parallel_optimizer_comm_recompute", "true", reason))
    memory = config.memory
    if memory.mode == "off" and (memory.budget_gib or memory.reduce_by_gib or memory.plan_file):
        found.append(("memory", "a budget or a plan file", "memory.mode is off"))
    return [Override(where, (), "", asked, "no effect", reason) for where, asked, reason in found]


def unbuilt_wishes(config: ActSwapConfig, outline: Outline) -> tuple[str, ...]:
    """Return what the configuration asks for that resolves and cannot be applied by this version."""
    wishes = []
    size = config.parallel_config.tensor_parallel_size
    if size > 1 and not outline.communicates:
        wishes.append(f"parallel_config.tensor_parallel_size: {size} (tensor parallelism)")
    return tuple(wishes)
