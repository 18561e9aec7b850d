"""The frontier as a table for people; the JSON file holds the same numbers and more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.frontier_measure import Measurement
from benchmarks.frontier_stack import Workload

_WIDTH_WITHOUT_TERMINAL = 132


def print_table(workload: Workload, results: Sequence[Measurement], console: Console | None = None) -> None:
    """Print one line per row.

    Args:
        workload: for the title.
        results: eager first.
        console: where to; by default the standard output.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_WITHOUT_TERMINAL)
    table = Table(
        title=f"{workload.name}: {workload.layers} layers, {workload.tokens} tokens, "
        f"hidden {workload.hidden}, {workload.dtype}, forward + backward; x: against eager",
        title_justify="left",
    )
    table.add_column("row", no_wrap=True)
    for heading in ("ms", "x", "held MiB", "x", "peak MiB", "x", "out MiB", "back MiB", "stall ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result))
    console.print(table)
    for result in results:
        if result.reason or result.differing:
            differs = f"differs in {', '.join(result.differing[:5])}" if result.differing else ""
            console.print(
                f"{result.row}: {result.status}. {result.reason}{differs}", markup=False, highlight=False
            )


def _cells(result: Measurement) -> list[str]:
    swap = result.swap or {}
    stall_ms = swap.get("stall_ms")
    return [
        result.row,
        "-" if result.median_ms is None else f"{result.median_ms:.1f}",
        _ratio(result, "time"),
        _mebibytes(result.held_bytes),
        _ratio(result, "held"),
        _mebibytes(result.peak_bytes),
        _ratio(result, "peak"),
        _mebibytes(swap.get("offloaded_bytes")),
        _mebibytes(swap.get("prefetched_bytes")),
        "-" if stall_ms is None else f"{stall_ms:.2f}",
        "-" if result.exact is None else "yes" if result.exact else "NO",
    ]


def _ratio(result: Measurement, name: str) -> str:
    return f"{result.ratios[name]:.2f}" if name in result.ratios else "-"


def _mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f}"
