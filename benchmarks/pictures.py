"""Draws time against activation memory, for the results of `frontier.py` and `gpu_day.py`.

    python benchmarks/pictures.py RESULTS.json      draws RESULTS.png beside it

A panel per workload. Points have numbers, and the list beside them has the names: ours in colour.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.records import by_workload
from benchmarks.verdict import lower_left

Row = Mapping[str, Any]

OURS, PLANNER = "actswap", "actswap_plan"
_OUR_COLOUR, _PLANNER_COLOUR, _PEER_COLOUR = "#c8102e", "#1857a4", "#5a6570"
_PANEL_INCHES = (11.0, 5.5)
_DOTS_PER_INCH = 110
_LOGARITHMIC_ABOVE = 2.5
"""Times that differ by more than this factor are drawn on a logarithmic axis."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the measured rows of a results file as a PNG.

    Args:
        rows: rows of the file; those without time or activation bytes are listed below their panel.
        path: path of the PNG.
    """
    panels = list(by_workload(rows).values())
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width, height * max(1, len(panels))), layout="constrained")
    for number, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(len(panels), 1, number + 1), panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Software": None})


def _draw_panel(axes: Axes, panel: Sequence[Row]) -> None:
    axes.set_title(_title(panel[0]), loc="left", fontsize=9.5)
    axes.set_ylabel("ms per step (forward + backward)")
    axes.grid(color="#e3e6e8")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    points = [row for row in panel if row["ms"] is not None and row["activation_bytes"] is not None]
    largest = max((row["activation_bytes"] for row in points), default=1)
    size, unit = next(one for one in _UNITS if largest >= one[0])
    missing = [f"{row['method']} ({row['status']})" for row in panel if row not in points]
    note = fill(f"not drawn: {', '.join(missing)}", 150) if missing else ""
    text = f"activation memory at the peak, {unit} (left and low is better)\n{note}"
    axes.set_xlabel(text, loc="left", fontsize=8)
    for number, row in enumerate(sorted(points, key=lambda row: row["ms"]), 1):
        ours, place = row["method"].startswith(OURS), (row["activation_bytes"] / size, row["ms"])
        look = {"facecolors": _colour(row) if ours else "white", "edgecolors": _colour(row)}
        axes.scatter(*place, marker="s" if row["compiled"] else "o", label=_entry(number, row), **look)
        axes.annotate(str(number), place, (4, 4), textcoords="offset points", fontsize=8, color=_colour(row))
    for colour, compiled in (
        *((_PEER_COLOUR, None), (_OUR_COLOUR, None)),
        *((_PLANNER_COLOUR, False), (_PLANNER_COLOUR, True)),
    ):
        group = [row for row in points if _colour(row) == colour and compiled in (None, row["compiled"])]
        best = lower_left([(row["activation_bytes"] / size, row["ms"]) for row in group])
        axes.plot(*zip(*best, strict=True), color=colour, alpha=0.4) if best else None
    if points:
        axes.set_xlim(0, 1.05 * largest / size or 1)
        _scale_times(axes, [row["ms"] for row in points])
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7.5, frameon=False)


def _entry(number: int, row: Row) -> str:
    return f"{number}  {row['method']}: {row['ms']:.4g} ms"


def _colour(row: Row) -> str:
    if row["method"].startswith(PLANNER):
        return _PLANNER_COLOUR
    return _OUR_COLOUR if row["method"].startswith(OURS) else _PEER_COLOUR


def _title(row: Row) -> str:
    form = "whole model" if row["head"] else "decoder stack"
    return (
        f"{row['model']}, {row['layers']} layers, {row['seq']:,} tokens, batch {row['batch']}, {form} "
        f"({row['device']}, torch {row['torch']}, commit {(row['commit'] or 'unknown')[:10]})\n"
        "filled: hf_actswap, blue: its planner; hollow: others; square: compiled layers; lines: best of each"
    )


def _scale_times(axes: Axes, times: Sequence[float]) -> None:
    """Make the time axis logarithmic if times differ much."""
    if max(times) / min(times) > _LOGARITHMIC_ABOVE:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=40))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def main(argv: Sequence[str] | None = None) -> None:
    """Draw a results file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON of frontier.py or gpu_day.py")
    parser.add_argument("--out", type=Path, help="PNG (default: beside the JSON)")
    arguments = parser.parse_args(argv)
    rows = json.loads(arguments.results.read_text(encoding="utf-8"))
    picture = arguments.out or arguments.results.with_suffix(".png")
    draw([row for row in rows if row.get("kind", "frontier") == "frontier"], picture)


if __name__ == "__main__":
    main()
