"""Searches for a plan: keep, swap or recompute for each op of each layer, so that the step is shortest.

1. The step is cut into segments; equal layers share one graph (`layer_graph`).
2. For each kind of layer, the options that can be part of a best plan are listed (`layer_options`).
3. A mixed-integer program over the whole step chooses one option for each layer (`layer_milp`).
4. The options become the fewest rows that say the same, with windows: device memory is released as soon as a
   copy out has ended, and copies back start as late as possible. The simulation of the plan without windows
   says when hooks come, and `engine.windows` chooses from that. Copies that the link cannot bring back in
   time start when backward begins.
5. The step is simulated under the plan (`simulate`). If its peak is above the budget, or far below, the
   program gets a smaller or larger budget, and 3 to 5 run again. The best simulated plan wins.

The same input gives the same plan on every rank: the result depends on no clock and no random number.

The stages of a pipeline are searched one by one, with four differences. All micro-batches in flight hold what
is kept. They share host memory equally. Swapped tensors of other micro-batches are on the device as far as
windows reach (`engine.schedule.REACH`). If passes of other micro-batches run between a forward and its
backward, a copy has a whole cycle of the slowest stage (a forward and a backward) instead of its own pass; so
the link is assumed to be that much faster.

Then the step is simulated (`cost.pipeline_step`). A stage whose peak is above the budget, or far below, gets
a smaller or larger budget. If a stage waits for copies and is slower than the others, its link is assumed to
be slower. Then these stages are searched again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...config.sizes import gib_text
from ...engine.link import NO_COPIES, Link
from ...engine.schedule import REACH
from ...errors import Problem
from ...plan.actions import COMPILE_BUDGET, Fate, MemoryPlan, PlanRow, Scope, Windows
from ...plan.model_structure import OUTPUT
from ...plan.saved_bytes import OpCall
from ...plan.settle import keep_what_costs
from ..budget import BudgetError
from ..cost.compiled_shares import compile_points_of, offered_points
from ..cost.pipeline_step import LONGEST, Pipeline, PipelineStep, SimulatedStage, StageRun
from ..cost.simulate import Simulator
from ..profile import CompileVariant, FrontierPoint, Limits, Prediction, Profile
from .layer_graph import KEEP, RECOMPUTE, SWAP, Segment, effective_min_bytes, segments_of
from .layer_milp import Solution, need_solvers, solve
from .layer_options import Option, as_chosen, options_of

_FATES: Mapping[str, Fate] = {KEEP: "keep", SWAP: "swap", RECOMPUTE: "recompute"}


def plan_of(
    segments: Sequence[Segment],
    options: Sequence[Option],
    fixed: MemoryPlan,
    windows: Mapping[OpCall, Sequence[Windows]],
    min_tensor_bytes: int,
) -> MemoryPlan:
    """Return ``fixed`` with the rows that follow from the segments' options, in the order of forward.

    ``windows`` are those of swapped tensors, by the call that makes them.
    """

    places: dict[Scope | None, int] = {segment.scope: segment.layer for segment in segments}

    def place(row: PlanRow) -> int:
        return -1 if row.scope == "embedding" else places.get(row.scope, len(segments))

    found: list[PlanRow] = []
    for segment, option in zip(segments, options, strict=True):
        found += _rows(segment, option, windows)
    rows = (*fixed.rows, *sorted(found, key=place))
    return replace(fixed, rows=rows, min_tensor_bytes=min_tensor_bytes)


def _rows(segment: Segment, option: Option, windows: Mapping[OpCall, Sequence[Windows]]) -> list[PlanRow]:
    rows: list[PlanRow] = []
    by_path: dict[tuple[Scope, str], list[tuple[OpCall, str, bool]]] = {}
    for call, maker, fate in zip(segment.graph.calls, segment.makers, option.fates, strict=True):
        scope, path, _ = maker
        free = len(call.fates) > 1
        if scope is not None and (not option.whole or call.from_before):
            by_path.setdefault((scope, path), []).append((maker, fate, free))
    if option.whole and segment.scope is not None:
        rows.append(PlanRow(segment.scope, "", "recompute"))
    for (scope, path), calls in by_path.items():
        free_calls = [(maker, fate) for maker, fate, free in calls if free]
        fates = {fate for _, fate in free_calls}
        if not free_calls or fates == {KEEP}:
            continue
        if len(fates) == 1 and len(free_calls) == len(calls):
            found = [window for maker, _ in free_calls for window in windows.get(maker, ())]
            rows.append(PlanRow(scope, path, _FATES[fates.pop()], windows=_widest(found)))
        else:
            rows += [
                PlanRow(scope, path, _FATES[fate], maker[2], _widest(windows.get(maker, ())))
                for maker, fate in free_calls
                if fate != KEEP
            ]
    if segment.scope is None:
        return rows
    if any(row.op_path == "" and row.fate == "swap" for row in rows):  # the hidden state has its own fate
        rows.append(PlanRow(segment.scope, OUTPUT, "keep"))
    return rows if option.point is None else _with_compiler_rows(rows, segment.scope, option.point)


def _with_compiler_rows(rows: Sequence[PlanRow], layer: Scope, point: FrontierPoint) -> list[PlanRow]:
    given: list[PlanRow] = []
    if point.share < 1:
        parameters = {COMPILE_BUDGET: point.share}
        kept = PlanRow(layer, "", "keep")
        own = next((row for row in rows if row.scope == layer and not row.op_path), kept)
        rows = [row for row in rows if row is not own]
        given.append(replace(own, parameters=parameters))
    given += [PlanRow(layer, path, "recompute") for path in point.recomputed]
    given += [PlanRow(layer, path, "keep") for path in point.kept]
    return [*given, *rows]


def _widest(windows: Sequence[Windows]) -> Windows | None:
    if not windows:
        return None
    return Windows(max(item.prefetch_ops for item in windows), max(item.release_ops for item in windows))


SAFETY = 1.05
"""Copies are assumed to take this many times as long as measured."""

_ROUNDS, _ROUNDS_OF_OTHERS, _LEAST_ROUNDS = 6, 3, 8
_NEAR = 0.01
"""A peak this near below the budget, as a share of what a plan can change, is good enough."""

_IN_REACH, _WAITS, _LEAST_GAIN = 1.05, 0.0025, 0.0025
"""Lower peaks than the program's least one are looked for if that is at most so many times the budget, or if
the step waits for copies for more than the second share of its time: what the link has not carried away is
still on the device. Where nothing waits they are at most one or two percent lower. The search ends when a
round lowers the peak by less than the third."""

_HASTE = (0.95, 0.8)
"""Safety factors of shorter windows, tried too if layers are compiled. Hooks are then a layer apart: a window
that just misses one costs memory for a whole layer, a shorter one costs a wait. Both are simulated."""

_MOST_SHARES = 96
"""Number of parts, over all layers, into which swapped bytes may be divided: the fewer layers, the finer."""


@dataclass(frozen=True)
class Found:
    """A plan that was found, with its prediction.

    ``bound_ms`` is a lower bound of the step's time under any plan, as the integer program counts it.
    """

    plan: MemoryPlan
    prediction: Prediction
    bound_ms: float


def _peak_bytes(found: Found) -> int:
    return found.prediction.peak_bytes


def find_plan(
    profile: Profile,
    fixed: MemoryPlan,
    limits: Limits,
    safety: float = SAFETY,
    rounds: int = _ROUNDS,
    without: Collection[CompileVariant] = (),
    search_least: bool = True,
    simulator: Simulator | None = None,
) -> Found:
    """Return the plan with the shortest predicted step that keeps within the limits.

    Args:
        profile: profile of the step without a policy.
        fixed: fates that the user wrote; they are not decided again.
        limits: what the plan must keep within.
        safety: copies are assumed to take this many times as long as the link says.
        rounds: the most programs that are solved to come near the budget.
        without: variants of compiled layers (`FrontierPoint.variant`) that are left out.
        search_least: whether to search for the plan of the least peak if nothing has fitted so far.
        simulator: one of this profile, if there is one already: it knows what earlier searches asked it.

    Raises:
        BudgetError: nothing fits; the error names the least budget that would do.
        PlanError: scipy or highspy is missing.
        ValueError: ``safety`` is below 1.
    """
    search = Search(profile, fixed, limits, safety, without, simulator)
    return search.with_curve(search.best(rounds, search_least))


def least_peak_bytes(profile: Profile, fixed: MemoryPlan, limits: Limits) -> int:
    """Return the peak of `least_peak`, in bytes."""
    return least_peak(profile, fixed, limits).prediction.peak_bytes


def least_peak(
    profile: Profile, fixed: MemoryPlan, limits: Limits, simulator: Simulator | None = None
) -> Found:
    """Return the plan with the least peak that the search reaches, however long a step takes under it.

    The arguments are those of `find_plan`; how near to ``limits.device_bytes`` it is, and whether it waits
    for copies, decides how hard it is looked for.
    """
    return Search(profile, fixed, limits, simulator=simulator).least


def candidates(
    profile: Profile, fixed: MemoryPlan, limits: Limits, count: int, first: Found | None = None
) -> list[Found]:
    """Return up to ``count`` different plans that fit, the fastest by prediction first.

    They are found under different assumptions: slower links, a smaller budget, no swap at all. If the machine
    is not as the profile says, another plan than the first may be best on it.

    Arguments and errors are those of `find_plan`; ``first`` is what it returns, where that is known already.
    """
    found = [first or find_plan(profile, fixed, limits)]
    for other, safety in _variations(limits):
        if len(found) >= count:
            break
        points = [point for item in found for _, point in compile_points_of(profile, item.plan)]
        guessed = {point.variant for point in points if not point.measured}  # trials will measure them
        try:
            more = find_plan(profile, fixed, other, safety, _ROUNDS_OF_OTHERS, guessed, search_least=False)
        except BudgetError:
            continue
        if all(more.plan.rows != known.plan.rows for known in found):
            found.append(more)
    first, *others = found
    return [first, *sorted(others, key=lambda item: item.prediction.step_ms)]


def _variations(limits: Limits) -> Iterator[tuple[Limits, float]]:
    smaller = replace(limits, device_bytes=int(limits.device_bytes * 0.97))
    yield limits, 1.25
    yield smaller, 1.15
    yield limits, 1.6
    yield replace(smaller, swap_bucket_bytes=0), SAFETY
    for number in range(2, 12):
        yield replace(limits, device_bytes=int(limits.device_bytes * (1 - 0.02 * number))), 1 + 0.1 * number


class Search:
    """The searches with one set of arguments of `find_plan`, whose errors it raises, and what they share."""

    def __init__(
        self,
        profile: Profile,
        fixed: MemoryPlan,
        limits: Limits,
        safety: float = SAFETY,
        without: Collection[CompileVariant] = (),
        simulator: Simulator | None = None,
    ) -> None:
        if safety < 1:
            raise ValueError(f"safety is a factor of at least 1, not {safety}")
        need_solvers()
        link = profile.link if limits.swap_bucket_bytes != 0 and limits.host_bytes != 0 else None
        self._profile, self._fixed, self._limits = profile, fixed, limits
        # by the first options are costed, by all windows are chosen
        factors = (safety, *(_HASTE if profile.compiled_layers else ()))
        self._links = [(profile.link or NO_COPIES).slowed(factor) for factor in factors]
        self._min_bytes = effective_min_bytes(fixed, limits)
        self.segments = segments_of(replace(profile, link=link), fixed, limits)
        self._simulator = simulator or Simulator(profile)
        self._solved: dict[int | None, Solution | None] = {}
        self._simulations: list[Found] = []
        self._points = tuple(point for point in offered_points(profile) if point.variant not in without)

    def best(self, rounds: int = _ROUNDS, search_least: bool = True) -> Found:
        """Return the fastest plan that fits."""
        limit = self._limits.device_bytes
        unplanned = self._simulated(self._fixed)
        if unplanned.prediction.peak_bytes <= limit:
            return unplanned
        fitting = list(self._plans_near(limit, unplanned, rounds))
        if not fitting:
            least = self.least if search_least else unplanned
            if least.prediction.peak_bytes > limit:
                raise self._impossible(least.prediction.peak_bytes)
            fitting = [one for one in self._simulations if one.prediction.peak_bytes <= limit]
        return min(fitting, key=lambda tried: (tried.prediction.step_ms, tried.prediction.peak_bytes))

    @cached_property
    def least(self) -> Found:
        """The plan with the least peak, whatever a step takes: the program's own, then lower ones if it waits
        for copies or the budget is not far below it.

        Without a link, times do not affect the least peak, and each op counts 1 ms. So a budget that an error
        has named suffices in the next run too, although its measured times differ.
        """
        op_events = self._profile.op_events
        if self._profile.link is None and any(op_event.forward_ms != 1.0 for op_event in op_events):
            timeless = tuple(replace(op_event, forward_ms=1.0, backward_ms=1.0) for op_event in op_events)
            profile = replace(self._profile, op_events=timeless)
            timed = self._simulated(Search(profile, self._fixed, self._limits).least.plan)
            return replace(timed, bound_ms=0.0)
        unplanned = self._simulated(self._fixed)
        tried = [unplanned]
        if (solution := self._solution(None)) is not None:
            tried += self._plans_of(solution)
        least = min(tried, key=_peak_bytes)
        step = least.prediction
        waits = step.forward_stall_ms + step.backward_stall_ms > _WAITS * step.step_ms
        near = _peak_bytes(least) <= _IN_REACH * self._limits.device_bytes
        for _ in range(_LEAST_ROUNDS if waits or near else 0):
            lower = list(self._plans_near(least.prediction.peak_bytes - 1, unplanned, _ROUNDS))
            if not lower:
                break
            before, least = least, min(lower, key=_peak_bytes)
            if _peak_bytes(before) - _peak_bytes(least) < _LEAST_GAIN * _peak_bytes(before):
                break
        return replace(least, bound_ms=0.0)

    def _plans_near(self, limit: int, unplanned: Found, rounds: int) -> Iterator[Found]:
        """Solve for plans whose peaks come closer and closer to the limit; yield those that fit."""
        target, too_small, too_large = limit, 0, math.inf
        near = max(int((unplanned.prediction.peak_bytes - limit) * _NEAR), 1)
        seen: set[int] = set()
        for _ in range(rounds):
            if target in seen or target >= too_large:
                return
            seen.add(target)
            solution = self._solution(target)
            if solution is None:
                too_small = max(too_small, target)
                target = (target + limit) // 2 if target < limit else int(target * 1.05)
                if target > _IN_REACH**2 * limit:
                    return
                continue
            tried, *others = self._plans_of(solution)
            yield from (other for other in others if other.prediction.peak_bytes <= limit)
            excess = tried.prediction.peak_bytes - limit
            if excess <= 0:
                yield tried
                if -excess <= near or solution.cost_ms <= 1e-3:
                    return
            else:
                too_large = min(too_large, target)
            target = max(target - excess - (near // 2 if excess > 0 else 0), too_small + near)

    def _solution(self, device_bytes: int | None) -> Solution | None:
        if device_bytes not in self._solved:
            self._solved[device_bytes] = solve(
                self.segments, self._options, self._links[0], self._limits, device_bytes
            )
        return self._solved[device_bytes]

    @cached_property
    def _options(self) -> list[list[Option]]:
        written = {row.scope for row in self._fixed.rows if row.op_path != OUTPUT}
        free = self._profile.compiled_layers - written
        found: list[list[Option]] = []
        known: dict[tuple[int, bool], list[Option]] = {}
        shares = max(2, _MOST_SHARES // max(len(self.segments), 1))
        for segment in self.segments:
            points = self._points if segment.scope in free else ()
            key = id(segment.graph), bool(points)
            if key not in known:
                known[key] = options_of(segment.graph, self._links[0], shares, points)
            found.append(known[key])
        return found

    def _plans_of(self, solution: Solution) -> list[Found]:
        """Return the plan of a solution, then the same plan with shorter windows."""
        segments, options = list(map(as_chosen, self.segments, solution.options)), solution.options
        opened = plan_of(segments, options, self._fixed, {}, self._min_bytes)
        tried = []
        for link in self._links:
            windows = self._simulator.windows_of(opened, link)
            plan = plan_of(segments, options, self._fixed, windows, self._min_bytes)
            if not self._profile.compiled_layers:
                plan = replace(keep_what_costs(plan, self._profile.saved), adjustments=plan.adjustments)
            tried.append(self._simulated(plan, solution))
        return tried

    def _simulated(self, plan: MemoryPlan, solution: Solution | None = None) -> Found:
        moved = self._limits.frees_optimizer_states
        prediction = self._simulator.predict(plan, optimizer_states_moved=moved, curve=False)
        bound_ms = self._profile.compute_ms + self._profile.outside_ms
        bound_ms += solution.bound_ms if solution is not None else 0.0
        found = Found(plan, self._limits.with_others(prediction), bound_ms)
        self._simulations.append(found)
        return found

    def with_curve(self, found: Found) -> Found:
        """Return what was found, its prediction with its memory over time (`Prediction.memory`)."""
        moved = self._limits.frees_optimizer_states
        prediction = self._simulator.predict(found.plan, optimizer_states_moved=moved)
        return replace(found, prediction=self._limits.with_others(prediction))

    def _impossible(self, least_bytes: int) -> BudgetError:
        expected = f"at least {gib_text(least_bytes, math.ceil)}, the least that any plan reaches"
        error = BudgetError([Problem("memory.budget_gib", expected, gib_text(self._limits.device_bytes))])
        error.least_bytes, error.budget_bytes = least_bytes, self._limits.device_bytes
        return error


_ROUNDS_OF_STAGES = 5
_NEAR_A_STAGE = 0.03
"""A peak below the budget by at most this share is good enough; a stage slower by more is too slow."""

_SLOWER = 0.75
"""Factor of the assumed rate of a link in the next round, if its stage waits for it."""


@dataclass
class _Searched:
    """One stage while it is searched; its limits and the assumed share of its link change between rounds."""

    stage: SimulatedStage
    fixed: MemoryPlan
    limits: Limits
    rate_share: float = 1.0

    def search(self, cycle_ms: float, crosses: bool) -> MemoryPlan:
        """Return the fastest plan that fits, or else the one with the least peak.

        ``cycle_ms`` is the time of a forward and a backward of the slowest stage.
        """
        stage, profile = self.stage, self.stage.profile
        between = crosses and stage.in_flight > 1
        if between and stage.alternates and profile.link is not None:
            profile = replace(profile, link=_link_over(profile, profile.link, cycle_ms, self.rate_share))
        search = Search(profile, self.fixed, self.limits)
        try:
            found = search.best(search_least=False).plan
        except BudgetError:
            found = search.least.plan
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
            excess_bytes: by how much its peak exceeded the budget; negative: it was below.
            cycles_ms: time of all micro-batches on the slowest stage, without waits for copies.
        """
        too_small = excess_bytes < -_NEAR_A_STAGE * self.limits.device_bytes and plan.rows != self.fixed.rows
        too_slow = run.busy_ms > (1 + _NEAR_A_STAGE) * cycles_ms and run.stall_ms > _NEAR_A_STAGE * cycles_ms
        if excess_bytes > 0 or too_small:
            self.limits = replace(self.limits, device_bytes=self.limits.device_bytes - excess_bytes)
        if too_slow:
            self.rate_share *= _SLOWER
        return excess_bytes > 0 or too_small or too_slow


def plan_stages(pipeline: Pipeline, fixed: Sequence[MemoryPlan], limits: Limits) -> PipelineStep:
    """Return the fastest step that was found within the limits.

    Args:
        fixed: fates that the user wrote, by stage.
        limits: limits of each device.

    Raises:
        BudgetError: for some stage no plan was found that fits; the error names the least peak of each.
    """
    budget, moved = limits.device_bytes, limits.frees_optimizer_states
    found = [pipeline.step(fixed, moved)]
    searched = []
    for stage, plan in zip(pipeline.stages, fixed, strict=True):
        shared = limits.shared_by(float(stage.in_flight), 2 * REACH if pipeline.crosses else 0.0)
        own = replace(shared, device_bytes=budget - stage.buffer_bytes)
        searched.append(_Searched(stage, plan, own))
    cycle_ms = max(work.forward_ms + work.backward_ms for work in found[0].works)
    due = [peak > budget for peak in found[0].peaks_bytes]
    plans = list(fixed)
    for _ in range(_ROUNDS_OF_STAGES):
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
