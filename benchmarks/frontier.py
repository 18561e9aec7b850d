"""The time-memory frontier of a Llama: what each way of saving memory costs, side by side.

    python benchmarks/frontier.py                       everything suited to this machine
    python benchmarks/frontier.py --preset cpu --rows actswap-mixed --layers 2
    python benchmarks/frontier.py --longest --rows eager actswap-everything-auto

Exit status 1: a row that must be exact is not, a row failed, or eager itself cannot be trusted. What the
numbers mean: `README.md` beside this file. The rows stand in `rows.py`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import torch

from benchmarks.frontier_longest import longest_results
from benchmarks.frontier_minutes import Job, Minutes, jobs_of
from benchmarks.frontier_table import print_table
from benchmarks.measure import Reference, empty_result, measure_row
from benchmarks.methods import options_of
from benchmarks.records import (
    Result,
    accelerator_name,
    commit,
    fill_ratios,
    hardware,
    versions,
    write_results,
)
from benchmarks.rows import EAGER, ROWS, Row
from benchmarks.workloads import DEFAULT_PRESETS, PRESETS, TrainingStep, Workload, fitted, training_step

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
ACCELERATOR_MINUTES = 7.9
_CHANGES = ("layers", "tokens", "dtype", "steps")
"""Arguments that replace a preset's value."""


@dataclass
class Run:
    """What the command line asked for, and what came of it so far.

    Args:
        device, compiling: where, and whether rows that compile are measured.
        origin: of every row: the device's name, versions, commit, environment.
        path: of the results; ``None``: a narrowed run, nothing is written.
        minutes: watches the time.
        results: in the order in which they were measured.
    """

    device: torch.device
    compiling: bool
    origin: dict[str, Any]
    path: Path | None
    minutes: Minutes
    results: list[Result]

    def add(self, result: Result) -> None:
        """Keep a result, say so, and write the file anew: a run that is stopped leaves what it has."""
        for name, value in self.origin.items():
            setattr(result, name, value)
        self.results.append(result)
        reason = f" ({result.reason})" if result.reason else ""
        sys.stderr.write(f"{result.workload} {result.method}: {result.status}{reason}\n")
        if self.path:
            write_results(self.results, self.path)


def main(argv: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measure, print the tables, write the JSON and the picture; return the exit status.

    Args:
        argv: the command line; by default the process's.
        rows: the table to choose from.
    """
    arguments = _parse(argv, rows)
    device = _device(arguments.device)
    compiling = arguments.compile if arguments.compile is not None else device.type != "cpu"
    limit = arguments.minutes or (None if device.type == "cpu" else ACCELERATOR_MINUTES)
    minutes = Minutes(limit)
    path = arguments.out or (_default_path(arguments, device) if _is_complete(arguments) else None)
    run = Run(device, compiling, _origin(device), path, minutes, [])
    chosen = [row for row in rows if not arguments.rows or row.name in arguments.rows]
    workloads = _workloads(arguments, device)
    if arguments.longest is not None:
        _search_longest(run, workloads, chosen, arguments.longest)
    else:
        _measure_all(run, workloads, _with_bases(chosen, rows))
    if run.path:
        sys.stderr.write(f"written: {run.path}\n")
        if arguments.longest is None:
            _draw(run.results, run.path.with_suffix(".png"))
    return 1 if any(_is_bad(result) for result in run.results) else 0


def _draw(results: Sequence[Result], path: Path) -> None:
    try:
        from benchmarks.frontier_picture import draw  # here, because matplotlib is an extra
    except ImportError as error:
        sys.stderr.write(
            f"no picture ({error}); draw it later: python benchmarks/frontier_picture.py RESULTS\n"
        )
        return
    draw([asdict(result) for result in results], path)
    sys.stderr.write(f"written: {path}\n")


def _is_bad(result: Result) -> bool:
    """A broken row, or an eager one that nothing can be compared with (out of memory is no fault)."""
    untrusted = result.method == EAGER.name and result.status == "measured" and not result.exact
    return result.failed or (untrusted and not result.longest)


def _measure_all(run: Run, workloads: Sequence[Workload], rows: Sequence[Row]) -> None:
    jobs = jobs_of(workloads, rows)
    for workload in workloads:
        step = training_step(workload, run.device)
        results, eager, reference = [], None, Reference()
        for job in [job for job in jobs if job.workload is workload]:
            result = _measure_job(run, step, job, jobs[jobs.index(job) :], reference, results)
            eager = result if job.row is EAGER else eager
            if job.row is EAGER:
                run.minutes.eager_took(workload, result.ms)
            fill_ratios(result, eager)
            run.add(result)
            results.append(result)
        del step  # before the next is built
        gc.collect()
        print_table(workload, results)


def _with_bases(chosen: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Eager first, then what was chosen with the rows that budgets are taken from, in the table's order."""
    names = {row.name for row in chosen}
    names |= {base for row in chosen if row.budget is not None for base in row.budget.needs}
    return [EAGER, *(row for row in rows if row.name in names and row.name != EAGER.name)]


def _measure_job(
    run: Run,
    step: TrainingStep,
    job: Job,
    ahead: Sequence[Job],
    reference: Reference,
    results: Sequence[Result],
) -> Result:
    reason, config = run.minutes.why_not(job, ahead), None
    if job.row.compiles and not run.compiling:
        reason = "compiling is slow on the CPU; ask for it with --compile"
    if not reason and job.row.budget is not None:
        config = options_of(job.row.budget, job.row.compiles, results)
        reason = config if isinstance(config, str) else ""
    if not reason:
        return measure_row(step, job.row, reference, config)
    result = empty_result(job.row, step.workload)
    result.status, result.reason = "skipped", reason
    return result


def _search_longest(run: Run, workloads: Sequence[Workload], rows: Sequence[Row], limit_tokens: int) -> None:
    rows = [row for row in rows if run.compiling or not row.compiles]
    limit = limit_tokens or (1024 if run.device.type == "cpu" else 2**20)
    for workload in workloads:
        results = []
        for result in longest_results(workload, rows, run.device, limit, run.minutes):
            run.add(result)
            results.append(result)
        print_table(workload, results)


def _parse(argv: Sequence[str] | None, rows: Sequence[Row]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Rows: " + ", ".join(row.name for row in rows),
    )
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, help="default: what suits the device")
    parser.add_argument("--layers", type=int, help="decoder layers (default: the preset's)")
    parser.add_argument("--tokens", type=int, help="length of the one sequence (default: the preset's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the preset's")
    parser.add_argument("--steps", type=int, help="timed steps per row (default: the preset's)")
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in rows], metavar="ROW")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="measure rows that compile (default: not on the CPU)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="leave the least important rows out when the run would take longer "
        f"(default: {ACCELERATOR_MINUTES:g} on an accelerator, none on the CPU)",
    )
    parser.add_argument(
        "--longest",
        type=int,
        nargs="?",
        const=0,
        metavar="TOKENS",
        help="double the length until a row no longer fits, at most to TOKENS, and report the longest",
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file, the picture beside it (default: in results/, complete runs only)"
    )
    arguments = parser.parse_args(argv)
    for name in ("layers", "tokens", "steps"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name}: at least 1, found {value}")
    if arguments.minutes is not None and arguments.minutes <= 0:
        parser.error(f"argument --minutes: more than 0, found {arguments.minutes:g}")
    return arguments


def _device(name: str) -> torch.device:
    """The device with an index, which streams and memory statistics want."""
    device = torch.device(name)
    has_index = device.type == "cpu" or device.index is not None
    return device if has_index else torch.device(device.type, torch.accelerator.current_device_index())


def _workloads(arguments: argparse.Namespace, device: torch.device) -> list[Workload]:
    """The presets that suit the device, changed as asked, and scaled down to its memory."""
    suited = DEFAULT_PRESETS["cpu" if device.type == "cpu" else "accelerator"]
    asked = {name: getattr(arguments, name) for name in _CHANGES}
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    workloads = [replace(PRESETS[name], **changes) for name in arguments.preset or suited]
    if device.type == "cpu" or arguments.longest is not None:
        return workloads
    free_bytes, _ = torch.accelerator.get_memory_info(device)
    return [fitted(workload, free_bytes) for workload in workloads]


def _origin(device: torch.device) -> dict[str, Any]:
    """What is the same in every row."""
    found, machine, checkout = versions(), hardware(device), commit(REPOSITORY)
    return {
        "device": "cpu" if device.type == "cpu" else machine["name"],
        "torch": found["torch"],
        "transformers": found["transformers"],
        "commit": checkout["id"],
        "environment": {
            "hardware": machine,
            "versions": found,
            "tracked_files_changed": checkout["dirty"],
            "allocator": os.environ["PYTORCH_ALLOC_CONF"],
        },
    }


def _is_complete(arguments: argparse.Namespace) -> bool:
    """Whether nothing narrows the run, so that it may stand among the recorded ones."""
    return all(getattr(arguments, name) is None for name in ("preset", *_CHANGES, "rows", "compile"))


def _default_path(arguments: argparse.Namespace, device: torch.device) -> Path:
    name = "cpu" if device.type == "cpu" else accelerator_name(device).lower().replace(" ", "-")
    what = "frontier" if arguments.longest is None else "longest"
    return RESULTS / f"{what}_{name}_{datetime.now():%Y%m%d}.json"


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # The plans of some rows warn of every rule that changed a wish; the results hold them.
    logging.getLogger("hf_actswap").setLevel(logging.ERROR)
    sys.exit(main())
