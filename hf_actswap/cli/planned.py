"""The planner's answer for a step on paper: the plan that it would begin with, and what stands beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ..config import ActSwapConfig, MemoryConfig
from ..engine.stats import GIB
from ..errors import PlanError
from ..plan import MemoryPlan, resolve_plan
from ..planner.budget import BudgetError, budget_bytes, impossible, limits_of
from ..planner.cost.simulate import Simulator
from ..planner.profile import Prediction, Profile
from ..planner.search.find_plan import find_plan, least_peak_bytes
from .numbers_text import size_text, step_ms_text
from .output import busy
from .step import StepShape, profile_of, recompute_everything
from .subject import Subject

NOTHING = "nothing"
EVERYTHING = "recompute all"
WRITTEN = "as written"
BETTER = "better"
PLANNED = "planned"

_POOR_SHARE = 0.01
"""What is written by hand may take this share of a step more than the planner's best within the same peak."""


@dataclass(frozen=True)
class Planned:
    """What the planner finds.

    Args:
        subject: the model.
        step: the step that was planned for.
        memory: the section that was in force.
        profile: of the step without a plan.
        plan: that was found.
        budget_bytes: that it keeps within.
        steps: predictions by what is done: see `usual_steps`, and `PLANNED`.
    """

    subject: Subject
    step: StepShape
    memory: MemoryConfig
    profile: Profile
    plan: MemoryPlan
    budget_bytes: int
    steps: Mapping[str, Prediction]

    @property
    def prediction(self) -> Prediction:
        """Of the plan that was found."""
        return self.steps[PLANNED]


def memory_in_force(config: ActSwapConfig, budget_gib: float | None) -> MemoryConfig:
    """Return the ``memory`` section, with a mode if it has none, and with another budget if one is given."""
    memory = config.memory
    if memory.mode == "off":
        memory = replace(memory, mode="smart_swap")
    return memory if budget_gib is None else replace(memory, budget_gib=budget_gib, reduce_by_gib=None)


def usual_steps(profile: Profile, written: MemoryPlan) -> dict[str, Prediction]:
    """Predict the steps that others stand beside.

    Returns:
        `NOTHING`, `EVERYTHING`; `WRITTEN` where fates were written by hand; `BETTER`, what the planner would
        do in their place, where they are a poor deal.
    """
    layers, family = profile.num_layers, profile.family
    simulator = Simulator(profile)
    plans = {NOTHING: MemoryPlan((), layers, family), EVERYTHING: recompute_everything(layers, family)}
    if written.rows:
        plans[WRITTEN] = written
    steps = {name: simulator.predict(plan, curve=False) for name, plan in plans.items()}
    if written.rows and _more_ms(steps, WRITTEN) > _POOR_SHARE * steps[NOTHING].step_ms:
        limits = limits_of(MemoryConfig(), steps[WRITTEN].peak_bytes, written.min_tensor_bytes)
        with suppress(PlanError):  # no solver, or nothing but what is written fits
            best = find_plan(profile, plans[NOTHING], limits).prediction
            if steps[WRITTEN].step_ms - best.step_ms > _POOR_SHARE * steps[NOTHING].step_ms:
                steps[BETTER] = best
    return steps


def poor_deal(steps: Mapping[str, Prediction]) -> Iterator[str]:
    """Yield a line if what is written by hand costs much more time than it need."""
    if BETTER not in steps:
        return
    saved, best = (
        size_text(max(steps[NOTHING].peak_bytes - steps[name].peak_bytes, 0)) for name in (WRITTEN, BETTER)
    )
    budget = math.ceil(steps[WRITTEN].peak_bytes / GIB * 100) / 100
    cost, best_cost = (step_ms_text(_more_ms(steps, name)) for name in (WRITTEN, BETTER))
    yield (
        f"! A poor deal: {saved} less for {cost} more a step. Better: {best} less for "
        f"{best_cost}, by `memory: {{mode: adaptive, budget_gib: "
        f"{budget:g}}}` and no fates by hand, or by `auto`, which uses all that the device has."
    )


def _more_ms(steps: Mapping[str, Prediction], name: str) -> float:
    return steps[name].step_ms - steps[NOTHING].step_ms


def planned(
    found: Subject,
    step: StepShape,
    config: ActSwapConfig,
    memory: MemoryConfig,
    profile: Profile | None = None,
) -> Planned:
    """Search a plan; what is written by hand stays as it is.

    Args:
        found: the model.
        step: to plan for.
        config: whose fates stay.
        memory: the section that is in force.
        profile: of this step of this model; ``None``: it is computed from shapes.

    Raises:
        BudgetError: nothing fits; it names what would.
        PlanError: the configuration does not fit the model, or the planner's solver is missing.
        ModelError: the model does not run on fake tensors.
    """
    fixed = resolve_plan(config, found.shape)
    if profile is None:
        with busy(f"profile of {found.described()}"):
            profile = profile_of(found, step)
    with busy("search"):
        return search(found, step, memory, profile, fixed)


def search(
    found: Subject, step: StepShape, memory: MemoryConfig, profile: Profile, fixed: MemoryPlan
) -> Planned:
    """Search a plan for a profile; see `planned`."""
    moved = memory.preference == "memory_saving"
    unplanned = Simulator(profile).predict(fixed, optimizer_states_moved=moved, curve=False)
    budget = budget_bytes(memory, profile.device_bytes, unplanned.peak_bytes)
    limits = limits_of(memory, budget, fixed.min_tensor_bytes)
    try:
        best = find_plan(profile, fixed, limits)
    except BudgetError:
        least = least_peak_bytes(profile, fixed, limits)
        raise impossible(memory, budget, least, unplanned.peak_bytes) from None
    steps = {**usual_steps(profile, fixed), PLANNED: best.prediction}
    return Planned(found, step, memory, profile, best.plan, budget, steps)
