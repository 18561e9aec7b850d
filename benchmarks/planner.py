"""The planner beside what it is compared with: its curve of time against memory, and what it foretold.

    python benchmarks/planner.py                        on a GPU: what the claims name, under eight minutes
    python benchmarks/planner.py --curve 7b-8k          the budgets between, as long again
    python benchmarks/planner.py --device cpu           the same logic, tiny
    python benchmarks/planner.py --preset 7b-8k --rows actswap_plan_half --out mine.json

The rows ``actswap_plan_*`` of `frontier.py`, with the few others that their budgets and claims need; that
file's arguments are understood. Results go to ``results/planner_<device>_<yyyymmdd>.json``; rows that are
there already stay unless they are measured again, so that the curve may be run piece by piece. The picture,
and `verdict.py`, take the other rows of the newest results of `frontier.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import torch

from benchmarks import frontier
from benchmarks.records import accelerator_name
from benchmarks.rows import PLANNER_ROWS, ROWS, Row
from benchmarks.verdict import newest

RESULTS = Path(__file__).resolve().parent / "results"
PRESETS: Mapping[str, Sequence[str]] = {"cpu": ("cpu",), "accelerator": ("7b-8k", "7b-32k")}
_BASES = ("eager", "hf-checkpointing", "compiled", "hf-checkpointing-offload")
_JUDGED_ALONE = ("checkpointing", "half")
_SHAPE = ("model", "layers", "seq", "batch", "head", "device")


def _is_judged(row: Row) -> bool:
    return row.name in _BASES[:3] or row.name.endswith(_JUDGED_ALONE)


PLANNER_TABLE: tuple[Row, ...] = tuple(
    replace(row, needed_at=PRESETS["accelerator"] if _is_judged(row) else (), rank=1)
    for row in ROWS
    if row.name in _BASES[1:] or row in PLANNER_ROWS
)
"""What claims name goes first, then the curve."""

CURVE = tuple(row.name for row in PLANNER_TABLE if row.name not in _BASES and not _is_judged(row))


def joined(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the old rows with the new ones in place of those that were measured again, and behind them."""
    known = {_key(row): row for row in old}
    for row in new:
        if row["status"] != "skipped" or _key(row) not in known:
            known[_key(row)] = row
    return list(known.values())


def beside(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return ``rows`` and those of ``others`` that were measured on the same workloads and device."""
    known, shapes = {_key(row) for row in rows}, {_key(row)[1:] for row in rows}
    wanted = [row for row in others if row["ms"] and _key(row)[1:] in shapes]
    return [*rows, *(row for row in wanted if _key(row) not in known)]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["method"], *(row[name] for name in _SHAPE))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; draw the curve over the points of the others; return the exit status."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0], add_help=False)
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--curve", nargs="+", metavar="PRESET")
    parser.add_argument("--out", type=Path)
    own, rest = parser.parse_known_args(argv)
    path = own.out or (None if rest else _default_path(torch.device(own.device)))
    if own.curve:
        rest = ["--preset", *own.curve, "--rows", *CURVE, *rest]
    elif "--preset" not in rest:
        rest = ["--preset", *PRESETS["cpu" if own.device == "cpu" else "accelerator"], *rest]
    rest = ["--device", own.device, *rest]
    if path is None:
        return frontier.main(rest, PLANNER_TABLE)
    part = path.with_name(f"{path.stem}.part.json")
    status = frontier.main([*rest, "--out", str(part)], PLANNER_TABLE)
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    rows = joined(old, json.loads(part.read_text(encoding="utf-8")))
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    part.unlink()
    part.with_suffix(".png").unlink(missing_ok=True)
    _draw(rows, path.with_suffix(".png"))
    return status


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        from benchmarks.frontier_picture import draw  # here, because matplotlib is an extra
    except ImportError:
        return
    others = newest("frontier")
    peers = json.loads(others.read_text(encoding="utf-8")) if others is not None else []
    draw(beside(rows, peers), path)


def _default_path(device: torch.device) -> Path:
    name = "cpu" if device.type == "cpu" else accelerator_name(device).lower().replace(" ", "-")
    return RESULTS / f"planner_{name}_{datetime.now():%Y%m%d}.json"


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("hf_actswap").setLevel(logging.ERROR)
    sys.exit(main())
