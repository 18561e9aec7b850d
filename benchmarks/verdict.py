"""Whether recorded results show what is claimed on a GPU: of swap, of recomputation, of the planner.

    python benchmarks/verdict.py benchmarks/results/gpu_day_nvidia-h200.json
    python benchmarks/verdict.py                        the results of `gpu_day.py` that were written last

The claims are about one H100 or H200, Llama-2-7B shapes, decoder stack, 16 layers with 8,192 tokens and 6
with 32,768. Some bounds have a second tier (``stretch``), which is hoped for but not required. The planner's
curve joins its points by straight lines; a plan made for a budget between two points would lie below the
line. If two rows of a ratio come from different calls of `gpu_day.py`, the remark says so.

Exit status 1: something measured misses its bound. Claims that were not measured are listed and do not fail;
nor does a second tier that is not reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.records import console_of, results_folder
from benchmarks.rows import AGAIN, FLASH

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""The rows of one workload, by method."""
Point = tuple[float, float]
"""Activation bytes, and milliseconds of a step."""

SHAPES = {"8k": ("Llama-2-7B", 16, 8192, 1, False), "32k": ("Llama-2-7B", 6, 32768, 1, False)}
"""Model, layers, tokens, batch and head of the workloads that are judged."""

COMPILED_TIME = 1.01
COMPILED_FALL = {"8k": (0.25, 0.27), "32k": (0.30, 0.34)}
"""Fraction by which the peak must fall, and the fraction that is hoped for."""
EAGER_TIME = {"actswap-default-auto": 1.02, "actswap-case3-auto": 1.03}
SHARE_OF_SWAPPED = 0.90
RESERVED_OVER_ALLOCATED = 1.08
STEP_SPREAD = 0.03
FIRST_STEP_OVER_MEDIAN = 3.0
ELEMENTWISE_PEAK = 0.55
ELEMENTWISE_TIME = 1.1
MIX_SPEED = 1.08
COMPILED_MIX_SPEED = {"8k": 1.30, "32k": 1.20}
PLANNER_SPEED: Mapping[str, Mapping[str, tuple[float, float | None]]] = {
    "actswap_plan_checkpointing": {"8k": (1.15, 1.20), "32k": (1.25, None)},
    "actswap_plan_compiled_checkpointing": {"8k": (1.31, 1.40), "32k": (1.25, 1.35)},
}
HALF = {"actswap_plan_half": "eager", "actswap_plan_compiled_half": "compiled"}
HALF_TIME = 1.04
BELOW_THE_CURVE = 0.02
REDUCTION = 0.05
PREDICTED_PEAK = 0.02
PREDICTED_TIME = 0.05
STEPS_TO_STABLE = {False: 10, True: 11}
"""The most steps for eager layers (``False``) and for compiled ones, whose warm-up takes a step more."""
PLANNING_S = 5.0
FREED_STATES = 0.90
NEAR_EAGER = 0.01
"""How much farther from fp32 than eager's loss and gradients (as one vector) are in bf16: relative."""
STATES_TIME = 1.05
"""The most time of a step, as a multiple of its lower bound: plain's time, or the copies of the states in
both directions at once."""

PLANNER = "actswap_plan"
NAMED_PEERS = {
    False: ("trl-offloading", "trl-offloading-checkpointing", "save-on-cpu", "hf-checkpointing-offload"),
    True: ("compiled-checkpointing", "compiled-budget-0.5", "compiled-budget-0.2"),
}
"""Methods that the planner's curves must be below: of eager layers (``False``), of compiled ones."""
STRESS_TESTS = (
    "test_without_a_plan_the_gradients_repeat",
    "test_gradients_survive_delays_and_reuse",
    "test_gradients_survive_when_memory_is_short",
)
"""Tests of 100 steps under every eager plan, with delayed copies, and with memory so short that the allocator
must free cached blocks."""
COMPARISON, DIFFERENCE = "test_a_whole_model_is_near_eager", "farther_than_eager"
"""Test of `tests/engine/test_device_smoke.py`, and the property in which it records its result."""
COMPARED = ("tiled", "streamed")
_EXPANDABLE = "expandable_segments:True"
_OURS = "actswap"
_CHECKPOINTING = "hf-checkpointing"
_REDUCED = "actswap_plan_reduce"
_COMPILED_MIXES = ("actswap-compiled-mix", "actswap-compiled-lean-mix")
"""Hand-written mixes in compiled layers; the best of them is judged."""


@dataclass(frozen=True)
class Finding:
    """One claim, and the number that was measured for it.

    Args:
        claim: the claim in words, with its number, workload and method.
        measured: the measured number; ``None``: there is none.
        bound: the bound for that number.
        sense: on which side of the bound the number must be.
        remark: why there is no number, or which row it is from.
        stretch: a second bound that is hoped for; ``None``: there is none.
    """

    claim: str
    measured: float | None
    bound: float
    sense: Literal["at most", "at least", "below"]
    remark: str = ""
    stretch: float | None = None

    @property
    def verdict(self) -> str:
        """``pass``, ``FAIL`` or ``not measured``."""
        if self.measured is None:
            return "not measured"
        return "pass" if self._holds(self.bound) else "FAIL"

    @property
    def reached(self) -> str:
        """Whether the number reaches ``stretch``: ``yes``, ``not yet``, or ``""`` if one is missing."""
        if self.measured is None or self.stretch is None:
            return ""
        return "yes" if self._holds(self.stretch) else "not yet"

    def _holds(self, bound: float) -> bool:
        assert self.measured is not None
        if self.sense == "at most":
            return self.measured <= bound
        return self.measured >= bound if self.sense == "at least" else self.measured < bound


def judge(rows: Sequence[Row]) -> list[Finding]:
    """Return all findings, claims 1 to 14 on both workloads, then those of tests and trainings.

    Rows measured on a CPU are not judged. The comparison of tiled and streamed steps with eager is no claim
    but a condition: if anything was measured on an accelerator, a comparison that is missing fails.
    """
    mine = [row for row in rows if row.get("device") != "cpu"]
    claims = (
        *(_compiled, _eager, _steady, _everything, _elementwise, _mix, _compiled_mix, _at_checkpointing),
        *(_at_half, _curve, _budget, _reduction, _prediction, _search),
    )
    findings = [
        finding
        for claim in claims
        for name, shape in SHAPES.items()
        for finding in claim(name, of_shape(mine, shape))
    ]
    return [*findings, *_exact(mine), *_out_of_memory(mine), *_states(mine), *_near_eager(mine)]


def of_shape(rows: Sequence[Row], shape: tuple[Any, ...]) -> Rows:
    """Return the rows of the frontier on one workload, by method."""
    keys = ("model", "layers", "seq", "batch", "head")
    found = [row for row in of_kind(rows, "frontier") if not row.get("longest")]
    return {row["method"]: row for row in found if tuple(row[key] for key in keys) == shape}


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """Return the rows of a kind; rows without a kind, in files of earlier versions, are ``frontier``."""
    return [row for row in rows if row.get("kind", "frontier") == kind]


def missing(rows: Rows, *methods: str) -> str:
    """Return why a claim about these methods cannot be judged, or ``""`` if it can."""
    missing = [f"no row {method}" for method in methods if method not in rows]
    unmeasured = [
        f"{method}: {rows[method].get('status')}"
        for method in methods
        if method in rows and rows[method]["ms"] is None
    ]
    return "; ".join(missing + unmeasured)


def ratio(rows: Rows, one: str, base: str, key: str) -> float | None:
    """Return one method's number over another's; ``None``: one is missing."""
    if key == "ms":
        one, base = _nearer(rows, one, base), _nearer(rows, base, one)
    values = [rows[method][key] if method in rows else None for method in (one, base)]
    return values[0] / values[1] if None not in values and values[1] else None


def _nearer(rows: Rows, method: str, other: str) -> str:
    """Return the name of a method's row, or of its repetition, whichever was measured nearer to the other."""
    names = [name for name in (method, f"{method}{AGAIN}") if name in rows and rows[name]["ms"] is not None]
    if other not in rows or len(names) < 2:
        return method
    times = {name: datetime.fromisoformat(rows[name]["measured_at"]) for name in (other, *names)}
    return min(names, key=lambda name: abs(times[name] - times[other]))


def _remark(rows: Rows, *methods: str) -> str:
    nearest = [_nearer(rows, method, methods[0]) for method in methods]
    runs = {rows[method].get("run", "") for method in nearest if method in rows}
    return missing(rows, *methods) or ("of different runs" if len(runs) > 1 else "")


def worst_of(rows: Sequence[Row], number: Callable[[Row], float | None]) -> tuple[float | None, str]:
    """Return the largest number of all rows, and its method."""
    found = [(value, row["method"]) for row in rows if (value := number(row)) is not None]
    return max(found) if found else (None, "")


def _time(claim: str, rows: Rows, ours: str, base: str, most: float) -> Finding:
    return Finding(
        f"{claim}: {ours}, time over {base}",
        ratio(rows, ours, base, "ms"),
        most,
        "at most",
        _remark(rows, ours, base),
    )


def _compiled(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 1: compiled layers with ``auto`` against compiled layers alone."""
    ours, base = "actswap-compiled-auto", "compiled"
    yield _time(f"1 {name}", rows, ours, base, COMPILED_TIME)
    memory = ratio(rows, ours, base, "activation_bytes")
    fall = None if memory is None else 1 - memory
    bound, stretch = COMPILED_FALL[name]
    remark = _remark(rows, ours, base)
    yield Finding(f"1 {name}: {ours}, fall of the peak", fall, bound, "at least", remark, stretch)


def _eager(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 2: eager layers; the peak falls by the bytes swapped (without the tail that is kept)."""
    base = "eager"
    for ours, bound in EAGER_TIME.items():
        yield _time(f"2 {name}", rows, ours, base, bound)
        share, remark = None, _remark(rows, ours, base)
        if not missing(rows, ours, base) and rows[ours]["swapped_bytes"] is not None:
            fall = rows[base]["activation_bytes"] - rows[ours]["activation_bytes"]
            swapped = rows[ours]["swapped_bytes"]
            share = fall / swapped if swapped else 0.0
            remark = remark if swapped else "nothing was swapped"
        claim = f"2 {name}: {ours}, fall of the peak over bytes swapped"
        yield Finding(claim, share, SHARE_OF_SWAPPED, "at least", remark)


def _steady(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 3: no fragmentation and no drift in the timed steps, no long first step; our worst row."""
    ours = [row for method, row in rows.items() if method.startswith(_OURS) and row["ms"] is not None]
    for what, number, bound in (
        ("peak reserved over allocated", _reserved, RESERVED_OVER_ALLOCATED),
        ("spread of the timed steps", _spread, STEP_SPREAD),
        ("first step over median, less compilation and pinning", _first_step, FIRST_STEP_OVER_MEDIAN),
    ):
        worst, method = worst_of(ours, number)
        remark = method if worst is not None else _unknown(ours)
        yield Finding(f"3 {name}: {what}, worst of ours", worst, bound, "at most", remark)


def _is_fragmented(row: Row) -> bool:
    """Whether segments could not grow: what is reserved then holds fragments, and is not judged."""
    allocator = row.get("environment", {}).get("allocator", _EXPANDABLE)
    return _EXPANDABLE not in allocator


def _unknown(rows: Sequence[Row]) -> str:
    return "expandable segments are refused there" if any(map(_is_fragmented, rows)) else "no such row"


def _reserved(row: Row) -> float | None:
    reserved, allocated = row["peak_reserved_bytes"], row["peak_allocated_bytes"]
    return reserved / allocated if reserved and allocated and not _is_fragmented(row) else None


def _spread(row: Row) -> float | None:
    """Return the spread of the timed steps; before them ``auto`` decides and host memory is page-locked."""
    steps = row.get("step_ms", [])[row.get("warmup_steps", 0) :]
    return max(steps) / min(steps) - 1 if len(steps) > 1 else None


def _first_step(row: Row) -> float | None:
    """Return the first step's time over the median, less compilation and page-locking (0.76 s per GiB)."""
    first = row["first_step_ms"]
    apart = (row.get("first_step_compile_ms") or 0.0) + (row.get("first_step_pinning_ms") or 0.0)
    return None if first is None else (first - apart) / row["ms"]


def _everything(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 4: swap everything against TRL's offloading."""
    ours, base = "actswap-everything-20", "trl-offloading"
    yield _time(f"4 {name}", rows, ours, base, 1.0)
    memory = ratio(rows, ours, base, "activation_bytes")
    claim = f"4 {name}: {ours}, peak over {base}"
    yield Finding(claim, memory, 1.0, "below", _remark(rows, ours, base))


def _elementwise(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 5: all elementwise ops recomputed, and nothing else; at 8,192 tokens."""
    if name != "8k":
        return
    ours, base = "actswap-elementwise", "eager"
    memory = ratio(rows, ours, base, "activation_bytes")
    claim = f"5 {name}: {ours}, peak over {base}"
    yield Finding(claim, memory, ELEMENTWISE_PEAK, "at most", _remark(rows, ours, base))
    yield _time(f"5 {name}", rows, ours, base, ELEMENTWISE_TIME)


def _mix(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 6: eager layers, swap, keep and recompute mixed by hand, against checkpointing whole layers."""
    yield from _against_checkpointing(f"6 {name}", "actswap-mix-eager", rows, MIX_SPEED)


def _compiled_mix(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 7: the same in compiled layers, with the fastest mix that keeps to checkpointing's peak."""
    mixes = [rows[method] for method in _COMPILED_MIXES if method in rows and rows[method]["ms"]]
    limit = rows[_CHECKPOINTING]["activation_bytes"] if _CHECKPOINTING in rows else None
    low = [row for row in mixes if limit and (row["activation_bytes"] or limit + 1) <= limit]
    best = min(low, key=lambda row: row["ms"]) if low else None
    best = best or min(mixes, key=lambda row: row["activation_bytes"] or float("inf"), default=None)
    ours = best["method"] if best else _COMPILED_MIXES[0]
    yield from _against_checkpointing(
        f"7 {name}", ours, rows, COMPILED_MIX_SPEED[name], "the best compiled mix"
    )


def _against_checkpointing(
    claim: str, ours: str, rows: Rows, speed: float, called: str = ""
) -> Iterator[Finding]:
    """Yield two findings: a peak of at most Hugging Face checkpointing's, and at least the given speed-up."""
    base = _CHECKPOINTING
    remark = "; ".join(filter(None, (called and ours if ours in rows else "", _remark(rows, ours, base))))
    memory = ratio(rows, ours, base, "activation_bytes")
    yield Finding(f"{claim}: {called or ours}, peak over {base}", memory, 1.0, "at most", remark)
    faster = ratio(rows, base, ours, "ms")
    yield Finding(f"{claim}: {called or ours}, speed over {base}", faster, speed, "at least", remark)


def _at_checkpointing(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 8: the planner, with the peak of Hugging Face checkpointing as its budget, is faster."""
    for method, bounds in PLANNER_SPEED.items():
        bound, stretch = bounds[name]
        claim = f"8 {name}: {method}, speed over {_CHECKPOINTING}"
        remark = _remark(rows, method, _CHECKPOINTING)
        yield Finding(claim, ratio(rows, _CHECKPOINTING, method, "ms"), bound, "at least", remark, stretch)


def _at_half(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 9: with half of the activation memory a step takes hardly longer."""
    for method, base in HALF.items():
        yield _time(f"9 {name}", rows, method, base, HALF_TIME)


def _curve(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 10: no peer and no hand-written mix is faster than the planner with the same memory.

    The curve ends at the row in which nothing is swapped or recomputed, which the planner also chooses if
    memory is enough.
    """
    for compiled, layers in ((False, "eager layers"), (True, "compiled layers")):
        base = "compiled" if compiled else "eager"
        points = _points(rows, compiled)
        ours = {method: at for method, at in points.items() if _is_planner(method) or method == base}
        curve = lower_left(list(ours.values())) if any(map(_is_planner, ours)) else []
        below = [
            (1 - ms / time_on(curve, size_bytes), method)
            for method, (size_bytes, ms) in points.items()
            if curve and method not in ours
        ]
        gain, method = max(below, default=(None, "no curve, or nobody to compare with"))
        absent = [peer for peer in NAMED_PEERS[compiled] if peer not in points]
        remark = f"{method}; not measured: {', '.join(absent)}" if absent else method
        claim = f"10 {name}: {layers}, how far others are below the planner's curve"
        yield Finding(claim, gain, BELOW_THE_CURVE, "at most", remark, 0.0)


def _is_planner(method: str) -> bool:
    return method.startswith(PLANNER)


def _points(rows: Rows, compiled: bool) -> dict[str, Point]:
    return {
        method: (row["activation_bytes"], row["ms"])
        for method, row in rows.items()
        if row["compiled"] is compiled and row["ms"] and row["activation_bytes"] is not None
        if method != FLASH and not method.endswith(AGAIN)
    }


def lower_left(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both memory and time, from the least memory to the most."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def time_on(curve: Sequence[Point], size_bytes: float) -> float:
    """Return the time on a curve; left of it that of its first point, right of it that of its last."""
    if size_bytes <= curve[0][0]:
        return curve[0][1]
    for (left, slower), (right, faster) in pairwise(curve):
        if size_bytes <= right:
            return slower + (faster - slower) * (size_bytes - left) / (right - left)
    return curve[-1][1]


def _budget(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 11: what is allocated keeps within the budget, in the worst timed step of the worst row."""
    yield _worst(f"11 {name}: peak allocated over the budget", rows, _over_budget, 1.0)


def _reduction(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 12: the peak falls by ``reduce_by_gib``."""
    away = None
    remark = _remark(rows, _REDUCED, "eager")
    if _REDUCED in rows and _is_fragmented(rows[_REDUCED]):
        remark = _unknown([rows[_REDUCED]])
    elif not missing(rows, _REDUCED, "eager"):
        wanted = rows[_REDUCED]["config"]["memory"]["reduce_by_gib"] * 2**30
        fall = rows["eager"]["peak_reserved_bytes"] - rows[_REDUCED]["peak_reserved_bytes"]
        away = abs(fall / wanted - 1)
    claim = f"12 {name}: {_REDUCED}, fall of the peak, off the request"
    yield Finding(claim, away, REDUCTION, "at most", remark)


def _prediction(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 13: predicted peak and time of a step are those measured."""
    for what, predicted, measured, bound in (
        ("peak", "predicted_peak_bytes", "peak_allocated_bytes", PREDICTED_PEAK),
        ("time", "predicted_ms", "ms", PREDICTED_TIME),
    ):

        def off(row: Row, predicted: str = predicted, measured: str = measured) -> float | None:
            return abs(row[predicted] / row[measured] - 1) if row[predicted] and row[measured] else None

        yield _worst(f"13 {name}: predicted {what} off the measured", rows, off, bound)


def _search(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 14: the planner is stable after few steps, and plans in seconds."""
    for compiled, bound in STEPS_TO_STABLE.items():
        of_layers = {method: row for method, row in rows.items() if row["compiled"] is compiled}
        layers = "compiled layers" if compiled else "eager layers"
        yield _worst(f"14 {name}: {layers}, steps to stable", of_layers, _steps_to_stable, bound)
    yield _worst(f"14 {name}: s of planning", rows, lambda row: row["planning_s"], PLANNING_S)


def _worst(claim: str, rows: Rows, number: Callable[[Row], float | None], bound: float) -> Finding:
    ours = [row for method, row in rows.items() if _is_planner(method) and row["ms"] is not None]
    worst, method = worst_of(ours, number)
    remark = method if worst is not None else _unknown(ours)
    return Finding(f"{claim}, worst row", worst, bound, "at most", remark)


def _over_budget(row: Row) -> float | None:
    in_use, budget = row["peak_allocated_bytes"], row["budget_bytes"]
    return in_use / budget if in_use and budget else None


def _steps_to_stable(row: Row) -> float:
    return float("inf") if row["steps_to_stable"] is None else row["steps_to_stable"]


def _exact(rows: Sequence[Row]) -> Iterator[Finding]:
    """Claim 15: gradients are bitwise those without a plan, under every eager plan, in every row of ours."""
    for name in STRESS_TESTS:
        found = [row for row in of_kind(rows, "test") if row["method"].partition("::")[2].startswith(name)]
        run = [row for row in found if row["status"] != "skipped"]
        wrong = [row["method"].partition("::")[2] for row in run if row["status"] != "passed"]
        remark = ", ".join(wrong) or (f"of {len(run)}" if run else "no such test was run")
        yield Finding(f"15: {name}, that fail", len(wrong) if run else None, 0, "at most", remark)
    exact = [row for row in of_kind(rows, "frontier") if row.get("must_be_exact") and row["ms"] is not None]
    judged = [row for row in exact if row.get("exact") is not None]
    wrong = [row["method"] for row in judged if not row["exact"]]
    unjudged = [row["method"] for row in exact if row.get("exact") is None]
    remark = ", ".join(wrong) or f"of {len(judged)}" + (
        f"; not judged: {', '.join(unjudged)}" if unjudged else ""
    )
    yield Finding("15: rows of ours that are not exact", len(wrong) if judged else None, 0, "at most", remark)


def _out_of_memory(rows: Sequence[Row]) -> Iterator[Finding]:
    """Claim 16: a training with 0.6 of the memory that it needs succeeds; one with 0.3 says what it needs."""
    found = {row["method"]: row for row in of_kind(rows, "out of memory") if row["status"] == "measured"}

    def finding(what: str, name: str, number: Callable[[Row], float], bound: float, at: Any) -> Finding:
        row = found.get(name)
        remark = "no such row" if row is None else str(row["error"])[:200]
        return Finding(f"16: {name}, {what}", None if row is None else number(row), bound, at, remark)

    def wrong_losses(row: Row) -> float:
        expected = found["plain"]["losses"] if "plain" in found else []
        same = sum(one == other for one, other in zip(expected, row["losses"], strict=False))
        return max(len(expected), len(row["losses"])) - same

    def is_stable(row: Row) -> bool:
        return bool(row["phases"][-1:] == ["stable"])

    def over_limit(row: Row) -> float:
        return float(row["peak_bytes"] / row["limit_bytes"])

    planned = "planned at 0.6"
    yield finding("losses that are missing or differ", planned, wrong_losses, 0, "at most")
    yield finding("is stable at the end", planned, is_stable, 1, "at least")
    yield finding("peak over the limit", planned, over_limit, 1, "at most")
    yield finding("bytes evicted", planned, lambda row: row["evicted_bytes"], 1, "at least")
    # If this training fits without the planner, the limit is too large for the test to show anything.
    yield finding("fits", "without the planner at 0.6", lambda row: not row["error"], 0, "at most")
    says, least = "says how much would do", "planned at 0.3"
    yield finding(says, least, lambda row: "at least" in row["error"].lower(), 1, "at least")


def _states(rows: Sequence[Row]) -> Iterator[Finding]:
    """Claim 17: the optimizer's states on the host, a tenth of them on the device at once."""
    cases = {row["method"]: row for row in of_kind(rows, "optimizer states") if row["status"] == "measured"}
    ours = cases.get("ours, a tenth resident")
    plain = [row for method, row in cases.items() if method.startswith("plain")]
    remark = "" if ours and plain else "no such row"
    freed = ours["freed_share"] if ours else None
    yield Finding("17: states, share that is freed in forward", freed, FREED_STATES, "at least", remark)
    over = None
    if ours and plain:
        plain_ms = sum(row["step_ms"] for row in plain) / len(plain)
        link = ours["environment"]["hardware"]["link_gb_per_s"]
        gb_per_s = min(link["out_beside_in"], link["in_beside_out"])
        copies_ms = ours["state_bytes"] / (gb_per_s * 1e6)
        over = ours["step_ms"] / max(plain_ms, copies_ms)
        bound = "the link" if copies_ms > plain_ms else "compute"
        remark = f"plain {plain_ms:.0f} ms, copies {copies_ms:.0f} ms: bound by {bound}"
    yield Finding("17: states, step over the least it can take", over, STATES_TIME, "at most", remark)
    same = len({row["parameters"] for row in cases.values()}) if len(cases) > 1 else None
    remark = f"of {len(cases)} cases" if cases else "no such row"
    yield Finding("17: states, different parameters after training", same, 1, "at most", remark)


def _near_eager(rows: Sequence[Row]) -> Iterator[Finding]:
    """Claim 18: loss and gradients of a small whole model, tiled and streamed, are near eager's."""
    found = {row["method"].partition("::")[2]: row for row in of_kind(rows, "test")}
    for name in COMPARED:
        row = found.get(f"{COMPARISON}[{name}]")
        difference = None if row is None else row["properties"].get(DIFFERENCE)
        remark = "no such test was run" if row is None else "" if row["status"] == "passed" else row["status"]
        if rows and (difference is None or remark):
            difference = float("inf")
        claim = f"18: whole model, {name}, farther off than eager"
        yield Finding(claim, difference, NEAR_EAGER, "at most", remark)


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print one line per finding."""
    console = console_of(console)
    table = Table()
    table.add_column("claim")
    table.add_column("measured", justify="right", no_wrap=True)
    for name in ("bound", "verdict", "stretch"):
        table.add_column(name, no_wrap=True)
    table.add_column("remark")
    for finding in findings:
        number = "-" if finding.measured is None else f"{finding.measured:.3f}"
        bound = f"{finding.sense} {finding.bound:g}"
        stretch = "" if finding.stretch is None else f"{finding.stretch:g} {finding.reached}"
        table.add_row(finding.claim, number, bound, finding.verdict, stretch, finding.remark)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings of results files; return 1 if something measured fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "results", type=Path, nargs="*", help="JSON of gpu_day.py or frontier.py (default: the newest)"
    )
    found = parser.parse_args(argv).results
    newest = max(results_folder().glob("gpu_day_*.json"), key=lambda path: path.stat().st_mtime, default=None)
    paths = found or ([] if newest is None else [newest])
    if not paths:
        parser.error(f"no such file: {results_folder() / 'gpu_day_*.json'}")
    rows: list[Row] = []
    for path in paths:
        if not path.is_file():
            parser.error(f"no such file: {path}")
        lines = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(lines, list):
            parser.error(f"{path.name} is not a list of rows, as frontier.py writes it")
        rows += lines
    findings = judge(rows)
    print_findings(findings, None)
    return 1 if any(finding.verdict == "FAIL" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
