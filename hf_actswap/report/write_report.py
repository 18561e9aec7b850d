"""Writes the report of a recorded run: one page, and, if asked for, its pictures as PNG files.

The PNG files need matplotlib (``pip install 'hf_actswap[report]'``); the page does not.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Problem
from ..planner.profile import Prediction
from .charts import (
    bytes_chart,
    loss_chart,
    measured_curve,
    memory_chart,
    planned_cells,
    predicted_curve,
    steps_chart,
    swapped_cells,
    timeline_chart,
    with_loss,
)
from .drawing import COLOURS, Area, Box, Drawing, Label, Shape, Stroke
from .page import WIDE_PX, Picture, page
from .run_facts import RunFacts, prediction_of, run_facts
from .run_files import RecordedRun, ReportError, read_run

PAGE = "report.html"

_DPI = 96
_SCALE = 2
"""Pixels of a PNG file for each px of the drawing."""
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_POINTS = 72 / _DPI
"""A px in points, the unit of fonts and lines."""


@dataclass(frozen=True)
class WrittenReport:
    """The files and numbers of a report that was written.

    Args:
        page: path of the HTML file.
        pictures: paths of the PNG files.
        facts: the numbers.
    """

    page: Path
    pictures: tuple[Path, ...]
    facts: RunFacts


def write_report(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    png_dir: str | os.PathLike[str] | None = None,
) -> WrittenReport:
    """Write the report of a run.

    Args:
        run_dir: the ``output_dir`` of a training with a plan.
        out: the HTML file; ``None``: ``report.html`` beside the record.
        png_dir: where the pictures are written as PNG too; ``None``: nowhere.

    Raises:
        ReportError: there is no record, or it is damaged, or matplotlib is missing for ``png_dir``.
        PlanError: the plan or the profile in it is damaged.
    """
    run = read_run(run_dir)
    prediction = prediction_of(run)
    facts = run_facts(run, prediction)
    pictures = pictures_of(run, prediction, facts)
    target = run.folder / PAGE if out is None else Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(run, facts, list(pictures.values())), encoding="utf-8")
    files: list[Path] = []
    if png_dir is not None:
        drawn = {name: picture.draw(WIDE_PX) for name, picture in pictures.items()}
        files = write_pictures(Path(png_dir), drawn)
    return WrittenReport(target, tuple(files), facts)


def pictures_of(run: RecordedRun, prediction: Prediction | None, facts: RunFacts) -> dict[str, Picture]:
    """Return the pictures for which a run has data, by the names of their PNG files."""
    found: dict[str, Picture] = {}
    saving = facts.saving
    source = f" Peak without a plan: {saving.source}." if saving is not None and saving.saved_bytes else ""
    memory, timeline, plan, profile = run.memory, run.timeline, run.plan, run.profile
    if memory is not None and memory.samples:
        measured = measured_curve(memory, facts.budget_bytes, facts.peak_bytes, saving)
        found["memory"] = Picture(
            "Memory over a step",
            "Measured in one step in which each saved tensor was followed; that makes the step longer."
            + source,
            lambda width: memory_chart(measured, width),
        )
    if prediction is not None and prediction.memory:
        expected = predicted_curve(prediction, facts.budget_bytes, saving)
        found["memory_predicted"] = Picture(
            "Memory over a step, predicted",
            "By the planner, of one micro-batch, from what it recorded of a step without a plan." + source,
            lambda width: memory_chart(expected, width),
        )
    if timeline is not None and timeline.compute:
        beside = "" if timeline.overlaps else " Copies on this device do not run beside compute."
        found["timeline"] = Picture(
            "Timeline of a step",
            f"Measured in one step. Point at a box to see what it is, or read the list.{beside}",
            lambda width: timeline_chart(timeline, width),
        )
    if profile is not None and plan is not None and (cells := planned_cells(profile, plan)):
        found["bytes"] = Picture(
            "Bytes by layer and op",
            "What autograd saves in a micro-batch, and what becomes of it; the stronger, the more.",
            lambda width: bytes_chart(cells, width),
        )
    elif timeline is not None and (swapped := swapped_cells(timeline)):
        found["bytes"] = Picture(
            "Swapped bytes by layer and op",
            "Measured in one step, by the rows of the plan: the stronger the colour, the more.",
            lambda width: bytes_chart(swapped, width),
        )
    losses = [loss for _, loss in with_loss(run.steps)]
    if len(losses) > 1 and any(map(math.isfinite, losses)):
        found["loss"] = Picture(
            "Loss",
            "As the training logged it; a red point is no finite number.",
            lambda width: loss_chart(run.steps, width),
        )
    if len(run.steps) > 2:
        found["steps"] = Picture(
            "Steps",
            "Mean time since the line before in the training's log; a red point lies beyond the picture.",
            lambda width: steps_chart(run.steps, width),
        )
    return found


def write_pictures(folder: Path, drawings: Mapping[str, Drawing]) -> list[Path]:
    """Write each drawing as ``<folder>/<name>.png``, on a light surface; return the files.

    Raises:
        ReportError: matplotlib is not installed.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        patches: Any = importlib.import_module("matplotlib.patches")
    except ImportError:
        hint = "pip install 'hf_actswap[report]', or remove --png: the page does not need it."
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
