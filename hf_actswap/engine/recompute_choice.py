"""Before the first step: what is recomputed although it would save more than it drops is kept."""

from __future__ import annotations

import logging

from ..plan.actions import MemoryPlan
from ..plan.overwritten import keep_what_is_overwritten
from ..plan.recompute_pays import (
    keep_what_costs,
    keeps_inside,
    recomputes_selectively,
    say_what_is_held,
)
from .foreseen import Foreseen

logger = logging.getLogger(__name__)


def plan_that_pays(plan: MemoryPlan, foreseen: Foreseen) -> MemoryPlan:
    """Return ``plan`` with selective recomputation only where the bytes saved fall by it.

    And with an override for each result that is held because its op is not run again.

    Only the real shapes and types can tell, so this is decided at the first training forward. Where that is
    not known (compiled layers, models that do not run on fake tensors) the plan stands as it is, and of the
    latter a line says so.

    Args:
        plan: on the model.
        foreseen: what the forward that starts will save.
    """
    if foreseen.compiled or not (recomputes_selectively(plan) or keeps_inside(plan)):
        return plan
    saved = foreseen.saved()
    if saved is None:
        if why := foreseen.why_not:
            logger.info("All that is named is recomputed, whether it pays or not: no fake run (%s).", why)
        return plan
    # What reads an op that now stays may have relied on its being rebuilt.
    chosen = keep_what_is_overwritten(keep_what_costs(plan, saved), foreseen.outline)
    chosen = say_what_is_held(chosen, saved)
    for override in chosen.overrides[len(plan.overrides) :]:
        logger.info("%s", override)
    return chosen
