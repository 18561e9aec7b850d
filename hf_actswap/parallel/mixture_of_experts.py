"""Blocks with routed experts: which of them are understood, and how they are divided.

How they compute and communicate then stands in `routed_experts`, what they save in `expert_products`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import Problem
from .families import EXPERT_COLUMNS, EXPERT_ROWS, EXPERTS, EXPERTS_IMPLEMENTATIONS, ROUTER
from .parameter_tags import ParameterTags
from .routed_experts import ParallelExperts
from .sequence_region import SequenceRegion

_DEFAULT_GATE = "_default_apply_gate"
"""Name of transformers' function for experts that compute ``act_fn(gate) * up``."""


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
    gate = getattr(type(experts), "_apply_gate", None)
    if not isinstance(getattr(experts, "act_fn", None), nn.Module) or (
        gate is not None and gate.__name__ != _DEFAULT_GATE
    ):
        yield Problem(f"{where}.{EXPERTS}", "experts that compute act_fn(gate) * up", "another activation")
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


def divide_experts(layer: nn.Module, path: str, region: SequenceRegion, tags: ParameterTags) -> None:
    """Divide the experts of the block ``path`` of a layer, in place."""
    block = layer.get_submodule(path)
    block._modules[EXPERTS] = ParallelExperts(block.get_submodule(EXPERTS), region, layer)
    if region.enabled:
        tags.add_summed(block.get_submodule(ROUTER))
