"""Pictures of the report as PNG files, by matplotlib (``pip install 'hf_actswap[report]'``)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Problem
from .drawing import COLOURS, Area, Box, Drawing, Label, Shape, Stroke
from .run_files import ReportError

_DPI = 96
_SCALE = 2
"""Pixels for each px of the drawing."""
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_POINTS = 72 / _DPI
"""A px in points, the unit of fonts and lines."""


def write_pictures(folder: Path, drawings: Mapping[str, Drawing]) -> list[Path]:
    """Write each drawing as ``<folder>/<name>.png``, on a light surface; return the files.

    Raises:
        ReportError: matplotlib is not installed.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        patches: Any = importlib.import_module("matplotlib.patches")
    except ImportError:
        hint = "pip install 'hf_actswap[report]', or leave --png out: the page needs nothing."
        raise ReportError([Problem("--png", "matplotlib", "it is not installed", hint)]) from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, drawing in drawings.items():
        figure = figures.Figure(
            figsize=(drawing.width / _DPI, drawing.height / _DPI), facecolor=_colour("surface")
        )
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, drawing.width)
        axes.set_ylim(drawing.height, 0)
        axes.axis("off")
        for layer, shape in enumerate(drawing.shapes):
            _paint(axes, patches, shape, layer)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=_DPI * _SCALE, facecolor=_colour("surface"))
        written.append(path)
    return written


def _paint(axes: Any, patches: Any, shape: Shape, layer: int) -> None:
    match shape:
        case Box():
            look = {"facecolor": _colour(shape.means), "alpha": shape.opacity, "linewidth": 0}
            axes.add_patch(
                patches.Rectangle((shape.x, shape.y), shape.width, shape.height, zorder=layer, **look)
            )
        case Area():
            axes.add_patch(
                patches.Polygon(list(shape.points), facecolor=_colour(shape.means), linewidth=0, zorder=layer)
            )
        case Stroke():
            xs, ys = zip(*shape.points, strict=True)
            style = (0, (4, 3)) if shape.dashed else "solid"
            width = shape.width * _POINTS
            axes.plot(xs, ys, color=_colour(shape.means), linewidth=width, linestyle=style, zorder=layer)
        case Label():
            axes.text(
                shape.x,
                shape.y,
                shape.text.replace("$", r"\$"),
                color=_colour(shape.means),
                fontsize=shape.size * _POINTS,
                ha=_ANCHORS[shape.anchor],
                va="baseline",
                fontweight="bold" if shape.bold else "normal",
                zorder=layer,
            )


def _colour(means: str) -> str:
    return COLOURS[means][0]
