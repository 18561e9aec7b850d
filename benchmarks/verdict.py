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
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.records import print_table, results_folder
from benchmarks.rows import AGAIN, FLASH

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""The rows of one workload, by method."""
Point = tuple[float, float]
"""Activation bytes, and milliseconds of a step."""

SHAPES = {"8k": ("Llama-2-7B", 16, 8192, 1, False), "32k": ("Llama-2-7B", 6, 32768, 1, False)}
"""Model, layers, tokens, batch and head of the workloads that are judged."""

SHARE_OF_SWAPPED = 0.90
RESERVED_OVER_ALLOCATED = 1.08
STEP_SPREAD = 0.03
FIRST_STEP_OVER_MEDIAN = 3.0
BELOW_THE_CURVE = 0.02
REDUCTION = 0.05
PREDICTED_PEAK = 0.02
PREDICTED_TIME = 0.05
PLANNING_S = 5.0
FREED_STATES = 0.90
NEAR_EAGER = 0.01
"""How much farther from fp32 than eager's loss and gradients (as one vector) are in bf16: relative."""
STATES_TIME = 1.05
"""The most time of a step, as a multiple of its lower bound: plain's time, or the copies of the states in
both directions at once."""

_OURS, PLANNER = "actswap", "actswap_plan"
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
_CHECKPOINTING = "hf-checkpointing"
_REDUCED = "actswap_plan_reduce"
BEST_MIX = "the best compiled mix"
"""Of these hand-written mixes in compiled layers the fastest that keeps to checkpointing's peak is judged."""
_COMPILED_MIXES = ("actswap-compiled-mix", "actswap-compiled-lean-mix")

Sense = Literal["at most", "at least", "below"]
_HOLDS = {"at most": operator.le, "at least": operator.ge, "below": operator.lt}


class Ratio(NamedTuple):
    """A claim about a row's number over that of another row.

    ``what`` is ``time`` (ours over base), ``speed`` (its inverse), ``peak`` (of activations) or ``fall`` (one
    less that). For 8k and 32k tokens there are the bound and what is hoped for (``None``: no
    claim, nothing more). The number must be on the side of the bound that ``what`` asks for, or on that of
    ``sense``.
    """

    claim: int
    ours: str
    base: str
    what: Literal["time", "speed", "peak", "fall"]
    at_8k: tuple[float, float | None]
    at_32k: tuple[float, float | None] | None
    sense: Sense | None = None


RATIOS = (
    # Compiled layers with ``auto`` against compiled layers alone; eager ones against eager.
    Ratio(1, "actswap-compiled-auto", "compiled", "time", (1.01, None), (1.01, None)),
    Ratio(1, "actswap-compiled-auto", "compiled", "fall", (0.25, 0.27), (0.30, 0.34)),
    Ratio(2, "actswap-default-auto", "eager", "time", (1.02, None), (1.02, None)),
    Ratio(2, "actswap-case3-auto", "eager", "time", (1.03, None), (1.03, None)),
    # Swap everything; recompute all elementwise ops and nothing else; mixes by hand.
    Ratio(4, "actswap-everything-20", "trl-offloading", "time", (1.0, None), (1.0, None)),
    Ratio(4, "actswap-everything-20", "trl-offloading", "peak", (1.0, None), (1.0, None), "below"),
    Ratio(5, "actswap-elementwise", "eager", "peak", (0.55, None), None),
    Ratio(5, "actswap-elementwise", "eager", "time", (1.1, None), None),
    Ratio(6, "actswap-mix-eager", _CHECKPOINTING, "peak", (1.0, None), (1.0, None)),
    Ratio(6, "actswap-mix-eager", _CHECKPOINTING, "speed", (1.08, None), (1.08, None)),
    Ratio(7, BEST_MIX, _CHECKPOINTING, "peak", (1.0, None), (1.0, None)),
    Ratio(7, BEST_MIX, _CHECKPOINTING, "speed", (1.30, None), (1.20, None)),
    # The planner at checkpointing's peak, and with half of the activation memory.
    Ratio(8, "actswap_plan_checkpointing", _CHECKPOINTING, "speed", (1.15, 1.20), (1.25, None)),
    Ratio(8, "actswap_plan_compiled_checkpointing", _CHECKPOINTING, "speed", (1.31, 1.40), (1.25, 1.35)),
    Ratio(9, "actswap_plan_half", "eager", "time", (1.04, None), (1.04, None)),
    Ratio(9, "actswap_plan_compiled_half", "compiled", "time", (1.04, None), (1.04, None)),
)


@dataclass(frozen=True)
class Finding:
    """One claim, and the number that was measured for it (``None``: there is none; ``remark`` says why)."""

    claim: str
    measured: float | None
    bound: float
    sense: Sense
    remark: str = ""
    stretch: float | None = None

    @property
    def verdict(self) -> str:
        """``pass``, ``FAIL`` or ``not measured``."""
        if self.measured is None:
            return "not measured"
        return "pass" if _HOLDS[self.sense](self.measured, self.bound) else "FAIL"

    @property
    def reached(self) -> str:
        """Whether the number reaches ``stretch``: ``yes``, ``not yet``, or ``""`` if one is missing."""
        if self.measured is None or self.stretch is None:
            return ""
        return "yes" if _HOLDS[self.sense](self.measured, self.stretch) else "not yet"


def judge(rows: Sequence[Row]) -> list[Finding]:
    """Return all findings, claims 1 to 14 on both workloads, then those of tests and trainings.

    Rows measured on a CPU are not judged. The comparison of tiled and streamed steps with eager is no claim
    but a condition: if anything was measured on an accelerator, a comparison that is missing fails.
    """
    mine = [row for row in rows if row.get("device") != "cpu"]
    findings: list[Finding] = []
    for name, shape in SHAPES.items():
        found = of_shape(mine, shape)
        for claims in (_ratios, _worst, _eager, _curve, _reduction):
            findings += claims(name, found)
    findings.sort(key=lambda finding: int(finding.claim.split()[0]))
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
    named = [rows[method]["method"] for method in methods if method == BEST_MIX and method in rows]
    told = missing(rows, *methods) or ("of different runs" if len(runs) > 1 else "")
    return "; ".join(filter(None, (*named, told)))


def _ratios(name: str, measured: Rows) -> Iterator[Finding]:
    rows = _with_best_mix(measured)
    for claim in RATIOS:
        bounds = claim.at_8k if name == "8k" else claim.at_32k
        if bounds is None:
            continue
        is_time = claim.what in ("time", "speed")
        one, other = (claim.base, claim.ours) if claim.what == "speed" else (claim.ours, claim.base)
        value, key = None, "ms" if is_time else "activation_bytes"
        if is_time:
            one, other = _nearer(rows, one, other), _nearer(rows, other, one)
        if one in rows and other in rows and rows[other][key] and rows[one][key] is not None:
            value = rows[one][key] / rows[other][key]
        words = f"{claim.what} over {claim.base}"
        if claim.what == "fall":
            value, words = None if value is None else 1 - value, "fall of the peak"
        sense = claim.sense or ("at least" if claim.what in ("speed", "fall") else "at most")
        remark = _remark(rows, claim.ours, claim.base)
        words = f"{claim.claim} {name}: {claim.ours}, {words}"
        yield Finding(words, value, bounds[0], sense, remark, bounds[1])


def _with_best_mix(rows: Rows) -> Rows:
    """Return the rows, and the best compiled mix, if there is one, under a name of its own."""
    mixes = [rows[method] for method in _COMPILED_MIXES if method in rows and rows[method]["ms"]]
    limit = rows[_CHECKPOINTING]["activation_bytes"] if _CHECKPOINTING in rows else None
    low = [row for row in mixes if limit and (row["activation_bytes"] or limit + 1) <= limit]
    best = min(low, key=lambda row: row["ms"]) if low else None
    best = best or min(mixes, key=lambda row: row["activation_bytes"] or float("inf"), default=None)
    return {**rows, BEST_MIX: best} if best else rows


def _eager(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 2: the peak falls by the bytes swapped (without the tail that is kept)."""
    base = "eager"
    for ours in (ratio.ours for ratio in RATIOS if ratio.claim == 2):
        share, remark = None, _remark(rows, ours, base)
        if not missing(rows, ours, base) and rows[ours]["swapped_bytes"] is not None:
            fall = rows[base]["activation_bytes"] - rows[ours]["activation_bytes"]
            swapped = rows[ours]["swapped_bytes"]
            share = fall / swapped if swapped else 0.0
            remark = remark if swapped else "nothing was swapped"
        words = f"2 {name}: {ours}, fall of the peak over bytes swapped"
        yield Finding(words, share, SHARE_OF_SWAPPED, "at least", remark)


def _is_fragmented(row: Row) -> bool:
    """Whether segments could not grow: what is reserved then holds fragments, and is not judged."""
    allocator = row.get("environment", {}).get("allocator", _EXPANDABLE)
    return _EXPANDABLE not in allocator


def _unknown(rows: Sequence[Row]) -> str:
    return "expandable segments are refused there" if any(map(_is_fragmented, rows)) else "no such row"


def _over(row: Row, one: str, other: str) -> float | None:
    return row[one] / row[other] if row[one] and row[other] else None


def _reserved(row: Row) -> float | None:
    over = _over(row, "peak_reserved_bytes", "peak_allocated_bytes")
    return None if _is_fragmented(row) else over


def _spread(row: Row) -> float | None:
    """Return the spread of the timed steps; before them ``auto`` decides and host memory is page-locked."""
    steps = row.get("step_ms", [])[row.get("warmup_steps", 0) :]
    return max(steps) / min(steps) - 1 if len(steps) > 1 else None


def _first_step(row: Row) -> float | None:
    """Return the first step's time over the median, less compilation and page-locking (0.76 s per GiB)."""
    first = row["first_step_ms"]
    apart = (row.get("first_step_compile_ms") or 0.0) + (row.get("first_step_pinning_ms") or 0.0)
    return None if first is None else (first - apart) / row["ms"]


def _over_budget(row: Row) -> float | None:
    return _over(row, "peak_allocated_bytes", "budget_bytes")


def _off(predicted: str, measured: str, row: Row) -> float | None:
    over = _over(row, predicted, measured)
    return None if over is None else abs(over - 1)


def _steps_to_stable(compiled: bool, row: Row) -> float | None:
    found = float("inf") if row["steps_to_stable"] is None else row["steps_to_stable"]
    return found if row["compiled"] is compiled else None


class Worst(NamedTuple):
    """A claim that the largest number of all rows whose names begin so is at most a bound."""

    claim: int
    what: str
    names_begin: str
    number: Callable[[Row], float | None]
    bound: float


_PEAK_OFF = partial(_off, "predicted_peak_bytes", "peak_allocated_bytes")
_TIME_OFF = partial(_off, "predicted_ms", "ms")
_FIRST_STEP = "first step over median, less compilation and pinning, worst of ours"
WORST = (
    # No fragmentation and no drift in the timed steps.
    Worst(3, "peak reserved over allocated, worst of ours", _OURS, _reserved, RESERVED_OVER_ALLOCATED),
    Worst(3, "spread of the timed steps, worst of ours", _OURS, _spread, STEP_SPREAD),
    Worst(3, _FIRST_STEP, _OURS, _first_step, FIRST_STEP_OVER_MEDIAN),
    # The planner's budget, predictions and search; the warm-up of compiled layers takes a step more.
    Worst(11, "peak allocated over the budget, worst row", PLANNER, _over_budget, 1.0),
    Worst(13, "predicted peak off the measured, worst row", PLANNER, _PEAK_OFF, PREDICTED_PEAK),
    Worst(13, "predicted time off the measured, worst row", PLANNER, _TIME_OFF, PREDICTED_TIME),
    Worst(14, "eager layers, steps to stable, worst row", PLANNER, partial(_steps_to_stable, False), 10),
    Worst(14, "compiled layers, steps to stable, worst row", PLANNER, partial(_steps_to_stable, True), 11),
    Worst(14, "s of planning, worst row", PLANNER, lambda row: row["planning_s"], PLANNING_S),
)


def _worst(name: str, rows: Rows) -> Iterator[Finding]:
    for claim in WORST:
        named = [row for method, row in rows.items() if method.startswith(claim.names_begin) and row["ms"]]
        found = [(value, row["method"]) for row in named if (value := claim.number(row)) is not None]
        value, remark = max(found) if found else (None, _unknown(named))
        yield Finding(f"{claim.claim} {name}: {claim.what}", value, claim.bound, "at most", remark)


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
        words = f"10 {name}: {layers}, how far others are below the planner's curve"
        yield Finding(words, gain, BELOW_THE_CURVE, "at most", remark, 0.0)


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
    sizes, times = zip(*curve, strict=True)
    return float(np.interp(size_bytes, sizes, times))


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
    words = f"12 {name}: {_REDUCED}, fall of the peak, off the request"
    yield Finding(words, away, REDUCTION, "at most", remark)


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
    remark = ", ".join(wrong) or f"of {len(judged)}"
    if len(judged) < len(exact) and not wrong:
        remark += f"; not judged: {', '.join(row['method'] for row in exact if row.get('exact') is None)}"
    yield Finding("15: rows of ours that are not exact", len(wrong) if judged else None, 0, "at most", remark)


def _out_of_memory(rows: Sequence[Row]) -> Iterator[Finding]:
    """Claim 16: a training with 0.6 of the memory that it needs succeeds; one with 0.3 says what it needs."""
    found = {row["method"]: row for row in of_kind(rows, "out of memory") if row["status"] == "measured"}

    def wrong_losses(row: Row) -> int:
        expected = found["plain"]["losses"] if "plain" in found else []
        same = sum(one == other for one, other in zip(expected, row["losses"], strict=False))
        return max(len(expected), len(row["losses"])) - same

    planned, without, least = "planned at 0.6", "without the planner at 0.6", "planned at 0.3"
    claims: tuple[tuple[str, str, Callable[[Row], float], float, Sense], ...] = (
        (planned, "losses that are missing or differ", wrong_losses, 0, "at most"),
        (planned, "is stable at the end", lambda row: row["phases"][-1:] == ["stable"], 1, "at least"),
        (planned, "peak over the limit", lambda row: row["peak_bytes"] / row["limit_bytes"], 1, "at most"),
        (planned, "bytes evicted", lambda row: row["evicted_bytes"], 1, "at least"),
        # If this training fits without the planner, the limit is too large for the test to show anything.
        (without, "fits", lambda row: not row["error"], 0, "at most"),
        (least, "says how much would do", lambda row: "at least" in row["error"].lower(), 1, "at least"),
    )
    for name, what, number, bound, sense in claims:
        row = found.get(name)
        remark = "no such row" if row is None else str(row["error"])[:200]
        yield Finding(f"16: {name}, {what}", None if row is None else number(row), bound, sense, remark)


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


def print_findings(findings: Sequence[Finding]) -> None:
    """Print one line per finding."""
    rows = [
        {
            "claim": finding.claim,
            "measured": "-" if finding.measured is None else f"{finding.measured:.3f}",
            "bound": f"{finding.sense} {finding.bound:g}",
            "verdict": finding.verdict,
            "stretch": "" if finding.stretch is None else f"{finding.stretch:g} {finding.reached}",
            "remark": finding.remark,
        }
        for finding in findings
    ]
    print_table(rows, wrapped=("claim", "remark"))


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
    print_findings(findings)
    return 1 if any(finding.verdict == "FAIL" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
