"""The report of a recorded run: one page, pictures as files if asked, and its numbers."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ..planner.profile import Prediction
from .bytes_chart import bytes_chart, planned_cells, swapped_cells
from .memory_chart import measured_curve, memory_chart, predicted_curve
from .page import WIDE_PX, Picture, page
from .picture_files import write_pictures
from .run_facts import RunFacts, prediction_of, run_facts
from .run_files import RecordedRun, read_run
from .steps_chart import loss_chart, steps_chart, with_loss
from .timeline_chart import timeline_chart

PAGE = "report.html"


@dataclass(frozen=True)
class WrittenReport:
    """What was written.

    Args:
        page: the HTML file.
        pictures: PNG files.
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
    """Return what can be shown of a run, by the names of its files."""
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
