"""Routed experts of a layer: which of them are understood, and how they are divided.

How they compute and communicate then stands in `routed_experts`, what they save in `expert_products`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import Problem
from .families import EXPERTS, EXPERTS_IMPLEMENTATIONS
from .gradients import TAG
from .parameter_tags import ParameterTags
from .routed_experts import ExpertsLayout, ParallelExperts
from .sequence_region import SequenceRegion

_ARGUMENTS = 3
"""Of experts: hidden states, experts and routing weights of the tokens."""


def experts_of(layer: nn.Module) -> list[str]:
    """Return the paths of a layer's routed experts that are understood."""
    return [
        path
        for path, module in layer.named_modules()
        if path.rpartition(".")[2] == EXPERTS and is_understood(module)
    ]


def problems_of_experts(where: str, layer: nn.Module, path: str, ranks: int) -> Iterator[Problem]:
    """Name what cannot be divided of routed experts.

    Args:
        where: name of the layer.
        layer: that has them.
        path: of theirs in it.
        ranks: of the tensor-parallel group.
    """
    experts: Any = layer.get_submodule(path)
    size = ExpertsLayout.of(experts).inner_size(experts)
    if size % ranks:
        hint = f"Choose a tensor_parallel_size that divides {size}."
        yield Problem(f"{where}.{path}", f"a size of experts that {ranks} ranks divide", str(size), hint)
    used = getattr(getattr(experts, "config", None), "_experts_implementation", "eager") or "eager"
    if used not in EXPERTS_IMPLEMENTATIONS:
        expected = " or ".join(EXPERTS_IMPLEMENTATIONS)
        yield Problem(f"{where}.{path}", f"experts_implementation {expected}", used)
    block: Any = layer.get_submodule(path.rpartition(".")[0])
    if getattr(block, "jitter_noise", 0) > 0:
        hint = "Set config.router_jitter_noise = 0."
        yield Problem(where, "no jitter", "router_jitter_noise, which writes into the shared input", hint)


def divide_experts(layer: nn.Module, path: str, region: SequenceRegion, tags: ParameterTags) -> None:
    """Divide the routed experts at ``path`` of a layer, in place."""
    parent, _, name = path.rpartition(".")
    experts = ParallelExperts(layer.get_submodule(path), region, layer)
    layer.get_submodule(parent)._modules[name] = experts
    if region.enabled and experts.layout.biased:
        tags.add(experts, experts.layout.rows_bias, **{TAG: True})


def is_understood(experts: Any) -> bool:
    """Whether a module is routed experts that compute as those of transformers do."""
    names = {name for name, _ in experts.named_parameters()}
    layout = ExpertsLayout.of(experts)
    if names != set(layout.parameters) or any(
        experts.get_parameter(name).dim() != 3 for name in (layout.columns, layout.rows)
    ):
        return False
    if getattr(experts, "has_post_expert_norm", False) or not hasattr(experts, "num_experts"):
        return False
    takes = [p for p in inspect.signature(experts.forward).parameters.values() if p.name != "self"]
    return hasattr(experts, "has_gate") or (len(takes) == _ARGUMENTS and hasattr(experts, "act_fn"))
