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
from rich.console import Console, ConsoleOptions, RenderableType
from rich.filesize import pick_unit_and_suffix
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import ActSwapError, Problem

if TYPE_CHECKING:  # commands look at their options before torch is imported
    from ..engine.link import Link

_STDOUT, _STDERR = 1, 2  # file descriptors
_YES = ("1", "ON", "YES", "TRUE")  # as in huggingface_hub, which takes long to import
_LAYER = re.compile(r"(\.(?:layers|h)\.)\d+")


@dataclass(frozen=True)
class Answer:
    """What a command has to write: as JSON values, and as text and tables.

    Args:
        ok: whether the exit code is 0: the user's input has no problems.
    """

    document: Mapping[str, Any]
    shown: Iterable[RenderableType]  # a generator, so that tables are made only if they are printed
    ok: bool = True


def answer(command: str, as_json: bool, ask: Callable[[], Answer]) -> NoReturn:
    """Write what ``ask`` returns, or the problems of an `ActSwapError` of it, and end the command."""
    try:
        with _stdout_kept_clean():
            found = ask()
    except ActSwapError as error:
        found = rejected(error.problems, shown_problems(error.problems, error.subject))
    if as_json:
        typer.echo(json.dumps({"command": command, "ok": found.ok, **found.document}, indent=1))
    else:
        print_parts(found.shown)
    raise typer.Exit(0 if found.ok else 1)


def print_parts(parts: Iterable[RenderableType], stderr: bool = False) -> None:
    """Print text and tables."""
    console = _console(stderr)  # a new one each time: a caller may have replaced `sys.stdout`
    for part in parts:
        console.print(part)


def _console(stderr: bool) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show what is done and for how long, on stderr, unless ``HF_HUB_DISABLE_PROGRESS_BARS`` is set.

    On a terminal it is a moving bar that disappears; elsewhere one line, as the work may take a minute.
    """
    console = _console(stderr=True)
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


def rejected(problems: Sequence[Problem], shown: Iterable[RenderableType]) -> Answer:
    """Return the answer of a command that stopped at these problems."""
    return Answer({"problems": problems_document(problems)}, shown, ok=False)


def problems_document(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Return problems as JSON values."""
    return [asdict(problem) for problem in problems]


def shown_problems(problems: Sequence[Problem], subject: str) -> Iterator[RenderableType]:
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
    """Return lines as a list that wraps under its own text."""
    return map(_Bullet, lines)


def titled(title: str, lines: Iterable[str]) -> Iterator[RenderableType]:
    """Yield a heading and lines as a list; nothing without lines."""
    if found := list(lines):
        yield heading(title)
        yield from listed(found)


def heading(text: str) -> RenderableType:
    """Return a heading with an empty line before it."""
    return Text(f"\n{text}", style="bold")


@dataclass(frozen=True)
class _Bullet:
    """A paragraph after a dash, wrapped at words so that names stay whole where possible."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = Text(self.text).wrap(console, max(options.max_width - 4, 20))
        for number, line in enumerate(lines):
            line.rstrip()
            yield Text(f"{'    ' if number else '  - '}{line.plain}")


def table_of(*columns: str, **settings: Any) -> Table:
    """Return a table without rows; a column of numbers, which are aligned to the right, begins with ``>``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **settings)
    for name in columns:
        if name.startswith(">"):
            table.add_column(name.removeprefix(">"), justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table


def size_text(size_bytes: int) -> str:
    """Return bytes as text in the largest binary unit (up to GiB) in which the number is at least 1."""
    unit_bytes, unit = pick_unit_and_suffix(size_bytes, ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes / unit_bytes:.2f} {unit}"


def step_ms_text(milliseconds: float) -> str:
    """Return the duration of a step as text, with the unit."""
    return f"{milliseconds:,.1f} ms" if milliseconds < 1000 else f"{milliseconds:,.0f} ms"


def op_ms_text(milliseconds: float) -> str:
    """Return the time of a few ops in ms, without the unit."""
    return f"{milliseconds:,.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def link_text(link: Link) -> str:
    """Return the rates of a link to the host as text."""
    out, back = link.out_bytes_per_ms / 1e6, link.in_bytes_per_ms / 1e6
    both = f"{link.out_beside_in_bytes_per_ms / 1e6:.1f} and {link.in_beside_out_bytes_per_ms / 1e6:.1f}"
    return f"{out:.1f} GB/s out, {back:.1f} back, {both} at once"
