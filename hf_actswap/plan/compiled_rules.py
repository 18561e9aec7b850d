"""What can be wished for layers that are compiled.

A compiled region saves what its partitioner chose: tensors in an order, without the names of the ops that
made them. So its fates are a layer's, by size and order, and rules that name ops inside cannot be kept.
"""

from __future__ import annotations

from dataclasses import replace

from ..config.schema import ActSwapConfig, LayerSwapRule
from ..errors import Problem
from .actions import MemoryPlan, Override
from .outline import OUTPUT, Outline

_REGIONAL = "Compile the layers one by one (regional compilation), or write rules that hold for all layers."
_BY_LAYER = "Write layer_swap for these layers, or do not compile them."


def by_layer(config: ActSwapConfig, outline: Outline) -> tuple[ActSwapConfig, list[Override]]:
    """Turn the default strategy into a layer swap where layers are compiled: there are no ops to name."""
    swap = config.swap_config
    compiled = outline.compiled or any(layer.compiled for layer in outline.layers)
    if not (compiled and swap.swap and swap.layer_swap is None and swap.op_swap is None):
        return config, []
    rule = LayerSwapRule(swap.default_prefetch, True)
    reason = "a compiled layer saves tensors and not ops: all that it saves is swapped, by size and order"
    changed = Override("swap_config.swap", (), "", "the attention core", "layer_swap of all layers", reason)
    return replace(config, swap_config=replace(swap, layer_swap=(rule,))), [changed]


def problems_of_compiled(plan: MemoryPlan, outline: Outline) -> list[Problem]:
    """Return what a plan asks of compiled layers that cannot be done."""
    problems = []
    compiled = {layer.index for layer in outline.layers if layer.compiled or outline.compiled}
    named = sorted(
        {
            row.op_path
            for row in plan.rows
            if row.scope in compiled and row.op_path not in ("", OUTPUT) and row.fate != "keep"
        }
    )
    if named:
        found = ", ".join(named)
        problems.append(Problem("plan", "whole layers where layers are compiled", found, _BY_LAYER))
    if outline.compiled:
        fates = {
            (row.fate, row.windows) if (row := plan.row(layer, "")) is not None else ("keep", None)
            for layer in range(plan.num_layers)
        }
        if len(fates) > 1:
            problems.append(
                Problem(
                    "layers",
                    "one fate for all layers where the whole model is compiled",
                    "several",
                    _REGIONAL,
                )
            )
        if any(fate == "recompute" for fate, _ in fates):
            problems.append(
                Problem(
                    "recompute", "layers that are compiled one by one", "a model compiled whole", _REGIONAL
                )
            )
    return problems
