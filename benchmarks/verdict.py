"""Whether recorded results show what is claimed on a GPU: of swap, of recomputation, of the planner.

    python benchmarks/verdict.py benchmarks/results/{frontier,planner}_nvidia-h200_20260101.json
    python benchmarks/verdict.py                        the newest of results/

The claims are about one H200, Llama-2-7B shapes, decoder stack, 16 layers of 8,192 tokens and 6 of 32,768.
Times of the planner are compared through eager's of the same file, because peers may have been measured in
another run than the planner. A curve joins the planner's points: between two budgets the straight line, which
is above what a plan made for that budget takes.
Exit status 1: something measured misses its bound. What was not measured is said, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""The rows of one workload, by method."""


@dataclass(frozen=True)
class Finding:
    """One claim and what came of it.

    Args:
        claim: in words; its number, workload and method.
        measured: the number, ``None`` where there is none.
        bound: what it is held against.
        sense: on which side of the bound it must be.
        remark: why there is no number, or which row it is of.
    """

    claim: str
    measured: float | None
    bound: float
    sense: Literal["at most", "at least", "below"]
    remark: str = ""

    @property
    def verdict(self) -> str:
        """``pass``, ``FAIL`` or ``not measured``."""
        if self.measured is None:
            return "not measured"
        holds = {
            "at most": self.measured <= self.bound,
            "at least": self.measured >= self.bound,
            "below": self.measured < self.bound,
        }
        return "pass" if holds[self.sense] else "FAIL"


def of_shape(rows: Sequence[Row], shape: tuple[Any, ...]) -> Rows:
    """Return the rows of one workload, measured on an accelerator, by method."""
    keys = ("model", "layers", "seq", "batch", "head")
    return {
        row["method"]: row
        for row in rows
        if tuple(row[key] for key in keys) == shape and row["device"] != "cpu" and not row.get("longest")
    }


def missing(rows: Rows, *methods: str) -> str:
    """Why a claim about these methods cannot be judged, ``""`` if it can."""
    missing = [f"no row {method}" for method in methods if method not in rows]
    unmeasured = [
        f"{method}: {rows[method].get('status')}"
        for method in methods
        if method in rows and rows[method]["ms"] is None
    ]
    return "; ".join(missing + unmeasured)


def ratio(rows: Rows, one: str, base: str, key: str) -> float | None:
    """Return one method's number over another's, ``None``: one is missing."""
    values = [rows[method][key] if method in rows else None for method in (one, base)]
    return values[0] / values[1] if None not in values and values[1] else None


def worst_of(rows: Sequence[Row], number: Callable[[Row], float | None]) -> tuple[float | None, str]:
    """Return the largest number, and of which method."""
    found = [(value, row["method"]) for row in rows if (value := number(row)) is not None]
    return max(found) if found else (None, "")


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


RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = {"8k": ("Llama-2-7B", 16, 8192, 1, False), "32k": ("Llama-2-7B", 6, 32768, 1, False)}
"""Model, layers, tokens, batch and head of the workloads that are judged."""

COMPILED_TIME = 1.02
COMPILED_FALL = {"8k": 0.25, "32k": 0.30}
EAGER_TIME = 1.03
SHARE_OF_SWAPPED = 0.90
RESERVED_OVER_ALLOCATED = 1.08
STEP_SPREAD = 0.03
FIRST_STEP_OVER_MEDIAN = 3.0
ELEMENTWISE_PEAK = 0.55
ELEMENTWISE_TIME = 1.04
MIX_SPEED = 1.08
COMPILED_MIX_SPEED = {"8k": 1.30, "32k": 1.20}

_OURS = "actswap"
_COMPILED_MIXES = ("actswap-compiled-mix", "actswap-compiled-lean-mix")
"""Mixes by hand in compiled layers; the best of them is judged."""
_WIDTH_WITHOUT_TERMINAL = 140


def judge(rows: Sequence[Row]) -> list[Finding]:
    """Return all findings, claims 1 to 7 in order, on both workloads."""
    findings: list[Finding] = []
    for claim in (_compiled, _eager, _steady, _everything, _elementwise, _mix, _compiled_mix):
        for name, shape in SHAPES.items():
            findings += claim(name, of_shape(rows, shape))
    return findings


def _compiled(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 1: compiled layers with ``auto`` against compiled layers alone."""
    ours, base = "actswap-compiled-auto", "compiled"
    remark = missing(rows, ours, base)
    yield Finding(
        f"1 {name}: {ours}, time over {base}",
        ratio(rows, ours, base, "ms"),
        COMPILED_TIME,
        "at most",
        remark,
    )
    memory = ratio(rows, ours, base, "activation_bytes")
    fall = None if memory is None else 1 - memory
    yield Finding(f"1 {name}: {ours}, fall of the peak", fall, COMPILED_FALL[name], "at least", remark)


def _eager(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 2: eager layers; the peak falls by what is swapped (the kept tail is not among it)."""
    base = "eager"
    for ours in ("actswap-default-auto", "actswap-case3-auto"):
        remark = missing(rows, ours, base)
        time_ratio = ratio(rows, ours, base, "ms")
        yield Finding(f"2 {name}: {ours}, time over {base}", time_ratio, EAGER_TIME, "at most", remark)
        share = None
        if not remark and rows[ours]["swapped_bytes"] is not None:
            fall = rows[base]["activation_bytes"] - rows[ours]["activation_bytes"]
            swapped = rows[ours]["swapped_bytes"]
            share = fall / swapped if swapped else 0.0
            remark = "" if swapped else "nothing was swapped"
        claim = f"2 {name}: {ours}, fall of the peak over bytes swapped"
        yield Finding(claim, share, SHARE_OF_SWAPPED, "at least", remark)


def _steady(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 3: no fragmentation, no drift, no long first step, in the worst of our rows."""
    ours = [row for method, row in rows.items() if method.startswith(_OURS) and row["ms"] is not None]
    for what, number, bound in (
        ("peak reserved over allocated", _reserved, RESERVED_OVER_ALLOCATED),
        ("spread of steps 3 and later", _spread, STEP_SPREAD),
        ("first step over median, compilation deducted", _first_step, FIRST_STEP_OVER_MEDIAN),
    ):
        worst, method = worst_of(ours, number)
        remark = method if worst is not None else "no such row"
        yield Finding(f"3 {name}: {what}, worst of ours", worst, bound, "at most", remark)


def _everything(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 4: swap everything against TRL's offloading."""
    ours, base = "actswap-everything-20", "trl-offloading"
    remark = missing(rows, ours, base)
    yield Finding(
        f"4 {name}: {ours}, time over {base}", ratio(rows, ours, base, "ms"), 1.0, "at most", remark
    )
    memory = ratio(rows, ours, base, "activation_bytes")
    yield Finding(f"4 {name}: {ours}, peak over {base}", memory, 1.0, "below", remark)


def _elementwise(name: str, rows: Rows) -> Iterator[Finding]:
    """Claim 5: all elementwise ops recomputed, fused, and nothing else; at 8,192 tokens."""
    if name != "8k":
        return
    ours, base = "actswap-elementwise-fused", "eager"
    remark = missing(rows, ours, base)
    memory = ratio(rows, ours, base, "activation_bytes")
    yield Finding(f"5 {name}: {ours}, peak over {base}", memory, ELEMENTWISE_PEAK, "at most", remark)
    time_ratio = ratio(rows, ours, base, "ms")
    yield Finding(f"5 {name}: {ours}, time over {base}", time_ratio, ELEMENTWISE_TIME, "at most", remark)


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
    """At Hugging Face checkpointing's peak or lower, and so much faster."""
    base = _CHECKPOINTING
    remark = missing(rows, ours, base) or (ours if called else "")
    memory = ratio(rows, ours, base, "activation_bytes")
    yield Finding(f"{claim}: {called or ours}, peak over {base}", memory, 1.0, "at most", remark)
    faster = ratio(rows, base, ours, "ms")
    yield Finding(f"{claim}: {called or ours}, speed over {base}", faster, speed, "at least", remark)


def _reserved(row: Row) -> float | None:
    reserved, allocated = row["peak_reserved_bytes"], row["peak_allocated_bytes"]
    return reserved / allocated if reserved and allocated else None


def _spread(row: Row) -> float | None:
    steps = row.get("step_ms", [])[2:]
    return max(steps) / min(steps) - 1 if len(steps) > 1 else None


def _first_step(row: Row) -> float | None:
    first = row["first_step_ms"]
    return None if first is None else (first - (row.get("first_step_compile_ms") or 0.0)) / row["ms"]


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print one line per finding."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_WITHOUT_TERMINAL)
    table = Table()
    table.add_column("claim")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("remark")
    for finding in findings:
        number = "-" if finding.measured is None else f"{finding.measured:.3f}"
        bound = f"{finding.sense} {finding.bound:g}"
        table.add_row(finding.claim, number, bound, finding.verdict, finding.remark)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings of results files; return 1 if something measured fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "results", type=Path, nargs="*", help="JSON of frontier.py and of planner.py (default: the newest)"
    )
    found = parser.parse_args(argv).results
    paths = found or [path for path in (newest("frontier"), newest("planner")) if path is not None]
    if not paths:
        parser.error("no such file: results/frontier_*.json")
    files = []
    for path in paths:
        if not path.is_file():
            parser.error(f"no such file: {path}")
        files.append(json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(files[-1], list):
            parser.error(f"{path.name} is not a list of rows, as frontier.py writes it")
    findings = [*judge(files[0]), *judge_planner(files, SHAPES)]
    print_findings(findings, None)
    return 1 if any(finding.verdict == "FAIL" for finding in findings) else 0


def newest(what: str) -> Path | None:
    """Return the file of ``frontier.py`` or ``planner.py`` written last whose name ends in a date."""
    found = RESULTS.glob(f"{what}_*_" + "[0-9]" * 8 + ".json")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


if __name__ == "__main__":
    sys.exit(main())
