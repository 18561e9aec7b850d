"""The time-memory frontier of one decoder stack: what each way of saving memory costs, side by side.

    python benchmarks/frontier.py                       everything suited to this machine
    python benchmarks/frontier.py --preset cpu --rows actswap-mixed --layers 2

Exit status 1: a row that must be exact is not, or a row failed. What the columns mean: `README.md` beside
this file. The rows stand in `frontier_rows.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.frontier_machine import accelerator_name, commit, hardware, versions
from benchmarks.frontier_measure import Measurement, measure
from benchmarks.frontier_rows import ROWS, Row
from benchmarks.frontier_stack import PRESETS, DecoderStack, Workload, fitted
from benchmarks.frontier_table import print_table

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
FORMAT_VERSION = 1
_CHANGES = ("layers", "tokens", "dtype", "steps")
"""Arguments that replace a preset's value."""


def main(argv: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measure, print the table, write the JSON; return the exit status.

    Args:
        argv: the command line; by default the process's.
        rows: the table to choose from.
    """
    arguments = _parse(argv, rows)
    device = _device(arguments.device)
    chosen = [row for row in rows if not arguments.rows or row.name in arguments.rows]
    compiling = arguments.compile if arguments.compile is not None else device.type != "cpu"
    document = _document(arguments, device)
    healthy = True
    for workload in _workloads(arguments, device):
        stack = DecoderStack(workload, device)
        try:
            results = measure(stack, chosen, compiling, _tell)
        except RuntimeError as error:
            sys.stderr.write(f"{workload.name}: {error}\n")
            document["workloads"].append({"workload": asdict(workload), "error": str(error), "rows": []})
            healthy = False
            continue
        finally:
            del stack
        print_table(workload, results)
        document["workloads"].append(
            {"workload": asdict(workload), "rows": [asdict(item) for item in results]}
        )
        healthy = healthy and not any(item.failed for item in results)
    path = arguments.out or (_default_path(device) if _is_complete(arguments) else None)
    if path:
        _write(document, path)
    return 0 if healthy else 1


def _parse(argv: Sequence[str] | None, rows: Sequence[Row]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Rows: " + ", ".join(row.name for row in rows),
    )
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--preset", choices=PRESETS, help="default: every one that suits the device")
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
        "--out", type=Path, help="JSON file (default, complete runs only: results/frontier_<device>.json)"
    )
    arguments = parser.parse_args(argv)
    for name in ("layers", "tokens", "steps"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name}: at least 1, found {value}")
    return arguments


def _device(name: str) -> torch.device:
    """The device with an index, which streams and memory statistics want."""
    device = torch.device(name)
    has_index = device.type == "cpu" or device.index is not None
    return device if has_index else torch.device(device.type, torch.accelerator.current_device_index())


def _workloads(arguments: argparse.Namespace, device: torch.device) -> list[Workload]:
    """The presets that suit the device, changed as asked, and scaled down to its memory."""
    if arguments.preset:
        names = [arguments.preset]
    else:
        names = [name for name in PRESETS if (name == "cpu") == (device.type == "cpu")]
    asked = {name: getattr(arguments, name) for name in _CHANGES}
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    workloads = [replace(PRESETS[name], **changes) for name in names]
    if device.type == "cpu":
        return workloads
    free_bytes, _ = torch.accelerator.get_memory_info(device)
    return [fitted(workload, free_bytes) for workload in workloads]


def _document(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if name != "out" and value is not None}
    return {
        "format": "hf_actswap.frontier",
        "format_version": FORMAT_VERSION,
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": given,
        "commit": commit(REPOSITORY),
        "versions": versions(),
        "hardware": hardware(device),
        "workloads": [],
    }


def _tell(result: Measurement) -> None:
    """Progress, since a run can take minutes."""
    sys.stderr.write(f"{result.row}: {result.status}{f' ({result.reason})' if result.reason else ''}\n")


def _is_complete(arguments: argparse.Namespace) -> bool:
    """Whether nothing narrows the run, so that it may take the place of the recorded one."""
    return all(getattr(arguments, name) is None for name in ("preset", *_CHANGES, "rows", "compile"))


def _default_path(device: torch.device) -> Path:
    name = "cpu" if device.type == "cpu" else accelerator_name(device).lower().replace(" ", "-")
    return RESULTS / f"frontier_{name}.json"


def _write(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stderr.write(f"written: {path}\n")


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # The mixed row's plan warns of every rule that changed a wish; here they are known.
    logging.getLogger("hf_actswap").setLevel(logging.ERROR)
    sys.exit(main())
