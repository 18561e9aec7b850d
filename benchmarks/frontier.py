"""The time-memory frontier of a Llama: what each way of saving memory costs, side by side.

    python benchmarks/frontier.py                       everything suited to this machine
    python benchmarks/frontier.py --preset cpu --rows actswap-mixed --layers 2

It measures in this process, without a time limit: for the CPU, or for a row or two. On an accelerator
`gpu_day.py` measures the same rows with time limits, and the longest sequences. Rows that are in the results
file already are not measured again without ``--again``.

Exit status 1: a row that must be exact is not, a row failed, or eager itself cannot be trusted. `README.md`
beside this file says what the numbers mean. The rows are defined in `rows.py`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import torch

from benchmarks.measure import Bench
from benchmarks.records import (
    Record,
    Records,
    Result,
    console_of,
    device_named,
    file_name,
    origin,
    print_table,
    results_folder,
)
from benchmarks.rows import EAGER, ROWS, Row, with_bases
from benchmarks.runner import Request, Session, again_asked, frontier_jobs
from benchmarks.workloads import DEFAULT_PRESETS, PRESETS, Workload, fitted

_CHANGES = ("layers", "tokens", "dtype", "steps")
"""Arguments that replace a preset's value."""


def main(argv: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measure, print the tables, write the JSON; return the exit status.

    Args:
        argv: the command line; by default the process's.
        rows: the table to choose from.
    """
    arguments = _parse(argv, rows)
    device = device_named(arguments.device)
    about = origin(device)
    path = arguments.out
    # Whether no option narrows the run, so that it may be kept among the recorded ones.
    if path is None and all(
        getattr(arguments, name) is None for name in ("preset", *_CHANGES, "rows", "compile")
    ):
        path = results_folder() / f"frontier_{file_name(about['device'])}_{datetime.now():%Y%m%d}.json"
    bench = Bench(device, rows)

    def ask(request: Request, _limit_s: float | None) -> Any:
        return request(bench)

    session = Session(Records(path), ask, about, again_asked(arguments.again))
    compiling = arguments.compile if arguments.compile is not None else device.type != "cpu"
    chosen = [row for row in rows if not arguments.rows or row.name in arguments.rows]
    done: list[Record] = []
    for workload in _workloads(arguments, device):
        jobs = frontier_jobs([workload], with_bases(chosen, rows), compiling)
        done += session.run(jobs, _say)
        lines = [line for job in jobs if (line := session.find(job)) is not None]
        print_results(workload, [Result(**line) for line in lines])
    if path:
        _say(f"written: {path}")
    return 1 if any(_is_bad(record) for record in done) else 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _is_bad(record: Record) -> bool:
    """Whether a row is broken, or eager but unfit for comparisons (running out of memory is no fault)."""
    if record.failed or not isinstance(record, Result):
        return record.failed
    return record.method == EAGER.name and record.status == "measured" and not record.exact


def _parse(argv: Sequence[str] | None, rows: Sequence[Row]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Rows: " + ", ".join(row.name for row in rows),
    )
    parser.add_argument("--device", help="default: the accelerator, where there is one")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, help="default: what suits the device")
    parser.add_argument("--layers", type=int, help="decoder layers (default: the preset's)")
    parser.add_argument("--tokens", type=int, help="length of the one sequence (default: the preset's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the preset's")
    parser.add_argument("--steps", type=int, help="timed steps per row (default: the preset's)")
    names = [row.name for row in rows]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW")
    again = "measure rows again that the results hold (default: all of them)"
    parser.add_argument("--again", nargs="*", choices=[EAGER.name, *names], metavar="ROW", help=again)
    compiled = "measure rows that compile (default: not on the CPU)"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=compiled)
    parser.add_argument("--out", type=Path, help="JSON file (default: in results/, complete runs only)")
    arguments = parser.parse_args(argv)
    for name in ("layers", "tokens", "steps"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"argument --{name}: at least 1, found {value}")
    return arguments


def _workloads(arguments: argparse.Namespace, device: torch.device) -> list[Workload]:
    """Return the presets for the device, changed as the options say, and scaled down to its memory."""
    suited = DEFAULT_PRESETS["cpu" if device.type == "cpu" else "accelerator"]
    changes: dict[str, Any] = {name: value for name in _CHANGES if (value := getattr(arguments, name))}
    workloads = [replace(PRESETS[name], **changes) for name in arguments.preset or suited]
    if device.type == "cpu":
        return workloads
    free_bytes, _ = torch.accelerator.get_memory_info(device)
    return [fitted(workload, free_bytes) for workload in workloads]


def print_results(workload: Workload, results: Sequence[Result]) -> None:
    """Print one line per measured row, and below the reasons and differences of rows that have some."""
    measured = [result for result in results if result.status == "measured"]
    title = f"{workload.name}: {workload.title}, forward + backward; x: against eager"
    print_table([_cells(result) for result in measured], title)
    for result in results:
        if result.reason or result.differing:
            differs = f"differs in {', '.join(result.differing[:5])}" if result.differing else ""
            text = f"{result.method}: {result.status}. {result.reason}{differs}"
            console_of().print(text, markup=False, highlight=False)


def _cells(result: Result) -> dict[str, object]:
    def mebibytes(value: float | None) -> float | None:
        return None if value is None else value / 2**20

    return {
        "row": result.method,
        "ms": result.ms,
        "x ms": result.ratios.get("ms"),
        "activation MiB": mebibytes(result.activation_bytes),
        "x activation": result.ratios.get("activation"),
        "reserved MiB": mebibytes(result.peak_reserved_bytes),
        "host MiB": mebibytes(result.host_bytes),
        "swapped MiB": mebibytes(result.swapped_bytes),
        "stall ms": result.stall_ms,
        "exact": "-" if result.exact is None else "yes" if result.exact else "NO",
    }


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # The plans of some rows warn of every rule that changed a requested policy; the results hold them.
    logging.getLogger("hf_actswap").setLevel(logging.ERROR)
    sys.exit(main())
