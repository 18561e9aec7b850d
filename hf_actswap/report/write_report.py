"""Writes the report of a recorded run: one HTML page and, if asked for, its pictures as PNG files.

The page (the template ``page.html``) has styles and pictures inside; it fetches nothing and has no scripts.
It needs jinja2 and matplotlib: ``pip install 'hf_actswap[report]'``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
from .run_facts import ComparedQuantity, RunFacts, bytes_text, ms_text, prediction_of, run_facts
from .run_files import RecordedRun, RunDescription, read_run

PAGE = "report.html"
TEMPLATE = Path(__file__).with_name("page.html")
WIDE_PX, NARROW_PX = 1000.0, 344.0
"""Widths in which each picture is drawn; the window decides which one is shown."""

_NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Picture:
    """A section with a picture, which is drawn in a given width (px)."""

    heading: str
    caption: str
    draw: Callable[[float], Chart]


@dataclass(frozen=True)
class Table:
    """A section with a table."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 0  # how many of the last columns hold numbers
    remark: str = ""
    chosen: int | None = None  # index of the row that stands out


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
    pictures = pictures_of(run, prediction, facts)
    wide = {name: picture.draw(WIDE_PX) for name, picture in pictures.items()}
    text = _page(run, facts, [(picture, wide[name]) for name, picture in pictures.items()])
    target = run.folder / PAGE if out is None else Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    files = {} if png_dir is None else {Path(png_dir) / f"{name}.png": chart for name, chart in wide.items()}
    if png_dir is not None:
        Path(png_dir).mkdir(parents=True, exist_ok=True)
    for path, chart in files.items():
        chart.write_png(path)
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


def _page(run: RecordedRun, facts: RunFacts, pictures: Iterable[tuple[Picture, Chart]]) -> str:
    jinja2 = library("jinja2")
    about, safe = run.about, jinja2.utils.markupsafe.Markup
    below = [_compared_table(facts.compared), _trials_table(facts), _plan_table(run), _rejected_table(facts)]
    template = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    text: str = template.render(
        title=f"{about.get('model', 'model')}: swap and recompute",
        subtitle=_subtitle(about),
        colours=COLOURS,
        fate_colour=lambda text: text if text in COLOURS else "base",
        facts=facts,
        tiles=_tiles(facts),
        tables_above=[table for table in [_stages_table(run, facts)] if table.rows],
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
        tables_below=[*(table for table in below if table.rows), _about_table(about)],
        adjustments=run.plan.adjustments if run.plan is not None else (),
        config=about.get("config"),
    )
    return text + "\n"


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


def _text(value: float | None, write: Callable[[float], str], without: str = _NOT_MEASURED) -> str:
    return without if value is None else write(value)


def _compared_table(compared: Sequence[ComparedQuantity]) -> Table:
    rows = []
    for item in compared:
        if item.predicted or item.measured:
            write = ms_text if item.unit == "ms" else bytes_text
            values = [_text(value, write) for value in (item.predicted, item.measured)]
            rows.append([item.name.capitalize(), *values, _text(item.ratio, "{:.2f}".format, "")])
    return Table(
        "Predicted and measured", ("A step", "Predicted", "Measured", "Measured / predicted"), rows, 3
    )


def _stages_table(run: RecordedRun, facts: RunFacts) -> Table:
    rows = [
        [
            str(number),
            format_scopes(stage.layers),
            _text(stage.weight_bytes, bytes_text),
            f"{stage.in_flight:g}",
            _text(stage.peak_bytes, bytes_text),
            _text(stage.offloaded_bytes, bytes_text),
            _text(stage.stall_ms, ms_text),
            _text(stage.waiting_share, "{:.1%}".format),
        ]
        for number, stage in enumerate(facts.stages)
    ]
    sizes = ("Weights", "In flight", "Peak memory", "Swapped", "Waits for copies", "for stages")
    found, line = run.about.get("stages"), ""
    if found is not None:
        line = (
            f"{found['schedule']}, {found['micro_batches']} micro-batches a step: by the formula equal "
            f"stages wait {found['bubble_share']:.1%} of it for each other. Measured on one rank of each "
            "stage."
        )
    return Table("Stages", ("Stage", "Layers", *sizes), rows, 6, line)


def _trials_table(facts: RunFacts) -> Table:
    budget, rows, chosen = facts.budget_bytes, [], None
    for number, trial in enumerate(facts.trials):
        steps = trial["steps"]
        peak = max((step["reserved_peak_bytes"] for step in steps), default=0)
        evicted = max((step["evicted_bytes"] for step in steps), default=0)
        fits = budget is None or (peak <= budget and not evicted)
        chosen = number if trial["chosen"] else chosen
        rows.append(
            [
                str(number + 1),
                "chosen" if trial["chosen"] else "fits" if fits else "does not fit",
                _text(trial["predicted_peak_bytes"], bytes_text, ""),
                bytes_text(peak),
                _text(trial["predicted_step_ms"], ms_text, ""),
                _text(min((step["step_ms"] for step in steps), default=None), ms_text, ""),
                bytes_text(evicted),
            ]
        )
    head = ("Trial", "", "Peak, predicted", "held", "Step, predicted", "measured", "Evicted")
    remark = "" if budget is None else f"Budget: {bytes_text(budget)}."
    return Table("What the planner tried", head, rows, 5, remark, chosen)


def _plan_table(run: RecordedRun) -> Table:
    groups = () if run.plan is None else folded_rows(run.plan)
    rows = [row for rows in groups for row in rows]
    return Table("Plan", ("Layers", "Op", "Fate", "Prefetch, ops", "Release, ops"), rows, 2)


def _rejected_table(facts: RunFacts) -> Table:
    rows = [[reason, bytes_text(size)] for reason, size in facts.rejected.items()]
    return Table("Planned to be swapped, and stayed", ("Why", "In a step"), rows, 1)


def _about_table(about: RunDescription) -> Table:
    device_bytes = about.get("device_bytes")
    rows = {
        "Device": str(about.get("device", "")) + (f", {bytes_text(device_bytes)}" if device_bytes else ""),
        "Weights": bytes_text(about.get("weight_bytes", 0)),
        "Planner": str(about.get("planner", "off")),
        "Started": str(about.get("started", "")),
        "Versions": ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items()),
    }
    return Table("Run", ("", ""), list(rows.items()))
