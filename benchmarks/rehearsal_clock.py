"""The rehearsal's clock beside times that were measured on one H200.

Usage:
    python benchmarks/rehearsal_clock.py                  # needs PyTorch's CUDA build and TRL, no GPU
    python benchmarks/rehearsal_clock.py --out results.json

The rows of `frontier.py` run in a rehearsal with a clock: decoder layers of Llama-2-7B's shape, forward and
backward, bf16, batch 1. The clock adds the host's processor time, so run it on a machine that is idle
otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]

MEASURED_MS: Mapping[str, Mapping[str, int]] = {
    "7b-8k": {
        "eager": 388,
        "hf-checkpointing": 502,
        "hf-checkpointing-offload": 535,
        "trl-offloading": 971,
        "trl-offloading-checkpointing": 510,
    },
    "7b-32k": {
        "eager": 837,
        "hf-checkpointing": 1060,
        "hf-checkpointing-offload": 1119,
        "trl-offloading": 1640,
    },
}
"""Workload -> row -> the fastest step in ms: one H200, PyTorch 2.11, 16 layers at 8k tokens and 6 at 32k."""


def main() -> int:
    """Rehearse all rows, print the table, and write the JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    out: Path | None = parser.parse_args().out
    found = [row for workload in MEASURED_MS for row in rehearsed(workload)]
    table = Table("workload", "row", "measured, ms", "rehearsed, ms", "")
    for row in found:
        ratio = row["rehearsed_ms"] / row["measured_ms"] - 1
        table.add_row(
            row["workload"],
            row["method"],
            f"{row['measured_ms']}",
            f"{row['rehearsed_ms']:.0f}",
            f"{100 * ratio:+.1f} %",
        )
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


def rehearsed(workload: str) -> list[dict[str, Any]]:
    """Return the rows of a workload, each with its measured and its rehearsed time in ms.

    Rows that this machine has no host memory for are left out.

    Raises:
        OSError: the rehearsal has failed, and has written no results.
    """
    measured = MEASURED_MS[workload]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "frontier.json"
        rows = [name for name in measured if name != "eager"]
        subprocess.run(
            [
                *(sys.executable, "-m", "hf_actswap.rehearsal", "--device", "H200", "--clock", "--"),
                *(sys.executable, str(ROOT / "benchmarks" / "frontier.py"), "--preset", workload),
                *("--no-compile", "--out", str(results), "--rows", *rows),
            ],
            cwd=ROOT,
            check=False,  # what is not computed is not exact, and frontier.py says so by its exit status
        )
        found = {row["method"]: row for row in json.loads(results.read_text("utf-8"))["rows"]}
    return [
        {
            "workload": workload,
            "method": name,
            "layers": found[name]["layers"],
            "tokens": found[name]["seq"],
            "measured_ms": ms,
            "rehearsed_ms": found[name]["ms"],
        }
        for name, ms in measured.items()
        if found[name]["ms"]
    ]


if __name__ == "__main__":
    sys.exit(main())
