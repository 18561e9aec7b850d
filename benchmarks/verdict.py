"""Whether recorded results show what is claimed on a GPU: of swap, of recomputation, of the planner.

    python benchmarks/verdict.py benchmarks/results/{frontier,planner}_nvidia-h200_20260101.json
    python benchmarks/verdict.py                        the newest of results/

The claims are about one H200, Llama-2-7B shapes, decoder stack, 16 layers of 8,192 tokens and 6 of 32,768.
Exit status 1: something measured misses its bound. What was not measured is said, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.verdict_finding import Finding, Row, Rows, missing, of_shape, ratio, worst_of
from benchmarks.verdict_planner import judge_planner

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
_CHECKPOINTING = "hf-checkpointing"
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
