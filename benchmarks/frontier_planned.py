"""The planner as a method of the frontier: budgets, and training until its plan is stable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.frontier_memory import give_back_cached_memory
from benchmarks.frontier_result import Result
from benchmarks.frontier_stack import TrainingStep, timed_step_ms
from hf_actswap.apply import plan_while_training
from hf_actswap.config import load_config
from hf_actswap.engine import SwapStats
from hf_actswap.plan import MemoryPlan, outline, resolve_plan
from hf_actswap.planner import CountingMeter, Planner
from hf_actswap.planner.trials import best_trial

GIB = 2**30
MOST_STEPS = 24
"""Whoever is not stable by then is measured as it is; ``steps_to_stable`` says so."""


@dataclass(frozen=True)
class Budget:
    """What the planner is allowed, from what others took on the same workload.

    Args:
        peak_of: a row whose peak is the budget; ``""``: see ``share``.
        share: of eager's activation peak, added to what is not activations.
        reduce_share: of eager's activation peak, by how much the peak shall fall (``reduce_by_gib``); 0: see
            above.
    """

    peak_of: str = ""
    share: float = 0.0
    reduce_share: float = 0.0

    @property
    def needs(self) -> tuple[str, ...]:
        """Rows that must have been measured before, eager apart."""
        return (self.peak_of,) if self.peak_of else ()

    def memory(self, results: Mapping[str, Result]) -> tuple[dict[str, float], int] | None:
        """Return the key of the ``memory`` section and the budget in bytes, or ``None``: nobody knows.

        Peaks are what the allocator held where there is one: that is what the planner keeps within.

        Args:
            results: of this workload so far, by method.
        """
        eager = results.get("eager")
        if eager is None or not eager.activation_bytes or _peak_bytes(eager) is None:
            return None
        if self.peak_of:
            base = results.get(self.peak_of)
            peak = None if base is None or base.ms is None else _peak_bytes(base)
            return None if peak is None else ({"budget_gib": peak / GIB}, peak)
        kept_share = self.share or 1 - self.reduce_share
        peak = (_peak_bytes(eager) or 0) - round((1 - kept_share) * eager.activation_bytes)
        if self.reduce_share:
            return {"reduce_by_gib": self.reduce_share * eager.activation_bytes / GIB}, peak
        return {"budget_gib": peak / GIB}, peak


def _peak_bytes(result: Result) -> int | None:
    return result.peak_reserved_bytes or result.peak_allocated_bytes


@dataclass
class Planned:
    """A planner that stands where an applied plan stands, and what it took to get there.

    Args:
        planner: on the model.
        budget_bytes: of the row.
        step_ms: of each step until it was stable.
    """

    planner: Planner
    budget_bytes: int
    step_ms: list[float] = field(default_factory=list)

    @property
    def plan(self) -> MemoryPlan:
        """What is on the model."""
        return self.planner.plan

    def stats(self) -> SwapStats:
        """Totals over all plans so far."""
        return self.planner.stats()

    def fill(self, result: Result) -> None:
        """Write the planner's own numbers into a row."""
        best = best_trial(self.planner.trials, self.budget_bytes)
        result.budget_bytes = self.budget_bytes
        result.planner_step_ms = self.step_ms
        result.steps_to_stable = len(self.step_ms) if self.planner.phase == "stable" else None
        result.planning_s = max(self.planner.planning_s, default=None)
        result.trials = len(self.planner.trials)
        if best is not None:
            result.predicted_peak_bytes = best.prediction.peak_bytes
            result.predicted_ms = best.prediction.step_ms


@contextmanager
def actswap_plan(step: TrainingStep, options: Mapping[str, Any]) -> Iterator[Planned]:
    """Train until the planner's plan is stable, and keep it on.

    Args:
        step: its context tells the planner of the end of each step.
        options: ``memory``: keys of the section; ``budget_bytes``: what they come to.
    """
    planned = _start(step, options)
    before, step.context = step.context, _ending_steps(step.context, planned.planner)
    try:
        while planned.planner.phase != "stable" and len(planned.step_ms) < MOST_STEPS:
            planned.step_ms.append(timed_step_ms(step))
        yield planned
    finally:
        step.context = before
        planned.planner.remove()
        give_back_cached_memory(step.device)


def _start(step: TrainingStep, options: Mapping[str, Any]) -> Planned:
    config = load_config({"memory": {"mode": "adaptive", **options["memory"]}})
    shape = outline(step.model)
    meter = None
    if step.device.type == "cpu":  # counts what the frontier counts, and refuses nothing
        meter = CountingMeter()
        leaves = step.leaves().values()
        meter.own(item for leaf in leaves for item in (leaf.detach(), leaf.grad) if item is not None)
    planner = plan_while_training(
        step.model, resolve_plan(config, shape), shape, config.memory, counts_steps=False, meter=meter
    )
    return Planned(planner, options["budget_bytes"])


def _ending_steps(
    inner: Callable[[], AbstractContextManager[Any]], planner: Planner
) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def around_a_step() -> Iterator[None]:
        with inner():
            yield
        planner.step_ended()

    return around_a_step


def options_of(budget: Budget, compiles: bool, results: Sequence[Result]) -> dict[str, Any] | str:
    """Return what a row's setup is given, or why its budget is not known.

    Args:
        budget: of the row.
        compiles: whether `frontier_methods.compiled` puts it on.
        results: of the workload so far.
    """
    found = budget.memory({result.method: result for result in results})
    if found is None:
        return f"its budget is the peak of {budget.peak_of or 'eager'}, which was not measured"
    memory, budget_bytes = found
    planned = {"memory": memory, "budget_bytes": budget_bytes}
    return {"planned": planned} if compiles else planned
