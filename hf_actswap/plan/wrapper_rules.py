"""Checks a plan against compiled layers, and against Hugging Face's own gradient checkpointing.

A compiled region saves what its partitioner chose: tensors without the names of the ops that made them. So
such a layer can only be swapped whole, by size and order. Recomputation of single ops is possible: the tracer
records which module and function each op comes from, and the partitioner obeys a tag on the op
(`engine/compiled_regions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import unwrap
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config import ActSwapConfig
from ..config.schema import LayerSwapRule
from ..errors import Problem
from ..releases import checkpointing_argument
from .actions import COMPILE_BUDGET, Adjustment, MemoryPlan, PlanRow, Scope, format_scopes
from .model_structure import OUTPUT, LayerStructure, ModelStructure, is_below
from .opnames import EXPERTS_MODULE
from .wrappers import is_checkpointed

_ONE_BY_ONE = "layers that are compiled one by one"
_REGIONAL = "Compile the layers one by one (regional compilation), or write rules that hold for all layers."
_HOW_TO_COMPILE = (
    "Compile the layers first, one by one: `layer.compile()`, or regional compilation "
    "(ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1 beside torch_compile=True)."
)
_CUDA_GRAPHS = Problem(
    "swap_config",
    "compiled layers that are not run as CUDA graphs",
    "torch.compile with CUDA graphs: they keep what they save at fixed addresses, so swapping frees nothing",
    'Compile with the default mode or "max-autotune-no-cudagraphs".',
)


def default_as_layer_swap(
    config: ActSwapConfig, structure: ModelStructure
) -> tuple[ActSwapConfig, list[Adjustment]]:
    """Return ``config``, with layer swap as the default strategy if layers are compiled; and adjustments."""
    swap = config.swap_config
    compiled = structure.compiles
    if not (compiled and swap.swap and swap.layer_swap is None and swap.op_swap is None):
        return config, []
    rule = LayerSwapRule(swap.default_prefetch, True)
    reason = "a compiled layer saves tensors and not ops: all that it saves is swapped, by size and order"
    changed = Adjustment("swap_config.swap", (), "", "the attention core", "layer_swap of all layers", reason)
    return replace(config, swap_config=replace(swap, layer_swap=(rule,))), [changed]


def problems_of_compiled(plan: MemoryPlan, structure: ModelStructure) -> list[Problem]:
    """Return requests that compiled layers cannot carry out, and compile budgets of other layers."""
    problems = []
    compiled = {layer.index for layer in structure.all_layers if layer.compiled}
    budgeted = {row.scope for row in plan.rows if COMPILE_BUDGET in row.parameters} - compiled
    if without := [layer.index for layer in structure.all_layers if layer.index in budgeted]:
        one_by_one = f"layers {format_scopes(without)} not compiled"
        found = "a model compiled whole" if structure.compiled else one_by_one
        where = "recompute_config.compile_budget"
        problems.append(Problem(where, _ONE_BY_ONE, found, _HOW_TO_COMPILE))
    compiled |= {layer.index for layer in structure.layers if structure.compiled}
    named = [
        row
        for row in plan.rows
        if row.scope in compiled and row.op_path not in ("", OUTPUT) and row.fate != "keep"
    ]
    swapped = {row.op_path for row in named if row.fate != "recompute" or structure.compiled}
    if swapped:
        found = ", ".join(sorted(swapped))
        hint = "Write layer_swap for these layers, or do not compile them."
        problems.append(Problem("plan", "whole layers where layers are compiled", found, hint))
    elif not structure.compiled:
        problems += _problems_of_tags(named, structure)
    if structure.compiled:
        rows = [plan.row(layer, "") for layer in range(plan.num_layers)]
        if len({("keep", None) if row is None else (row.fate, row.windows) for row in rows}) > 1:
            expected = "one fate for all layers where the whole model is compiled"
            problems.append(Problem("layers", expected, "several", _REGIONAL))
        if any(row is not None and row.fate == "recompute" for row in rows):
            problems.append(Problem("recompute", _ONE_BY_ONE, "a model compiled whole", _REGIONAL))
    graphs = structure.cuda_graphs or any(stack.cuda_graphs for stack in structure.stacks)
    if graphs and any(row.fate == "swap" and row.scope in compiled for row in plan.rows):
        problems.append(_CUDA_GRAPHS)
    inside = {layer.module_path for stack in structure.stacks if stack.compiled for layer in stack.layers}
    if lost := [row.scope for row in plan.rows if row.scope in inside and row.fate != "keep"]:
        found = f"{format_scopes(set(lost))} inside compiled code"
        problems.append(Problem("stacks", _ONE_BY_ONE, found, _REGIONAL))
    return problems


def _problems_of_tags(rows: list[PlanRow], structure: ModelStructure) -> list[Problem]:
    """Return a problem for each recomputed op that cannot be told apart in the compiler's trace."""
    layers = {layer.index: layer for layer in structure.all_layers}
    why: dict[tuple[str, str], list[Scope]] = {}
    for row in rows:
        if reason := _untaggable(layers[row.scope], row, structure):
            why.setdefault((row.op_path, reason), []).append(row.scope)
    return [
        Problem(
            "recompute_config.select_recompute",
            "ops that can be told apart in a compiled layer",
            f"{path!r} in layers {format_scopes(scopes)}: {reason}",
            "Do not compile these layers, or write recompute or compile_budget for them.",
        )
        for (path, reason), scopes in why.items()
    ]


def _untaggable(layer: LayerStructure, row: PlanRow, structure: ModelStructure) -> str:
    """Return why the op of a row cannot be tagged for recomputation; empty: it can."""
    if row.ordinal is not None:
        return "single calls of an op are not told apart there"
    if not structure.functions_known:
        return f"only its modules are known ({structure.why_not})"
    names = [op.path for op in layer.ops if op.path.rpartition(".")[2] == EXPERTS_MODULE]
    if any(is_below(row.op_path, path) or is_below(path, row.op_path) for path in names):
        return "routed experts depend on data, which breaks the graph"
    seen = any(is_below(call.key[0], row.op_path) for call in layer.calls)
    return "" if seen else "nothing in it is a function that the tracer names"


_ON = "gradient checkpointing switched on"
_CHECKPOINTS = "_gradient_checkpointing_func"


def problems_of_checkpointing(
    layers: Mapping[Scope, nn.Module], plan: MemoryPlan, compiled: bool
) -> list[Problem]:
    """Return the requests of a plan that cannot be carried out with gradient checkpointing switched on.

    ``compiled``: whether the model is compiled as a whole, so that rows name no layer in particular.
    """
    on = [scope for scope, layer in layers.items() if is_checkpointed(layer)]
    if not on or not plan.rows:
        return []
    if recomputed := {row.scope for row in plan.rows if row.fate == "recompute"}:
        where = format_scopes(recomputed)
        hint = (
            f"Use recompute_config and switch gradient checkpointing off ({checkpointing_argument()}=False): "
            "{recompute: true} does the same, and it can name layers and ops."
        )
        expected = "gradient checkpointing or a recompute_config that recomputes something, not both"
        return [Problem("model", expected, f"{_ON}, and recomputation in layers {where}", hint)]
    found = [problem for scope in on if (problem := _unseen(layers[scope])) is not None][:1]
    inside = {row.scope for row in plan.rows if row.fate == "swap" and row.op_path != OUTPUT}
    lost = [scope for scope in on if scope in inside]
    if lost and not compiled:
        expected = "of checkpointed layers only inputs swapped (`output` rows of what comes before)"
        hint = "Resolve the plan from its configuration while gradient checkpointing is on."
        found.append(Problem("plan", expected, f"{_ON}, and rows inside layers {format_scopes(lost)}", hint))
    return found


def problems_of_checkpointing_around(
    root: nn.Module, structure: ModelStructure, plan: MemoryPlan
) -> list[Problem]:
    """Return the conflict of a plan with modules that checkpoint calls of layers, as models of diffusers do.

    Such a layer has no switch of its own, and nothing that a plan says of what is inside it has an effect.
    """
    layers = structure.layer_modules(root)
    named = {id(layers[row.scope]): row.scope for row in plan.rows if row.scope in layers}
    inside = {
        scope
        for module in root.modules()
        if is_checkpointed(module) and _CHECKPOINTS in unwrap(type(module).forward).__code__.co_names
        for child in module.modules()
        if (scope := named.get(id(child))) is not None and not is_checkpointed(child)
    }
    if not inside:
        return []
    expected = "gradient checkpointing or a plan, not both"
    found = f"{_ON} around layers {format_scopes(inside)}, which the plan names"
    without = "Leave enable_gradient_checkpointing() (--gradient_checkpointing) out"
    hint = f"{without}: {{recompute: true}} does the same."
    return [Problem("model", expected, found, hint)]


def _unseen(layer: nn.Module) -> Problem | None:
    call: Callable[..., Any] | None = getattr(layer, _CHECKPOINTS, None)
    function, keywords = getattr(call, "func", call), getattr(call, "keywords", {})
    if function is not checkpoint:
        expected = "gradient checkpointing whose inputs saved-tensor hooks see, beside swap"
        found = f"{_ON}, with offload=True or a function of its own"
        return Problem("model", expected, found, "Leave offload out: swap moves the inputs, beside compute.")
    if keywords.get("use_reentrant", True) is not False:
        expected = "gradient checkpointing with use_reentrant=False beside swap"
        hint = (
            "A reentrant checkpoint makes a layer one operator, and windows count operators. Write "
            f'{checkpointing_argument()}_kwargs={{"use_reentrant": False}}.'
        )
        return Problem("model", expected, f"{_ON}, with use_reentrant=True", hint)
    return None
