"""Draws the boxes of docs/how_it_works.md: host memory, and the planner's phases.

python docs/make_sketches.py        # needs matplotlib
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parent / "pictures"
GREY, PALE, SAND = "#d0d7de", "#eef1f4", "#f3e3b8"


def draw_host_memory(figure: Any) -> None:
    """A machine's memory, and what a rank does with its share."""
    axes = figure.add_subplot()
    parts = (
        (0, 20, GREY, "in use"),
        (20, 15, PALE, "10 % of the free"),
        (35, 33, SAND, "share of rank 0"),
        (68, 32, GREY, "share of rank 1"),
    )
    for start, width, colour, text in parts:
        _cell(axes, start, 2.2, width, 0.8, colour, text)
    axes.text(-1, 2.6, "machine", ha="right", va="center", fontsize=9)
    axes.plot([35, 0], [2.2, 1.6], color="#8c6d1f", linewidth=0.8)
    axes.plot([68, 100], [2.2, 1.6], color="#8c6d1f", linewidth=0.8)
    axes.text(-1, 1.2, "its slabs", ha="right", va="center", fontsize=9)
    blocks = ((0, "a", 13), (13, "b", 5), (18, "c", 12), (34, "d", 13), (47, "e", 5), (52, "c", 6))
    for slab in range(3):
        _cell(axes, slab * 34, 0.8, 32, 0.8, "#ffffff", "" if slab < 2 else "room for more")
    for start, name, width in blocks:
        _cell(axes, start, 0.8, width, 0.8, "#e8c66a" if name == "c" else SAND, name)
    text = "blocks of exact sizes; c is one block of two pieces. The next step finds its blocks as they are."
    axes.text(50, 0.4, text, ha="center", va="center", fontsize=9)
    axes.set_xlim(-13, 101)
    axes.set_ylim(0.1, 3.2)
    axes.set_axis_off()


def draw_planner(figure: Any) -> None:
    """The planner's phases as boxes."""
    axes = figure.add_subplot()
    boxes = (
        (0, "warm-up", "record memory and times;\nwhere memory runs out,\nidle tensors move"),
        (27, "search", "solve on paper:\nkeep, swap, recompute\nwithin the budget"),
        (54, "trial", "two steps on the device:\nits memory, its time"),
        (81, "stable", "the fastest plan\nthat stayed within;\nno guard, no record"),
    )
    for left, name, text in boxes:
        _cell(axes, left, 1.0, 19, 1.5, PALE, "")
        axes.text(left + 9.5, 2.28, name, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(left + 9.5, 1.55, text, ha="center", va="center", fontsize=8)
    for start in (19, 46, 73):
        _arrow(axes, (start + 0.4, 1.75), (start + 7.6, 1.75))
    _arrow(axes, (63, 2.55), (37, 2.55), bend=0.35)
    axes.text(50, 3.28, "what the trial used beyond the prediction", ha="center", va="center", fontsize=8)
    _arrow(axes, (90, 0.95), (10, 0.95), bend=-0.2)
    text = "a batch with more tokens than planned for, or a step over the budget"
    axes.text(50, 0.2, text, ha="center", va="bottom", fontsize=8)
    axes.set_xlim(-1, 101)
    axes.set_ylim(-0.4, 3.5)
    axes.set_axis_off()


DRAWINGS = {
    "host_memory": (draw_host_memory, (10.0, 2.6)),
    "planner_phases": (draw_planner, (10.0, 3.0)),
}


def _cell(axes: Any, left: float, bottom: float, width: float, height: float, colour: str, text: str) -> None:
    axes.bar(left, height, width, bottom, align="edge", color=colour, edgecolor="#6b747b", linewidth=0.8)
    if text:
        axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=9)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    style = {"arrowstyle": "-|>", "color": "#2f6690", "linewidth": 1.2, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", end, start, arrowprops=style)


def write_svgs(drawings: Mapping[str, Any], described: str | None = None) -> None:
    """Draw each of ``drawings`` (name -> function of a figure, inches) into an SVG, always the same bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    look = {
        "svg.fonttype": "none",
        "svg.hashsalt": "hf_actswap",
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
    }
    with rc_context(look):
        for name, (draw, inches) in drawings.items():
            figure = Figure(figsize=inches, layout="constrained")
            FigureCanvasSVG(figure)
            draw(figure)
            figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None, "Description": described})


if __name__ == "__main__":
    write_svgs(DRAWINGS)
