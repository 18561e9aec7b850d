"""Searches for a plan: keep, swap or recompute for each op of each layer, so that the step is shortest.

1. The step is cut into segments; equal layers share one graph (`layer_graph`).
2. For each kind of layer, the options that can be part of a best plan are listed (`layer_options`).
3. A mixed-integer program over the whole step chooses one option for each layer (`layer_milp`).
4. Windows are chosen for what is swapped, and the plan's rows are written (`planned_rows`).
5. The step is simulated under the plan (`simulate`). If its peak is above the budget, or far below, the
   program gets a smaller or larger budget, and 3 to 5 run again. The best simulated plan wins.

The same input gives the same plan on every rank: the result depends on no clock and no random number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from ...engine.stats import gib_text
from ...errors import Problem
from ...plan.actions import MemoryPlan
from ...plan.model_structure import OUTPUT
from ...plan.settle import keep_what_costs
from ..budget import BudgetError
from ..cost.compiled_shares import compile_points_of, offered_points
from ..cost.simulate import Simulator
from ..profile import CompileVariant, Limits, Prediction, Profile
from .layer_graph import effective_min_bytes, segments_of
from .layer_milp import Caps, Solution, solve
from .layer_options import LinkRate, Option, as_chosen, need_scipy, options_of
from .planned_rows import Choice, plan_of

SAFETY = 1.05
"""Copies are assumed to take this many times as long as measured."""

_ROUNDS, _ROUNDS_OF_OTHERS, _LEAST_ROUNDS = 6, 3, 8
_NEAR = 0.01
"""A peak this near below the budget, as a share of what a plan can change, is good enough."""

_HASTE = (0.95, 0.8)
"""Safety factors of shorter windows, tried too if layers are compiled. Hooks are then a layer apart: a window
that just misses one costs memory for a whole layer, a shorter one costs a wait. Both are simulated."""

_MOST_SHARES = 96
"""Number of parts, over all layers, into which swapped bytes may be divided: the fewer layers, the finer."""


@dataclass(frozen=True)
class Found:
    """A plan that was found, with its prediction.

    Args:
        plan: has the rows written by hand, and those that were found.
        prediction: its prediction.
        bound_ms: a lower bound of the step's time under any plan, as the integer program counts it.
        seconds: duration of the search.
    """

    plan: MemoryPlan
    prediction: Prediction
    bound_ms: float
    seconds: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Tried:
    plan: MemoryPlan
    prediction: Prediction
    solution: Solution | None


def _peak_bytes(tried: _Tried) -> int:
    return tried.prediction.peak_bytes


def find_plan(
    profile: Profile,
    fixed: MemoryPlan,
    limits: Limits,
    safety: float = SAFETY,
    rounds: int = _ROUNDS,
    without: Collection[CompileVariant] = (),
    search_least: bool = True,
) -> Found:
    """Return the plan with the shortest predicted step that keeps within the limits.

    Args:
        profile: profile of the step without a policy.
        fixed: fates that the user wrote; they are not decided again.
        limits: the limits.
        safety: copies are assumed to take this many times as long as the link says.
        rounds: the most programs that are solved to come near the budget.
        without: variants of compiled layers (`FrontierPoint.variant`) that are left out.
        search_least: whether to search for the plan of the least peak if nothing has fitted so far.

    Raises:
        BudgetError: nothing fits; the error names the least budget that would do.
        PlanError: scipy is missing.
        ValueError: ``safety`` is below 1.
    """
    started = time.perf_counter()
    search = Search(profile, fixed, limits, safety, without)
    best = search.best(rounds, search_least)
    bound = best.solution.bound_ms if best.solution is not None else 0.0
    bound_ms = profile.compute_ms + profile.outside_ms + bound
    return Found(best.plan, search.with_curve(best.plan), bound_ms, time.perf_counter() - started)


def least_peak_bytes(profile: Profile, fixed: MemoryPlan, limits: Limits) -> int:
    """Return the least peak in bytes that the search reaches, with the arguments of `least_peak`."""
    return least_peak(profile, fixed, limits).peak_bytes


def least_peak(profile: Profile, fixed: MemoryPlan, limits: Limits) -> Prediction:
    """Return the predicted step with the least peak that the search reaches, however long it takes.

    Args:
        profile, fixed: as in `find_plan`.
        limits: the limits; ``device_bytes`` is ignored.

    Raises:
        PlanError: scipy is missing.
    """
    return Search(profile, fixed, limits, SAFETY).least().prediction


def candidates(profile: Profile, fixed: MemoryPlan, limits: Limits, count: int) -> list[Found]:
    """Return up to ``count`` different plans that fit, the fastest by prediction first.

    They are found under different assumptions: slower links, a smaller budget, no swap at all. If the machine
    is not as the profile says, another plan than the first may be best on it.

    Raises:
        BudgetError: nothing fits.
        PlanError: scipy is missing.
    """
    found = [find_plan(profile, fixed, limits)]
    left_out = _variants_of_others(profile, found)
    for other, safety in _variations(limits):
        if len(found) >= count:
            break
        try:
            more = find_plan(
                profile, fixed, other, safety, _ROUNDS_OF_OTHERS, next(left_out), search_least=False
            )
        except BudgetError:
            continue
        if all(more.plan.rows != known.plan.rows for known in found):
            found.append(more)
    first, *others = found
    return [first, *sorted(others, key=lambda item: item.prediction.step_ms)]


def _variants_of_others(profile: Profile, found: list[Found]) -> Iterator[Collection[CompileVariant]]:
    """Yield the variants to leave out next: guessed ones that a trial of an earlier plan will measure."""
    while True:
        points = [point for item in found for _, point in compile_points_of(profile, item.plan)]
        yield {point.variant for point in points if not point.measured}


def _variations(limits: Limits) -> Iterator[tuple[Limits, float]]:
    smaller = replace(limits, device_bytes=int(limits.device_bytes * 0.97))
    yield limits, 1.25
    yield smaller, 1.15
    yield limits, 1.6
    yield replace(smaller, swap_bucket_bytes=0), SAFETY
    for number in range(2, 12):
        yield replace(limits, device_bytes=int(limits.device_bytes * (1 - 0.02 * number))), 1 + 0.1 * number


class Search:
    """The searches for one profile, one set of fixed rows and one set of limits, with what they share.

    Args:
        profile, fixed, limits, safety, without: as in `find_plan`.
    """

    def __init__(
        self,
        profile: Profile,
        fixed: MemoryPlan,
        limits: Limits,
        safety: float,
        without: Collection[CompileVariant] = (),
    ) -> None:
        if safety < 1:
            raise ValueError(f"safety is a factor of at least 1, not {safety}")
        need_scipy()
        link = profile.link if limits.swap_bucket_bytes != 0 and limits.host_bytes != 0 else None
        self._profile, self._fixed, self._limits = profile, fixed, limits
        self._link_rate = LinkRate.of(profile.link, safety)
        hasty = [LinkRate.of(profile.link, factor) for factor in _HASTE] if profile.compiled_layers else []
        self._link_rates = [self._link_rate, *hasty]
        self._min_bytes = effective_min_bytes(fixed, limits)
        self.segments = segments_of(replace(profile, link=link), fixed, limits)
        self._simulator = Simulator(profile)
        self._solved: dict[int | None, Solution | None] = {}
        self._options: list[list[Option]] = []
        self._simulations: list[_Tried] = []
        self._points = tuple(point for point in offered_points(profile) if point.variant not in without)

    def best(self, rounds: int = _ROUNDS, search_least: bool = True) -> _Tried:
        """Return the fastest plan that fits; ``rounds`` and ``search_least`` are those of `find_plan`."""
        limit = self._limits.device_bytes
        unplanned = self._simulated(self._fixed, None)
        if unplanned.prediction.peak_bytes <= limit:
            return unplanned
        fitting = list(self._plans_near(limit, unplanned, rounds))
        if not fitting:
            least = self.least() if search_least else unplanned
            if least.prediction.peak_bytes > limit:
                raise self._impossible(least.prediction.peak_bytes)
            fitting = [one for one in self._simulations if one.prediction.peak_bytes <= limit]
        return min(fitting, key=lambda tried: (tried.prediction.step_ms, tried.prediction.peak_bytes))

    def least(self) -> _Tried:
        """Return the plan with the least peak: the program's own, then lower ones until nothing fits.

        Without a link, times do not affect the least peak, and each op counts 1 ms. So a budget that an error
        has named suffices in the next run too, although its measured times differ.
        """
        if self._profile.link is None and any(
            op_event.forward_ms != 1.0 for op_event in self._profile.op_events
        ):
            timeless = (
                replace(op_event, forward_ms=1.0, backward_ms=1.0) for op_event in self._profile.op_events
            )
            profile = replace(self._profile, op_events=tuple(timeless))
            return self._simulated(Search(profile, self._fixed, self._limits, SAFETY).least().plan, None)
        unplanned = self._simulated(self._fixed, None)
        tried = [unplanned]
        solution = self._solution(None)
        if solution is not None:
            tried += self._plans_of(solution)
        least = min(tried, key=_peak_bytes)
        for _ in range(_LEAST_ROUNDS):
            lower = list(self._plans_near(least.prediction.peak_bytes - 1, unplanned, _ROUNDS))
            if not lower:
                break
            least = min(lower, key=_peak_bytes)
        return least

    def _plans_near(self, limit: int, unplanned: _Tried, rounds: int) -> Iterator[_Tried]:
        """Solve for plans whose peaks come closer and closer to the limit; yield those that fit."""
        target, too_small = limit, 0
        near = max(int((unplanned.prediction.peak_bytes - limit) * _NEAR), 1)
        seen: set[int] = set()
        for _ in range(rounds):
            if target in seen:
                return
            seen.add(target)
            solution = self._solution(target)
            if solution is None:
                too_small = max(too_small, target)
                target = (target + limit) // 2 if target < limit else int(target * 1.05)
                continue
            tried, *others = self._plans_of(solution)
            yield from (other for other in others if other.prediction.peak_bytes <= limit)
            excess = tried.prediction.peak_bytes - limit
            if excess <= 0:
                yield tried
                if -excess <= near or solution.cost_ms <= 1e-3:
                    return
            target = max(target - excess - (near // 2 if excess > 0 else 0), too_small + near)

    def _solution(self, device_bytes: int | None) -> Solution | None:
        if device_bytes not in self._solved:
            limits = self._limits
            caps = Caps(
                device_bytes,
                limits.host_bytes,
                limits.swap_bucket_bytes,
                limits.layers_per_stage,
                limits.waiting,
                limits.resident,
            )
            self._solved[device_bytes] = solve(self.segments, self._variants(), self._link_rate, caps)
        return self._solved[device_bytes]

    def _variants(self) -> list[list[Option]]:
        if not self._options:
            known: dict[tuple[int, bool], list[Option]] = {}
            shares = max(2, _MOST_SHARES // max(len(self.segments), 1))
            for segment in self.segments:
                points = self._points if self._is_free(segment.layer) else ()
                key = id(segment.graph), bool(points)
                if key not in known:
                    known[key] = options_of(segment.graph, self._link_rate, shares, points)
                self._options.append(known[key])
        return self._options

    def _is_free(self, layer: int) -> bool:
        """Return whether this is a compiled layer for which nothing is written by hand."""
        rows = (row for row in self._fixed.rows if row.scope == layer and row.op_path != OUTPUT)
        return layer in self._profile.compiled_layers and not any(rows)

    def _plans_of(self, solution: Solution) -> list[_Tried]:
        """Return the plan of a solution, then the same plan with shorter windows."""
        segments = map(as_chosen, self.segments, solution.options)
        choice = Choice(tuple(segments), solution.options)
        return [self._with_windows(choice, solution, link_rate) for link_rate in self._link_rates]

    def _with_windows(self, choice: Choice, solution: Solution, link_rate: LinkRate) -> _Tried:
        opened = plan_of(choice, self._fixed, {}, self._min_bytes)
        windows = self._simulator.windows_of(opened, link_rate)
        plan = plan_of(choice, self._fixed, windows, self._min_bytes)
        if not self._profile.compiled_layers:
            plan = replace(keep_what_costs(plan, self._profile.saved), adjustments=plan.adjustments)
        return self._simulated(plan, solution)

    def _simulated(self, plan: MemoryPlan, solution: Solution | None) -> _Tried:
        moved = self._limits.frees_optimizer_states
        prediction = self._simulator.predict(plan, optimizer_states_moved=moved, curve=False)
        tried = _Tried(plan, self._limits.with_others(prediction), solution)
        self._simulations.append(tried)
        return tried

    def with_curve(self, plan: MemoryPlan) -> Prediction:
        """Return the prediction of a plan, with its memory over time (`Prediction.memory`)."""
        moved = self._limits.frees_optimizer_states
        return self._limits.with_others(self._simulator.predict(plan, optimizer_states_moved=moved))

    def _impossible(self, least_bytes: int) -> BudgetError:
        expected = f"at least {gib_text(least_bytes, math.ceil)}, the least that any plan reaches"
        return BudgetError([Problem("memory.budget_gib", expected, gib_text(self._limits.device_bytes))])
