"""Whether recorded results show what the planner claims; `verdict.py` asks.

Times are compared through eager's of the same file, because peers may have been measured in another run than
the planner. A curve joins the planner's points: between two budgets the straight line, which is above what a
plan made for that budget takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.verdict_finding import Finding, Row, Rows, missing, of_shape, ratio, worst_of

SPEED = {"actswap_plan_checkpointing": {"8k": 1.10, "32k": 1.15}}
SPEED["actswap_plan_compiled_checkpointing"] = {"8k": 1.31, "32k": 1.25}
HALF = {"actswap_plan_half": "eager", "actswap_plan_compiled_half": "compiled"}
HALF_TIME = 1.04
BELOW_THE_CURVE = 0.02
REDUCTION = 0.05
PREDICTED_PEAK = 0.05
PREDICTED_TIME = 0.10
STEPS_TO_STABLE = 10
PLANNING_S = 5.0

PLANNER = "actswap_plan"
_CHECKPOINTING = "hf-checkpointing"
_REDUCED = "actswap_plan_reduce"
_Point = tuple[float, float]
"""Activation bytes, and time over eager's."""


def judge_planner(files: Sequence[Sequence[Row]], shapes: Mapping[str, tuple[Any, ...]]) -> list[Finding]:
    """Return all findings, claims 8 to 14 in order, on all workloads.

    Args:
        files: rows of each file; the planner's are taken from the last that has them.
        shapes: of the workloads that are judged, by name.
    """
    findings: list[Finding] = []
    for claim in (_at_checkpointing, _at_half, _curve, _budget, _reduction, _prediction, _search):
        for name, shape in shapes.items():
            findings += claim(name, [of_shape(rows, shape) for rows in files])
    return findings


def _with_planner(files: Sequence[Rows]) -> Rows:
    with_rows = [rows for rows in files if any(method.startswith(PLANNER) for method in rows)]
    return with_rows[-1] if with_rows else {}


def _at_checkpointing(name: str, files: Sequence[Rows]) -> Iterator[Finding]:
    """Claim 8: at the peak of Hugging Face checkpointing, so much faster."""
    rows = _with_planner(files)
    for method, bounds in SPEED.items():
        yield Finding(
            f"8 {name}: {method}, speed over {_CHECKPOINTING}",
            ratio(rows, _CHECKPOINTING, method, "ms"),
            bounds[name],
            "at least",
            missing(rows, method, _CHECKPOINTING),
        )


def _at_half(name: str, files: Sequence[Rows]) -> Iterator[Finding]:
    """Claim 9: at half of eager's activation peak, as good as no policy."""
    rows = _with_planner(files)
    for method, base in HALF.items():
        time_ratio = ratio(rows, method, base, "ms")
        remark = missing(rows, method, base)
        yield Finding(f"9 {name}: {method}, time over {base}", time_ratio, HALF_TIME, "at most", remark)


def _curve(name: str, files: Sequence[Rows]) -> Iterator[Finding]:
    """Claim 10: no peer and no mix by hand is faster than the planner with its memory.

    The curve ends where nothing is done: so does the planner, where memory is enough.
    """
    for compiled, layers in ((False, "eager layers"), (True, "compiled layers")):
        base = "compiled" if compiled else "eager"
        ours = {m: at for m, at in _points(_with_planner(files), compiled).items() if _ours(m) or m == base}
        curve = lower_left(list(ours.values())) if any(map(_ours, ours)) else []
        below: list[tuple[float, str]] = []
        for rows in files:
            for method, (size_bytes, ms) in _points(rows, compiled).items():
                if curve and method not in ours:
                    below.append((1 - ms / time_on(curve, size_bytes), method))
        gain, method = max(below, default=(None, "no curve, or nobody to compare with"))
        yield Finding(
            f"10 {name}: {layers}, how far others are below the planner's curve",
            gain,
            BELOW_THE_CURVE,
            "at most",
            method,
        )


def _ours(method: str) -> bool:
    return method.startswith(PLANNER)


def _points(rows: Rows, compiled: bool) -> dict[str, _Point]:
    eager = rows.get("eager", {}).get("ms")
    return {
        method: (row["activation_bytes"], row["ms"] / eager)
        for method, row in rows.items()
        if eager and row["compiled"] is compiled and row["ms"] and row["activation_bytes"] is not None
    }


def lower_left(points: Sequence[_Point]) -> list[_Point]:
    """Return the points that no other beats in both, from the least memory to the most."""
    best: list[_Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def time_on(curve: Sequence[_Point], size_bytes: float) -> float:
    """Return the time on a curve; left of it that of its first point, right of it that of its last."""
    if size_bytes <= curve[0][0]:
        return curve[0][1]
    for (left, slower), (right, faster) in pairwise(curve):
        if size_bytes <= right:
            return slower + (faster - slower) * (size_bytes - left) / (right - left)
    return curve[-1][1]


def _budget(name: str, files: Sequence[Rows]) -> Iterator[Finding]:
    """Claim 11: what the allocator held, in the worst timed step of the worst row."""
    yield _worst(f"11 {name}: peak reserved over the budget", files, _over_budget, 1.0)


def _reduction(name: str, files: Sequence[Rows]) -> Iterator[Finding]:
    """Claim 12: ``reduce_by_gib`` is what the peak falls by."""
    rows = _with_planner(files)
    remark = missing(rows, _REDUCED, "eager")
    away = None
    if not remark:
        config = rows[_REDUCED]["config"]
        wanted = config["memory"]["reduce_by_gib"] * 2**30
        fall = rows["eager"]["peak_reserved_bytes"] - rows[_REDUCED]["peak_reserved_bytes"]
        away = abs(fall / wanted - 1)
    yield Finding(f"12 {name}: {_REDUCED}, fall of the peak off the wish", away, REDUCTION, "at most", remark)


def _prediction(name: str, files: Sequence[Rows]) -> Iterator[Finding]:
    """Claim 13: what was foretold of a step is what it took."""
    yield _worst(
        f"13 {name}: predicted peak off the measured",
        files,
        lambda row: _off(row["predicted_peak_bytes"], row["peak_allocated_bytes"]),
        PREDICTED_PEAK,
    )
    yield _worst(
        f"13 {name}: predicted time off the measured",
        files,
        lambda row: _off(row["predicted_ms"], row["ms"]),
        PREDICTED_TIME,
    )


def _search(name: str, files: Sequence[Rows]) -> Iterator[Finding]:
    """Claim 14: stable soon, and planned in seconds."""
    yield _worst(f"14 {name}: steps to stable", files, _steps_to_stable, STEPS_TO_STABLE)
    yield _worst(f"14 {name}: s of planning", files, lambda row: row["planning_s"], PLANNING_S)


def _worst(claim: str, files: Sequence[Rows], number: Callable[[Row], float | None], bound: float) -> Finding:
    rows = _with_planner(files)
    ours = [row for method, row in rows.items() if _ours(method) and row["ms"] is not None]
    worst, method = worst_of(ours, number)
    return Finding(
        f"{claim}, worst row", worst, bound, "at most", method if worst is not None else "no such row"
    )


def _over_budget(row: Row) -> float | None:
    reserved, budget = row["peak_reserved_bytes"], row["budget_bytes"]
    return reserved / budget if reserved and budget else None


def _off(predicted: float | None, measured: float | None) -> float | None:
    return abs(predicted / measured - 1) if predicted and measured else None


def _steps_to_stable(row: Row) -> float:
    return float("inf") if row["steps_to_stable"] is None else row["steps_to_stable"]
