"""Writes the answer of a command, as text or as one JSON document, and sets the exit code.

Also formats numbers (sizes, times, rates) for tables.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import ActSwapError, Problem

if TYPE_CHECKING:  # commands look at their options before torch is imported
    from ..engine.link import Link

Document = Mapping[str, Any]

_STDOUT, _STDERR = 1, 2  # file descriptors
_YES = ("1", "ON", "YES", "TRUE")  # as in huggingface_hub, which takes long to import
_LAYER = re.compile(r"(\.(?:layers|h)\.)\d+")


@dataclass(frozen=True)
class Answer:
    """What a command has to write.

    Args:
        document: returns it as JSON values.
        shown: yields it as text and tables.
        ok: whether the exit code is 0: the user's input has no problems.
    """

    document: Callable[[], Document]
    shown: Callable[[], Iterable[RenderableType]]
    ok: bool = True


def write_line(text: str) -> None:
    """Write one line to stdout unchanged."""
    _console().print(Text(text), soft_wrap=True)


def answer(command: str, as_json: bool, ask: Callable[[], Answer]) -> NoReturn:
    """Run a command's function, write its answer, and end the command with its exit code.

    Args:
        command: name of the command.
        as_json: whether to write one JSON document instead of text.
        ask: returns the answer; if it raises an `ActSwapError`, its problems are the answer.

    Raises:
        typer.Exit: always; with code 1 if the user's input has problems.
    """
    try:
        with _stdout_kept_clean():
            found = ask()
    except ActSwapError as error:
        found = rejected(error.problems, [*shown_problems(error.problems, error.subject)])
    if as_json:
        document = {"command": command, "ok": found.ok, **found.document()}
        write_line(json.dumps(document, indent=1))
    else:
        console = _console()
        for part in found.shown():
            console.print(part)
    raise typer.Exit(0 if found.ok else 1)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show what is done and for how long, on stderr, unless ``HF_HUB_DISABLE_PROGRESS_BARS`` is set.

    On a terminal it is a moving bar that disappears; elsewhere one line, as the work may take a minute.
    """
    console = Console(stderr=True, highlight=False, markup=False)
    if os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in _YES:
        yield
        return
    if not console.is_terminal:
        console.print(f"{what} ...", soft_wrap=True)
        yield
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """Within the block send to stderr what libraries print, also from compiled code (HiGHS)."""
    sys.stdout.flush()
    with redirect_stdout(sys.stderr):
        own = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
        try:
            yield
        finally:
            if sys.platform != "win32":
                ctypes.CDLL(None).fflush(None)  # C's buffer, which would be written after the answer
            os.dup2(own, _STDOUT)
            os.close(own)


def _console() -> Console:
    """Return a new console for each use, because a caller may replace ``sys.stdout`` between two uses."""
    return Console(highlight=False, markup=False)


def error_console() -> Console:
    """Return a console for what is no answer, on stderr."""
    return Console(stderr=True, highlight=False, markup=False)


def rejected(problems: Sequence[Problem], shown: Sequence[RenderableType]) -> Answer:
    """Return the answer of a command that stopped at these problems."""
    return Answer(lambda: {"problems": problems_document(problems)}, lambda: shown, ok=False)


def problems_document(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Return problems as JSON values."""
    return [asdict(problem) for problem in problems]


def shown_problems(problems: Sequence[Problem], subject: str) -> Iterable[RenderableType]:
    """Yield problems for people, a paragraph each."""
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    yield Text(f"{count} in the {subject}:" if subject else f"{count}:", style="bold red")
    yield from listed(folded_by_layer(map(str, problems)))


def folded_by_layer(lines: Iterable[str]) -> list[str]:
    """Return the lines; those that differ only in the number of the layer are one line, with ``*`` in it."""
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(_LAYER.sub(r"\1*", line), []).append(line)
    return [kind if len(same) > 1 else same[0] for kind, same in found.items()]


def listed(lines: Iterable[str]) -> Iterable[RenderableType]:
    """Yield lines as a list that wraps under its own text."""
    for line in lines:
        yield Bullet(line)


def heading(text: str) -> RenderableType:
    """Return a heading, an empty line before it."""
    return Text(f"\n{text}", style="bold")


class Bullet:
    """A list item: a paragraph after a dash, wrapped at words so that names stay whole where possible."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        width = max(options.max_width - 4, 20)
        lines = Text(self._text).wrap(console, width)
        for number, line in enumerate(lines):
            line.rstrip()
            yield Text(f"{'  - ' if number == 0 else '    '}{line.plain}")


def table_of(*columns: str, **settings: Any) -> Table:
    """Return a table without rows.

    Args:
        columns: headers of the columns; a column of numbers, which are aligned to the right, begins with
            ``>``. Others fold.
        settings: further settings of the table.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **settings)
    for name in columns:
        if name.startswith(">"):
            table.add_column(name.removeprefix(">"), justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table


def size_text(size_bytes: int) -> str:
    """Return bytes as text in the largest binary unit (up to GiB) in which the number is at least 1."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def step_ms_text(milliseconds: float) -> str:
    """Return the duration of a step as text, with the unit."""
    return f"{milliseconds:,.1f} ms" if milliseconds < 1000 else f"{milliseconds:,.0f} ms"


def op_ms_text(milliseconds: float) -> str:
    """Return the time of a few ops in ms, without the unit."""
    return f"{milliseconds:,.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def link_text(link: Link) -> str:
    """Return the rates of a link to the host as text."""
    rates = (
        link.out_bytes_per_ms,
        link.in_bytes_per_ms,
        link.out_beside_in_bytes_per_ms,
        link.in_beside_out_bytes_per_ms,
    )
    out, back, out_both, back_both = (rate / 1e6 for rate in rates)
    return f"{out:.1f} GB/s out, {back:.1f} back, {out_both:.1f} and {back_both:.1f} at once"
