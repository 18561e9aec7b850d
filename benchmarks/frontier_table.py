"""The frontier as a table for people; the JSON file holds the same numbers and more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.records import Result
from benchmarks.workloads import Workload

_WIDTH_WITHOUT_TERMINAL = 140
_HEADINGS = ("ms", "x", "activation MiB", "x", "reserved MiB", "host MiB", "swapped MiB", "stall ms")


def print_table(workload: Workload, results: Sequence[Result], console: Console | None = None) -> None:
    """Print one line per measured row, and below what is to be said of rows.

    Args:
        workload: for the title.
        results: eager first.
        console: where to; by default the standard output.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_WITHOUT_TERMINAL)
    searched = any(result.longest for result in results)
    title = f"{workload.name}: {workload.title}, forward + backward; x: against eager"
    table = Table(title=title, title_justify="left")
    table.add_column("row", no_wrap=True)
    for heading in (*(("tokens",) if searched else ()), *_HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for result in [result for result in results if result.status == "measured"]:
        name, *cells = _cells(result)
        table.add_row(name, *([f"{result.seq:,}"] if searched else []), *cells)
    console.print(table)
    for result in results:
        if result.reason or result.differing:
            differs = f"differs in {', '.join(result.differing[:5])}" if result.differing else ""
            console.print(
                f"{result.method}: {result.status}. {result.reason}{differs}", markup=False, highlight=False
            )


def _cells(result: Result) -> list[str]:
    return [
        result.method,
        "-" if result.ms is None else f"{result.ms:.1f}",
        _ratio(result, "ms"),
        _mebibytes(result.activation_bytes),
        _ratio(result, "activation"),
        _mebibytes(result.peak_reserved_bytes),
        _mebibytes(result.host_bytes),
        _mebibytes(result.swapped_bytes),
        "-" if result.stall_ms is None else f"{result.stall_ms:.2f}",
        "-" if result.exact is None else "yes" if result.exact else "NO",
    ]


def _ratio(result: Result, name: str) -> str:
    return f"{result.ratios[name]:.2f}" if name in result.ratios else "-"


def _mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f}"
