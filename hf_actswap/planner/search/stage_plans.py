"""Searches for the plans of a pipeline: one for each stage, within one budget for each device.

Each stage is searched as any model is (`find_plan`), with four differences. All micro-batches in flight hold
what is kept. They share host memory equally. Swapped tensors of other micro-batches are on the device as far
as windows reach (`engine.passes.REACH`). If passes of other micro-batches run between a forward and its
backward, a copy has a whole cycle of the slowest stage (a forward and a backward) instead of its own pass; so
the link is assumed to be that much faster.

Then the step is simulated (`cost.pipeline_step`). A stage whose peak is above the budget, or far below, gets
a smaller or larger budget. If a stage waits for copies and is slower than the others, its link is assumed to
be slower. Then these stages are searched again.
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
from ..cost.pipeline_step import LONGEST, Pipeline, PipelineStep, SimulatedStage, StageRun
from ..profile import Limits, Profile
from .find_plan import SAFETY, Search, find_plan

_ROUNDS = 5
_NEAR = 0.03
"""A peak below the budget by at most this share is good enough; a stage slower by more is too slow."""

_SLOWER = 0.75
"""Factor of the assumed rate of a link in the next round, if its stage waits for it."""


@dataclass
class _Searched:
    """One stage while it is searched.

    Args:
        stage: the stage.
        fixed: fates that are decided already.
        limits: limits of its search; the budget changes from round to round.
        rate_share: share of the link's rate that the search assumes.
    """

    stage: SimulatedStage
    fixed: MemoryPlan
    limits: Limits
    rate_share: float = 1.0

    def search(self, cycle_ms: float, crosses: bool) -> MemoryPlan:
        """Return the fastest plan that fits, or else the one with the least peak.

        Args:
            cycle_ms: time of a forward and a backward of the slowest stage.
            crosses: whether windows reach into other passes.
        """
        stage, profile = self.stage, self.stage.profile
        between = crosses and stage.in_flight > 1
        if between and stage.alternates and profile.link is not None:
            profile = replace(profile, link=_link_over(profile, profile.link, cycle_ms, self.rate_share))
        try:
            found = find_plan(profile, self.fixed, self.limits, search_least=False).plan
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
        """Correct budget and assumed rate by a simulated step; return whether to search the stage again.

        Args:
            plan: the stage's plan in that step.
            excess_bytes: by how much its peak exceeded the budget; negative: it was below.
            run: what the stage did in that step.
            cycles_ms: time of all micro-batches on the slowest stage, without waits for copies.
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
        fixed: fates that the user wrote, by stage.
        limits: limits of each device.

    Raises:
        BudgetError: for some stage no plan was found that fits; the error names the least peak of each.
        PlanError: scipy is missing.
    """
    budget, moved = limits.device_bytes, limits.frees_optimizer_states
    found = [pipeline.step(fixed, moved)]
    searched = []
    for stage, plan in zip(pipeline.stages, fixed, strict=True):
        waiting = max(float(stage.in_flight) - 1, 0.0)
        host = None if limits.host_bytes is None else int(limits.host_bytes / (1 + waiting))
        own = replace(limits, device_bytes=budget - stage.buffer_bytes, waiting=waiting, host_bytes=host)
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
    """Return a link that moves in a forward, or a backward, what ``link`` moves in ``cycle_ms``."""
    forward_ms = sum(op_event.forward_ms for op_event in profile.op_events)
    out = share * link.out_beside_in_bytes_per_ms * cycle_ms / forward_ms
    back = share * link.in_beside_out_bytes_per_ms * cycle_ms / (profile.compute_ms - forward_ms)
    return Link(out, back, out, back, link.latency_ms)


def _best_of_each(found: Sequence[PipelineStep], budget: int) -> list[MemoryPlan]:
    """Return for each stage its fastest plan whose peak was within the budget, else that of least peak."""
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
    error.least_bytes, error.budget_bytes = max(least), budget
    return error
