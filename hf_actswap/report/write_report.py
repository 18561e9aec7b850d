"""Writes the report of a recorded run: one HTML page and, if asked for, its pictures as PNG files.

The page (the template ``page.html``) has styles and pictures inside; it fetches nothing and has no scripts.
It needs jinja2 and matplotlib: ``pip install 'hf_actswap[report]'``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..plan.actions import format_scopes
from ..planner.profile import Prediction
from .console import folded_rows
from .pictures import (
    COLOURS,
    Chart,
    bytes_chart,
    library,
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
from .run_facts import RunFacts, bytes_text, ms_text, prediction_of, run_facts
from .run_files import RecordedRun, RunDescription, read_run

PAGE = "report.html"
TEMPLATE = Path(__file__).with_name("page.html")
WIDE_PX, NARROW_PX = 1000.0, 344.0
"""Widths in which each picture is drawn; the window decides which one is shown."""


@dataclass(frozen=True)
class Picture:
    """A section with a picture, which is drawn in a given width (px); ``name``: of its PNG file."""

    name: str
    heading: str
    caption: str
    draw: Callable[[float], Chart]


@dataclass(frozen=True)
class WrittenReport:
    """The HTML file and PNG files of a report, and its numbers."""

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
        ReportError: there is no record, or it is damaged, or matplotlib or jinja2 is missing.
        PlanError: the plan or the profile in it is damaged.
    """
    run = read_run(run_dir)
    prediction = prediction_of(run)
    facts = run_facts(run, prediction)
    pictures = [(picture, picture.draw(WIDE_PX)) for picture in pictures_of(run, prediction, facts)]
    text = _page(run, facts, pictures)
    target = run.folder / PAGE if out is None else Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    files = []
    if png_dir is not None:
        Path(png_dir).mkdir(parents=True, exist_ok=True)
        for picture, wide in pictures:
            files.append(Path(png_dir) / f"{picture.name}.png")
            wide.write_png(files[-1])
    return WrittenReport(target, tuple(files), facts)


def pictures_of(run: RecordedRun, prediction: Prediction | None, facts: RunFacts) -> Iterator[Picture]:
    """Yield the pictures for which a run has data."""
    saving = facts.saving
    source = f" Peak without a plan: {saving.source}." if saving is not None and saving.saved_bytes else ""
    memory, timeline, plan, profile = run.memory, run.timeline, run.plan, run.profile
    if memory is not None and memory.samples:
        yield Picture(
            "memory",
            "Memory over a step",
            "Measured in one step in which each saved tensor was followed; that makes the step longer."
            + source,
            partial(memory_chart, measured_curve(memory, facts.budget_bytes, facts.peak_bytes, saving)),
        )
    if prediction is not None and prediction.memory:
        yield Picture(
            "memory_predicted",
            "Memory over a step, predicted",
            "By the planner, of one micro-batch, from what it recorded of a step without a plan." + source,
            partial(memory_chart, predicted_curve(prediction, facts.budget_bytes, saving)),
        )
    if timeline is not None and timeline.compute:
        beside = "" if timeline.overlaps else " Copies on this device do not run beside compute."
        yield Picture(
            "timeline",
            "Timeline of a step",
            f"Measured in one step. Point at a box to see what it is, or read the list.{beside}",
            partial(timeline_chart, timeline),
        )
    if profile is not None and plan is not None and (cells := planned_cells(profile, plan)):
        yield Picture(
            "bytes",
            "Bytes by layer and op",
            "What autograd saves in a micro-batch, and what becomes of it; the stronger, the more.",
            partial(bytes_chart, cells),
        )
    elif timeline is not None and (swapped := swapped_cells(timeline)):
        yield Picture(
            "bytes",
            "Swapped bytes by layer and op",
            "Measured in one step, by the rows of the plan: the stronger the colour, the more.",
            partial(bytes_chart, swapped),
        )
    losses = [loss for _, loss in with_loss(run.steps)]
    if len(losses) > 1 and any(map(math.isfinite, losses)):
        caption = "As the training logged it; a red point is no finite number."
        yield Picture("loss", "Loss", caption, partial(loss_chart, run.steps))
    if len(run.steps) > 2:
        yield Picture(
            "steps",
            "Steps",
            "Mean time since the line before in the training's log; a red point lies beyond the picture.",
            partial(steps_chart, run.steps),
        )


def _page(run: RecordedRun, facts: RunFacts, pictures: Iterable[tuple[Picture, Chart]]) -> str:
    jinja2 = library("jinja2")
    about, safe, page = run.about, jinja2.utils.markupsafe.Markup, jinja2.Environment(autoescape=True)
    page.filters |= {"size": _known(bytes_text), "ms": _known(ms_text), "share": _known("{:.1%}".format)}
    page.filters["scopes"] = format_scopes
    text: str = page.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"{about.get('model', 'model')}: swap and recompute",
        subtitle=_subtitle(about),
        colours=COLOURS,
        facts=facts,
        about=about,
        tiles=_tiles(facts),
        pictures=[
            {
                "heading": picture.heading,
                "caption": picture.caption,
                "wide": safe(wide.svg("wide")),
                "narrow": safe(picture.draw(NARROW_PX).svg("narrow")),
                "titles": [title for title in wide.titles if title],
            }
            for picture, wide in pictures
        ],
        rows=[] if run.plan is None else [*folded_rows(run.plan)],
        adjustments=[] if run.plan is None else run.plan.adjustments,
    )
    return text + "\n"


def _known(write: Callable[[float], str]) -> Callable[..., str]:
    """Return a filter of the page: a value as text, or what stands in the place of one that is not known."""
    return lambda value, without="not measured": without if value is None else write(value)


def _subtitle(about: RunDescription) -> str:
    parameters = float(about.get("parameters", 0))
    scaled = f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
    ranks = int(about.get("world_size", 1))
    parts = [
        f"{about.get('layers', '?')} {about.get('family', '')} layers".replace("  ", " "),
        f"{scaled} parameters{' on this rank' if ranks > 1 else ''}",
        str(about.get("device", "")),
        f"{ranks} rank{'' if ranks == 1 else 's'}, this is rank 0",
        str(about.get("started", "")),
    ]
    return " · ".join(part for part in parts if part)


def _tiles(facts: RunFacts) -> list[tuple[str, str, str]]:
    """Return name, value and note of the main numbers; without a value one is not shown."""
    found, saved, most = facts.saving, "", ""
    if found is not None and found.saved_bytes is not None:
        saved = bytes_text(found.saved_bytes)
        most = "" if found.without_peak_bytes is None else f" of {bytes_text(found.without_peak_bytes)}"
        most = f"{most} without a plan, {found.source}".strip()
    share = "of a step" if not facts.step_ms else f"{facts.stall_ms / facts.step_ms:.1%} of a step"
    peak = "" if facts.peak_bytes is None else bytes_text(facts.peak_bytes)
    return [
        ("Step", "" if facts.step_ms is None else ms_text(facts.step_ms), "median of the last phase"),
        ("Peak memory", peak, "in use on the device"),
        ("Saved", saved, most),
        ("Swapped", bytes_text(facts.offloaded_bytes), "out and back in each step"),
        ("Waits for copies", ms_text(facts.stall_ms), share),
        ("Host memory", bytes_text(facts.host_bytes), "in use at the most"),
    ]
