"""The search for a pipeline: one plan for each stage, within one budget for each device.

A stage is searched as any model is (`find_plan`), with three numbers more. All micro-batches in flight hold
what is kept. Of what swaps, as much is on the device as windows of the others reach (`engine.passes.REACH`).
Where forwards and backwards of others lie between, a copy has a whole cycle of the slowest stage (a forward
and a backward) instead of its own pass, so the link is taken to be that much faster.

The simulated step (`cost.pipeline_step`) says what comes of it. Where a peak is above the budget, or far
below, that stage gets a smaller or larger one; where a stage that waits for copies is slower than the others,
its link counts as slower; and the search runs again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...engine.link import Link
from ...engine.passes import REACH
from ...engine.stats import gib_text
from ...errors import Problem
from ...plan import MemoryPlan
from ..budget import BudgetError
from ..cost.pipeline_step import LONGEST, Pipeline, PipelineStep, StageOnPaper, StageRun
from ..profile import Limits, Profile
from .find_plan import SAFETY, Search, find_plan

_ROUNDS = 5
_NEAR = 0.03
"""As a share: a peak this near below the budget is good enough, a stage slower by more is too slow."""

_SLOWER = 0.75
"""A link that stages wait for is taken to be so much slower in the next round."""


@dataclass
class _Searched:
    """One stage while it is searched.

    Args:
        stage: on paper.
        fixed: what is not decided again.
        limits: of its search; the budget changes from round to round.
        rate_share: of the link, what is counted on.
    """

    stage: StageOnPaper
    fixed: MemoryPlan
    limits: Limits
    rate_share: float = 1.0

    def search(self, cycle_ms: float, crosses: bool) -> MemoryPlan:
        """Return the plan that fits best, or else the one with the least peak.

        Args:
            cycle_ms: a forward and a backward of the slowest stage.
            crosses: whether windows cross the ends of passes.
        """
        stage, profile = self.stage, self.stage.profile
        between = crosses and stage.in_flight > 1
        if between and stage.alternates and profile.link is not None:
            profile = replace(profile, link=_link_over(profile, profile.link, cycle_ms, self.rate_share))
        try:
            found = find_plan(profile, self.fixed, self.limits, insists=False).plan
        except BudgetError:
            found = Search(profile, self.fixed, self.limits, SAFETY).least().plan
        if not between:
            return found
        written = set(self.fixed.rows)
        rows = (
            replace(row, windows=LONGEST) if row.fate == "swap" and row not in written else row
            for row in found.rows
        )
        return replace(found, rows=tuple(rows))

    def is_due(self, plan: MemoryPlan, excess_bytes: int, run: StageRun, cycles_ms: float) -> bool:
        """Correct what it is searched with; return whether it is to be searched again.

        Args:
            plan: of the last step.
            excess_bytes: of its peak, above the budget.
            run: of the step.
            cycles_ms: of all micro-batches on the slowest stage, without waits for copies.
        """
        too_small = excess_bytes < -_NEAR * self.limits.device_bytes and plan.rows != self.fixed.rows
        too_slow = run.busy_ms > (1 + _NEAR) * cycles_ms and run.stall_ms > _NEAR * cycles_ms
        if excess_bytes > 0 or too_small:
            self.limits = replace(self.limits, device_bytes=self.limits.device_bytes - excess_bytes)
        if too_slow:
            self.rate_share *= _SLOWER
        return excess_bytes > 0 or too_small or too_slow


def plan_stages(pipeline: Pipeline, fixed: Sequence[MemoryPlan], limits: Limits) -> PipelineStep:
    """Return the fastest step that was found within the limits.

    Args:
        pipeline: the stages.
        fixed: what the user wrote, by stage.
        limits: of each device.

    Raises:
        BudgetError: no plan of a stage was found that fits; it names the least of each.
        PlanError: scipy is missing.
    """
    budget, moved = limits.device_bytes, limits.frees_optimizer_states
    found = [pipeline.step(fixed, moved)]
    searched = []
    for stage, plan in zip(pipeline.stages, fixed, strict=True):
        waiting = max(float(stage.in_flight) - 1, 0.0)
        own = replace(limits, device_bytes=budget - stage.buffer_bytes, waiting=waiting)
        resident = 2 * REACH if waiting and pipeline.crosses else 0.0
        searched.append(_Searched(stage, plan, replace(own, resident=resident)))
    cycle_ms = max(work.forward_ms + work.backward_ms for work in found[0].works)
    due = [peak > budget for peak in found[0].peaks_bytes]
    plans = list(fixed)
    for _ in range(_ROUNDS):
        if not any(due):
            break
        for number, one in enumerate(searched):
            if due[number]:
                plans[number] = one.search(cycle_ms, pipeline.crosses)
        found.append(step := pipeline.step(plans, moved))
        cycle_ms = max(cycle_ms, *(work.forward_ms + work.backward_ms for work in step.works))
        due = [
            one.is_due(plan, peak - budget, run, cycle_ms * pipeline.count)
            for one, plan, peak, run in zip(searched, plans, step.peaks_bytes, step.runs, strict=True)
        ]
    if len(found) > 1:
        found.append(pipeline.step(_best_of_each(found, budget), moved))
    fitting = [step for step in found if max(step.peaks_bytes) <= budget]
    if not fitting:
        raise _impossible(found, budget)
    return min(fitting, key=lambda step: (step.step_ms, sum(step.peaks_bytes)))


def _link_over(profile: Profile, link: Link, cycle_ms: float, share: float) -> Link:
    """The link that moves in a forward, and in a backward, what it moves in a cycle of the slowest stage."""
    forward_ms = sum(op_event.forward_ms for op_event in profile.op_events)
    out = share * link.out_beside_in_bytes_per_ms * cycle_ms / forward_ms
    back = share * link.in_beside_out_bytes_per_ms * cycle_ms / (profile.compute_ms - forward_ms)
    return Link(out, back, out, back, link.latency_ms)


def _best_of_each(found: Sequence[PipelineStep], budget: int) -> list[MemoryPlan]:
    """Of each stage the plan whose passes took least where its peak was within the budget, else the least."""
    best = []
    for number in range(len(found[0].plans)):
        _, _, at = min(
            (max(step.peaks_bytes[number] - budget, 0), step.runs[number].busy_ms, at)
            for at, step in enumerate(found)
        )
        best.append(found[at].plans[number])
    return best


def _impossible(found: Sequence[PipelineStep], budget: int) -> BudgetError:
    least = [min(step.peaks_bytes[number] for step in found) for number in range(len(found[0].plans))]
    listed = ", ".join(f"stage {number} {gib_text(size, math.ceil)}" for number, size in enumerate(least))
    expected = f"at least {gib_text(max(least), math.ceil)}, the least that was found"
    error = BudgetError([Problem("memory.budget_gib", expected, gib_text(budget), f"By stage: {listed}.")])
    error.least_bytes = max(least)
    return error
