"""The planner's answer for a step on paper: the plan that it would begin with, and what stands beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config import ActSwapConfig, MemoryConfig
from ..plan import MemoryPlan, resolve_plan
from ..planner.budget import BudgetError, budget_bytes, impossible, limits_of
from ..planner.cost.simulate import Simulator
from ..planner.profile import Prediction, Profile
from ..planner.search.find_plan import find_plan, least_peak_bytes
from .output import busy
from .step import StepShape, profile_of, recompute_everything
from .subject import Subject

NOTHING = "nothing"
EVERYTHING = "recompute all"
WRITTEN = "as written"
PLANNED = "planned"


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
        steps: predictions by what is done: `NOTHING`, `EVERYTHING`, `WRITTEN` where fates were written by
            hand, `PLANNED`.
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
    """Predict the steps that others stand beside."""
    layers, family = profile.num_layers, profile.family
    simulator = Simulator(profile)
    plans = {NOTHING: MemoryPlan((), layers, family), EVERYTHING: recompute_everything(layers, family)}
    if written.rows:
        plans[WRITTEN] = written
    return {name: simulator.predict(plan, curve=False) for name, plan in plans.items()}


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
