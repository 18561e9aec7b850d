"""Before the first step: what is recomputed although it would save more than it drops is kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..plan.actions import MemoryPlan
from ..plan.outline import Outline
from ..plan.recompute_pays import keep_what_costs, recomputes_selectively
from ..plan.save_recorder import record_saved

logger = logging.getLogger(__name__)


def plan_that_pays(
    plan: MemoryPlan, model: nn.Module, outline: Outline, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> MemoryPlan:
    """Return ``plan`` with selective recomputation only where the bytes saved fall by it.

    Only the real shapes and types can tell, so this is decided at the first training forward, which is
    recorded on fake tensors. Where that cannot be done (compiled layers, models that do not run on fake
    tensors) the plan stands as it is, and of the latter a line says so.

    Args:
        plan: on the model.
        model: inside its wrappers.
        outline: of this model.
        args, kwargs: of its call.
    """
    if not recomputes_selectively(plan) or torch.compiler.is_compiling():
        return plan
    if outline.compiled or any(layer.compiled for layer in outline.layers):
        return plan
    try:
        saved = record_saved(model, outline, args, kwargs)
    except Exception as error:  # the model's own code runs: it may raise anything
        why = next(iter(str(error).splitlines()), "")
        logger.info("All that is named is recomputed, whether it pays or not: no fake run (%s).", why)
        logger.debug("no fake run", exc_info=True)
        return plan
    chosen = keep_what_costs(plan, saved)
    for override in chosen.overrides[len(plan.overrides) :]:
        logger.info("%s", override)
    return chosen
