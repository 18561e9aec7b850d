"""A block with routed experts, each divided inside: every rank has its part of every expert.

All ranks route alike, on the whole sequence, so that no token has to travel. An expert's ``I`` features are
divided among the ranks, and the block's output is summed as that of a dense one.

The router is the one thing in the block that is the same on all ranks. Three gradients need care:

- of the routing weights each rank knows what its own parts of the experts contribute: they are summed;
- with that the router's gradients are complete, and bitwise the same, on every rank, the balancing loss
  counted once; its parameters have no tag;
- what it sends back to the block's input would be summed over the ranks with the experts' parts: it is
  divided by their number before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import Problem
from .block_hooks import ReduceHook
from .families import EXPERT_COLUMNS, EXPERT_ROWS, EXPERTS, EXPERTS_IMPLEMENTATIONS, ROUTER
from .full_state import FullLoadHook
from .mappings import copied
from .parameter_tags import ParameterTags
from .scaled_gradient import with_scaled_gradient
from .sequence_region import SequenceRegion
from .weights import Partition, like_parameter


def has_experts(block: nn.Module) -> bool:
    """Whether a block routes its tokens to experts."""
    return isinstance(getattr(block, EXPERTS, None), nn.Module)


def problems_of_experts(where: str, block: nn.Module, ranks: int) -> Iterator[Problem]:
    """Name what cannot be divided in a block with experts."""
    experts: Any = block.get_submodule(EXPERTS)
    names = {name for name, _ in experts.named_parameters()}
    if names != {EXPERT_COLUMNS, EXPERT_ROWS}:
        expected = f"parameters {EXPERT_COLUMNS} [E, 2I, H] and {EXPERT_ROWS} [E, H, I]"
        yield Problem(f"{where}.{EXPERTS}", expected, ", ".join(sorted(names)) or "none")
        return
    size = getattr(experts, EXPERT_ROWS).shape[-1]
    if size % ranks:
        hint = f"Choose a tensor_parallel_size that divides {size}."
        yield Problem(f"{where}.{EXPERTS}", f"a size of experts that {ranks} ranks divide", str(size), hint)
    if getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True):
        yield Problem(f"{where}.{EXPERTS}", "experts stored as [gate; up] rows", "another layout")
    used = getattr(getattr(experts, "config", None), "_experts_implementation", "eager") or "eager"
    if used not in EXPERTS_IMPLEMENTATIONS:
        expected = " or ".join(EXPERTS_IMPLEMENTATIONS)
        yield Problem(f"{where}.{EXPERTS}", f"experts_implementation {expected}", used)
    if getattr(block, "jitter_noise", 0) > 0:
        hint = "Set config.router_jitter_noise = 0."
        yield Problem(where, "no jitter", "router_jitter_noise, which writes into the shared input", hint)
    others = {name for name, _ in block.named_children()} - {EXPERTS, ROUTER}
    inner = [name for name in sorted(others) if any(True for _ in block.get_submodule(name).parameters())]
    if inner or not isinstance(getattr(block, ROUTER, None), nn.Module):
        yield Problem(where, f"modules {ROUTER} and {EXPERTS}", ", ".join(inner) or f"no {ROUTER}")


def divide_experts(block: Any, region: SequenceRegion, tags: ParameterTags) -> dict[str, Partition]:
    """Divide the experts of a block; return how, by parameter."""
    experts, group = block.experts, region.group
    rows = experts.down_proj.shape[-1]
    partitions = {
        EXPERT_COLUMNS: Partition.of(1, 2 * rows, group.size(), stride=2),
        EXPERT_ROWS: Partition.of(2, rows, group.size()),
    }
    for name, partition in partitions.items():
        whole = getattr(experts, name)
        with torch.no_grad():
            setattr(experts, name, like_parameter(partition.part(whole, group.rank()), whole))
        tags.add(experts, name, **partition.tags)
    if hasattr(experts, "intermediate_dim"):
        experts.intermediate_dim = rows // group.size()
    experts.register_load_state_dict_pre_hook(FullLoadHook(partitions, region))
    block.gate.register_forward_pre_hook(_RouterInputHook(region))
    block.gate.register_forward_hook(_RoutingHook(region))
    block.register_forward_hook(ReduceHook(region))
    return partitions


class _RouterInputHook:
    part_of_the_model = True

    def __init__(self, region: SequenceRegion) -> None:
        self._region = region

    def __call__(self, _router: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (with_scaled_gradient(args[0], 1 / self._region.group.size()), *args[1:])


class _RoutingHook:
    """Hook of a router that returns (logits, weights, indices)."""

    part_of_the_model = True

    def __init__(self, region: SequenceRegion) -> None:
        self._region = region

    def __call__(
        self, _router: nn.Module, _args: tuple[Any, ...], output: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        logits, weights, indices = output
        return logits, copied(weights, self._region.group), indices
