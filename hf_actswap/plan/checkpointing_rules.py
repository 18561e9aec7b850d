"""Checks whether a plan can be applied together with Hugging Face's own gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import Problem
from .actions import MemoryPlan, Scope, format_scopes
from .gradient_checkpointing import checkpointing_argument, is_checkpointed
from .model_structure import OUTPUT

_ON = "gradient checkpointing switched on"


def problems_of_checkpointing(
    layers: Mapping[Scope, nn.Module], plan: MemoryPlan, compiled: bool
) -> list[Problem]:
    """Return the requests of a plan that cannot be carried out with gradient checkpointing switched on.

    Args:
        layers: layers of the model, by scope (`ModelStructure.layer_modules`).
        plan: the plan to be applied to the model.
        compiled: whether the model is compiled as a whole, so that rows name no layer in particular.
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
    problems = [_unseen(layers[scope]) for scope in on]
    found = [problem for problem in problems if problem is not None][:1]
    inside = {row.scope for row in plan.rows if row.fate == "swap" and row.op_path != OUTPUT}
    lost = [scope for scope in on if scope in inside]
    if lost and not compiled:
        expected = "of checkpointed layers only inputs swapped (`output` rows of what comes before)"
        hint = "Resolve the plan from its configuration while gradient checkpointing is on."
        found.append(Problem("plan", expected, f"{_ON}, and rows inside layers {format_scopes(lost)}", hint))
    return found


def _unseen(layer: nn.Module) -> Problem | None:
    """Return why what a layer's checkpoint saves cannot be swapped, or ``None``."""
    call: Callable[..., Any] | None = getattr(layer, "_gradient_checkpointing_func", None)
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
