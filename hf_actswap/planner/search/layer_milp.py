"""Chooses one option for each layer: a mixed-integer linear program over the whole step.

Rows, for the segments l = 0, 1, ... in the order of forward (times in ms, bytes in MiB):

* K(l), the bytes kept by segments before l: K(l+1) = K(l) + kept.
* B(l), the link's backlog of copies out when l starts: B(l+1) >= B(l) + out - forward - S(l), and at least
  what l's own last copies leave. Compute waits for what is left at the end of forward.
* S(l), what l waits for where the host reads values (`OpEvent.reads_values`): S(l) >= B(l) + what it has
  sent by then - its time until then.
* N(l), the link's lead of copies back when backward reaches l: N(l) >= N(l-1) + in - backward -
  recomputation, and at least what l's own first reads need. Compute waits for the lead that is needed before
  backward begins.
* Forward of l: K(l) + bytes in the backlog + the option's peak <= budget.
* Backward of l: K(l) + bytes that are back already for the layers before + the option's peak <= budget.
* Bytes on the host, and bytes swapped in each stage.
* On a stage of a pipeline, what other micro-batches hold adds to both peaks: `Limits.waiting` times K at the
  end of forward, and `Limits.resident` times what is swapped.

The linear program without integers gives the bound. It also tells which options are worth a variable, and in
which variants layers are compiled: each costs the compiler 10 to 30 seconds, so a plan has at most
`MOST_VARIANTS` beside the default one.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.link import Link
from ...errors import PlanError, Problem
from ..profile import CompileVariant, Limits
from .layer_graph import Segment
from .layer_options import Option

try:
    # Not scipy's copy of HiGHS: that of scipy 1.17 (HiGHS 1.12) writes past its memory in some programs.
    import highspy
except ImportError:  # `need_solvers` raises
    highspy = None  # type: ignore[assignment]


MIB = 2.0**20
GAP, STEP_GAP = 0.01, 0.0005
"""A solution costs at most this share more than the best one, or this share of the step's compute time."""

_EXACT_COLUMNS = 250
_COLUMNS, _COLUMNS_A_LAYER = 130, 8
"""If there are more columns, so many remain: in all, but at least so many for each layer."""

_NODES = 60

MOST_VARIANTS = 2
"""The most different ways in which one plan has layers compiled (`Option.point`)."""
_POINTS_GAP, _POINTS_NODES = 0.005, 1
"""Step gap and nodes if there are such points: their costs are rough, and equal layers make equal choices."""


def need_solvers() -> None:
    """Raise a `PlanError` that says how to install scipy and highspy, if one of them is missing."""
    missing = " and ".join(name for name in ("scipy", "highspy") if importlib.util.find_spec(name) is None)
    if missing:
        expected = "scipy and highspy, which solve the planner's problems"
        raise PlanError([Problem("memory.mode", expected, f"no {missing}", "pip install scipy highspy")])


@dataclass(frozen=True)
class Solution:
    """One option for each segment, with its cost: recomputation and stalls, as the program counts them.

    No solution costs less than ``bound_ms``; ``columns`` is the number of integer variables.
    """

    options: tuple[Option, ...]
    cost_ms: float
    bound_ms: float
    columns: int


def solve(
    segments: Sequence[Segment],
    options: Sequence[Sequence[Option]],
    link: Link,
    limits: Limits,
    device_bytes: int | None,
) -> Solution | None:
    """Return the cheapest choice of one option for each segment, or ``None`` if none is within the limits.

    In place of ``limits.device_bytes`` stands ``device_bytes``; ``None``: as little as possible, at any cost.
    """
    program = _Program(segments, options, link, limits, device_bytes)
    relaxed = program.relaxed()
    if relaxed is None:
        return None
    bound, reduced, shares = relaxed
    if sum(map(len, few := _of_few_variants(options, shares))) < program.columns:
        program = _Program(segments, options := few, link, limits, device_bytes)
        if (relaxed := program.relaxed()) is None:
            return None
        reduced = relaxed[1]
    if program.columns > _EXACT_COLUMNS:
        program = program.with_columns(reduced)
    chosen = program.solved(bound)
    if chosen is None and program.columns < sum(len(variants) for variants in options):
        # Options that were left out are needed: those that need the least memory.
        whole = _Program(segments, options, link, limits, device_bytes)
        if (leanest := _Program(segments, options, link, limits, None).relaxed()) is not None:
            program = whole.with_columns(reduced, leanest[1])
            chosen = program.solved(bound)
    if chosen is None:
        return None
    return Solution(*chosen, bound, program.columns)


def _of_few_variants(options: Sequence[Sequence[Option]], shares: np.ndarray) -> list[list[Option]]:
    """Leave out variants of compiled layers but for the `MOST_VARIANTS` with the largest relaxed shares."""
    weights: dict[CompileVariant, float] = {}
    for option, share in zip(itertools.chain(*options), shares, strict=True):
        if option.point is not None:
            weights[option.point.variant] = weights.get(option.point.variant, 0.0) + float(share)
    variants = sorted(weights, key=lambda variant: -weights[variant])[:MOST_VARIANTS]
    return [
        [item for item in items if item.point is None or item.point.variant in variants] for items in options
    ]


class _Program:
    """The program's matrix; ``some``: options were left out, so proving the optimum is not worth the time."""

    def __init__(
        self,
        segments: Sequence[Segment],
        options: Sequence[Sequence[Option]],
        link: Link,
        limits: Limits,
        device_bytes: int | None,
        some: bool = False,
    ) -> None:
        self._segments, self._options, self._link = segments, options, link
        self._limits, self._device_bytes = limits, device_bytes
        exact = sum(len(variants) for variants in options) <= _EXACT_COLUMNS and not some
        self._step_gap, self._nodes = STEP_GAP, 10**6 if exact else _NODES
        if any(option.point is not None for option in itertools.chain(*options)):
            self._step_gap, self._nodes = _POINTS_GAP, _POINTS_NODES
        count = len(segments)
        self._starts = np.cumsum([0, *(len(variants) for variants in options)])
        self._kept = self.columns = int(self._starts[-1])
        self._backlog = self.columns + count + 1
        self._lead = self._backlog + count + 1
        self._device = self._lead + count + 1
        self._others = [self._device + 1] if limits.waiting or limits.resident else []
        self._stall = self._device + 1 + len(self._others)
        self._reading = [place for place, segment in enumerate(segments) if segment.graph.values_read]
        self._width = self._stall + len(self._reading)
        self._rows: list[dict[int, float]] = []
        self._low: list[float] = []
        self._high: list[float] = []
        for place, segment in enumerate(segments):
            self._flow(place, segment)
            self._memory(place, segment)
        self._shared_caps()

    def relaxed(self) -> tuple[float, np.ndarray, np.ndarray] | None:
        """Solve without integers: return a bound of the cost, each option's reduced cost, and its share.

        The bound is 0 where device memory is minimised and not cost. ``None``: there is no solution.
        """
        solved = self._run(integral=0)
        if solved is None:
            return None
        shares, duals = solved
        bound = 0.0 if self._device_bytes is None else float(self._times() @ shares)
        # The dual of an option that is chosen in full is negative: more of it would cost less.
        return bound, np.maximum(duals[: self.columns], 0.0), shares[: self.columns]

    def with_columns(self, *reduced: np.ndarray) -> _Program:
        """Return the program with only the options of each segment that have the lowest reduced costs.

        There may be several costs; the options with the lowest of each remain then.
        """
        fewer = []
        most = max(_COLUMNS_A_LAYER, _COLUMNS // len(self._options))
        for place, variants in enumerate(self._options):
            some = slice(self._starts[place], self._starts[place + 1])
            chosen = {at for costs in reduced for at in np.argsort(costs[some], kind="stable")[:most]}
            fewer.append([variants[at] for at in sorted(chosen)])
        return _Program(self._segments, fewer, self._link, self._limits, self._device_bytes, some=True)

    def solved(self, bound: float) -> tuple[tuple[Option, ...], float] | None:
        """Return the chosen options, and their cost in ms; ``None``: there is no solution.

        ``bound`` is a lower bound of the cost in ms.
        """
        compute_ms = sum(sum(item.graph.forward_ms) + sum(item.graph.backward_ms) for item in self._segments)
        slack_ms = self._step_gap * compute_ms
        share = slack_ms / (max(bound, 0.0) + slack_ms) if slack_ms > 0 else 0.0
        gap = max(GAP, share) if self._device_bytes is not None else 5 * 1e-3
        solved = self._run(integral=self.columns, mip_rel_gap=gap, mip_max_nodes=self._nodes)
        if solved is None:
            return None
        values, _ = solved
        picked = []
        for place, variants in enumerate(self._options):
            shares = values[self._starts[place] : self._starts[place + 1]]
            picked.append(variants[int(np.argmax(shares))])
        return tuple(picked), float(self._times() @ values)

    def _run(self, integral: int, **limits: float) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the columns' values and their duals; ``None``: no solution was found.

        The first ``integral`` columns are whole numbers; ``limits`` are options of HiGHS.
        """
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        for name, limit in limits.items():
            solver.setOptionValue(name, limit)
        solver.passModel(self._model(integral))
        solver.run()
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        solution = solver.getSolution()
        return np.array(solution.col_value), np.array(solution.col_dual)

    def _flow(self, place: int, segment: Segment) -> None:
        """Add rows for the choice of one option, and for the recursions of K, B and N."""
        graph = segment.graph
        kept, backlog, lead = self._kept + place, self._backlog + place, self._lead + place
        self._row(self._each(place, lambda option: 1.0), 1.0, 1.0)
        keeps = self._each(place, lambda option: -option.kept_bytes / MIB)
        self._row({kept + 1: 1.0, kept: -1.0, **keeps}, 0.0, 0.0)
        out = self._each(place, lambda option: -option.out_ms)
        stall: dict[int, float] = {}
        if place in self._reading:  # a read waits for all copies that have begun
            column = self._stall + self._reading.index(place)
            stall = {column: 1.0}
            for read_ms, share in map(graph.before, graph.values_read):
                begun = {chosen: share * ms for chosen, ms in out.items()}
                self._row({**stall, backlog: -1.0, **begun}, -read_ms, np.inf)
        self._row({backlog + 1: 1.0, backlog: -1.0, **out, **stall}, -sum(graph.forward_ms), np.inf)
        self._row({backlog + 1: 1.0, **self._each(place, lambda option: -option.backlog_ms)}, 0.0, np.inf)
        back = self._each(place, lambda option: option.extra_ms - option.in_ms)
        backward_ms = sum(graph.backward_ms[place] for place in graph.backward_order)
        self._row({lead + 1: 1.0, lead: -1.0, **back}, -backward_ms, np.inf)
        self._row({lead + 1: 1.0, **self._each(place, lambda option: -option.lead_ms)}, 0.0, np.inf)

    def _memory(self, place: int, segment: Segment) -> None:
        kept, out, back = self._kept + place, self._backlog + place, self._lead + place
        base = segment.forward_base_bytes / MIB
        peaks = self._each(place, lambda option: base + option.forward_peak_bytes / MIB)
        others = dict.fromkeys(self._others, 1.0)
        row = {
            kept: 1.0,
            out: _mib_per_ms(self._link.out_bytes_per_ms),
            self._device: -1.0,
            **others,
            **peaks,
        }
        self._row(row, -np.inf, 0.0)
        if segment.graph.backward_order:
            base = segment.backward_base_bytes / MIB
            peaks = self._each(place, lambda option: base + option.backward_peak_bytes / MIB)
            row = {kept: 1.0, back: _mib_per_ms(self._link.in_bytes_per_ms), self._device: -1.0, **others}
            self._row({**row, **peaks}, -np.inf, 0.0)

    def _shared_caps(self) -> None:
        limits = self._limits
        swapped: dict[int, float] = {}
        for place in range(len(self._segments)):
            swapped.update(self._each(place, lambda option: option.swapped_bytes / MIB))
        if limits.host_bytes is not None:
            self._row(swapped, -np.inf, limits.host_bytes / MIB)
        for others in self._others:
            moved = swapped.items() if limits.resident else ()
            resident = {column: -limits.resident * size for column, size in moved}
            kept_in_all = self._kept + len(self._segments)
            self._row({others: 1.0, kept_in_all: -limits.waiting, **resident}, 0.0, 0.0)
        if limits.swap_bucket_bytes is None:
            return
        stages: dict[int, dict[int, float]] = {}
        for place, segment in enumerate(self._segments):
            own = self._each(place, lambda option: (option.swapped_bytes - option.swapped_input_bytes) / MIB)
            input_ = self._each(place, lambda option: option.swapped_input_bytes / MIB)
            for layer, row in ((segment.layer, own), (max(segment.layer - 1, 0), input_)):
                stage = stages.setdefault(layer // limits.layers_per_stage, {})
                for column, size in row.items():
                    stage[column] = stage.get(column, 0.0) + size
        for row in stages.values():
            self._row(row, -np.inf, limits.swap_bucket_bytes / MIB)

    def _each(self, place: int, value: Callable[[Option], float]) -> dict[int, float]:
        start = int(self._starts[place])
        return {
            start + at: found for at, option in enumerate(self._options[place]) if (found := value(option))
        }

    def _row(self, row: dict[int, float], low: float, high: float) -> None:
        if row:
            self._rows.append(row)
            self._low.append(low)
            self._high.append(high)

    def _model(self, integral: int) -> Any:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self._width, len(self._rows)
        model.col_cost_ = self._costs()
        model.col_lower_, model.col_upper_ = self._bounds()
        model.row_lower_, model.row_upper_ = np.array(self._low), np.array(self._high)
        rows = model.a_matrix_
        rows.format_ = highspy.MatrixFormat.kRowwise
        rows.start_ = np.cumsum([0, *(len(row) for row in self._rows)]).astype(np.int32)
        rows.index_ = np.fromiter((column for row in self._rows for column in row), dtype=np.int32)
        rows.value_ = np.fromiter((value for row in self._rows for value in row.values()), dtype=float)
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [*[whole] * integral, *[real] * (self._width - integral)]
        return model

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.zeros(self._width), np.full(self._width, np.inf)
        high[: self.columns] = 1.0
        for first in (self._kept, self._backlog, self._lead):
            high[first] = 0.0  # nothing is kept or copied before the first segment
        if self._device_bytes is not None:
            high[self._device] = self._device_bytes / MIB
        return low, high

    def _costs(self) -> np.ndarray:
        costs = self._times()
        if self._device_bytes is None:
            costs *= 1e-4
            costs[self._device] = 1.0
        return costs

    def _times(self) -> np.ndarray:
        times = np.zeros(self._width)
        # Among equal options the one that moves less wins.
        times[: self.columns] = [
            option.extra_ms + 1e-6 * (option.out_ms + option.in_ms)
            for option in itertools.chain(*self._options)
        ]
        times[[self._backlog + len(self._segments), self._lead + len(self._segments)]] = 1.0
        times[self._stall :] = 1.0
        return times


def _mib_per_ms(bytes_per_ms: float) -> float:
    """Return a rate of the link; 0 if copies take no time, so that nothing is ever on its way."""
    return bytes_per_ms / MIB if math.isfinite(bytes_per_ms) else 0.0
