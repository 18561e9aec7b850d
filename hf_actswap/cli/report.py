"""``hf-actswap report``: writes a page about a recorded run, and prints its main numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from ..plan.actions import format_scopes
from ..report.run_facts import ComparedQuantity, bytes_text, ms_text
from ..report.write_report import WrittenReport, write_report
from . import options
from .output import Answer, answer, table_of


def _shown(written: WrittenReport) -> Iterator[RenderableType]:
    facts = written.facts
    table = Table.grid(padding=(0, 2))
    table.add_row("steps", str(facts.steps))
    if facts.step_ms is not None:
        table.add_row("a step", ms_text(facts.step_ms))
    if facts.peak_bytes is not None:
        table.add_row("peak memory", bytes_text(facts.peak_bytes))
    if facts.saving is not None and facts.saving.saved_bytes is not None:
        table.add_row("saved", bytes_text(facts.saving.saved_bytes))
    for number, stage in enumerate(facts.stages):
        peak = "not measured" if stage.peak_bytes is None else bytes_text(stage.peak_bytes)
        table.add_row(f"stage {number}", f"layers {format_scopes(stage.layers)}, peak memory {peak}")
    table.add_row("swapped a step", bytes_text(facts.offloaded_bytes))
    table.add_row("waits a step", ms_text(facts.stall_ms))
    yield facts.without_steps or table
    if facts.saving is not None:
        yield f"\n{facts.saving.in_words()}"
    if facts.compared:
        yield ""
        yield _compared_table(facts.compared)
    yield ""
    for path in (written.page, *written.pictures):
        yield f"Written: {path}"


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output_dir of a training.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the page. Default: RUN_DIR/actswap/report.html."),
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the pictures as PNG too.")] = None,
    as_json: options.Json = False,
) -> None:
    def ask() -> Answer:
        try:
            written = write_report(run_dir, out, png)
        except OSError as error:
            raise typer.BadParameter(f"{error.filename or out}: {error.strerror}") from None
        pictures = [str(path) for path in written.pictures]
        document = {"page": str(written.page), "pictures": pictures, **written.facts.document()}
        return Answer(document, _shown(written))

    answer("report", as_json, ask)


def _compared_table(compared: Iterable[ComparedQuantity]) -> Table:
    table = table_of("", ">Predicted", ">Measured", ">Ratio")
    for item in compared:
        write = ms_text if item.unit == "ms" else bytes_text
        values = ("" if value is None else write(value) for value in (item.predicted, item.measured))
        table.add_row(item.name, *values, "" if item.ratio is None else f"{item.ratio:.2f}")
    return table
