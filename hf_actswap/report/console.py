"""What a console shows while a program runs: progress bars for slow work, log lines, the effective plan."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import StringIO
from typing import TypeVar

from huggingface_hub.utils import are_progress_bars_disabled
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from ..config.sizes import gib
from ..plan.actions import COMPILE_BUDGET, SCOPES, MemoryPlan, PlanRow, Scope, folded_tiles, format_scopes
from ..plan.in_words import plan_in_words
from ..plan.model_structure import ModelStructure

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Bar:
    """A line on a terminal, which disappears at the end; elsewhere nothing is shown.

    It is drawn at each call, not by a thread, so it does not disturb the trainer's own bar. These switch it
    off: ``disable_progress_bar()`` of transformers' logging, ``disable_progress_bars()`` of huggingface_hub,
    ``HF_HUB_DISABLE_PROGRESS_BARS=1``.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None

    def _is_drawn(self) -> bool:
        return self._console.is_terminal and not are_progress_bars_disabled()

    def close(self) -> None:
        """Remove the line, also before the work is done. Safe to call again."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()

    def _draw(self, columns: Sequence[ProgressColumn], done: int, total: int, left: int = 0) -> None:
        if self._progress is None:
            console = self._console
            self._progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._progress.add_task("", total=total, left=left)
            self._progress.start()
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=done, total=total, refresh=True, left=left)


class BytesBar(Bar):
    """A progress bar of bytes, called with (bytes done, bytes in total): give it to one rank only.

    Args:
        title: text before the bar.
        console: by default stderr.
        shown: ``False``: nothing is drawn (the Trainer's ``disable_tqdm``).
    """

    def __init__(self, title: str, console: Console | None = None, shown: bool = True) -> None:
        super().__init__(console)
        self._title, self._shown = title, shown

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show the progress; when the two are equal, the bar disappears."""
        if self._shown and self._is_drawn():
            columns = TextColumn(self._title), BarColumn(), DownloadColumn(binary_units=True)
            self._draw(columns, done_bytes, total_bytes)
        if done_bytes >= total_bytes:
            self.close()


class PinningBar(BytesBar):
    """A `BytesBar` while host memory is page-locked, for the host pool's ``progress``: for one rank only.

    At the end it writes a log line, whether the bar is drawn or not.
    """

    def __init__(self, console: Console | None = None, shown: bool = True) -> None:
        super().__init__("pinning host memory", console, shown)
        self._started: float | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show the progress; when the two are equal, the bar disappears and a line is logged."""
        if self._started is None:
            self._started = time.monotonic()
        super().__call__(done_bytes, total_bytes)
        if done_bytes >= total_bytes:
            seconds, self._started = time.monotonic() - self._started, None
            logger.info("%.1f GiB of host memory ready after %.1f s.", gib(total_bytes), seconds)


class PlannerBar(Bar):
    """A ``progress`` callback of the planner, which measures and searches: give it to one rank only.

    Args:
        console: by default stderr.
        title: text before the phase.
    """

    def __init__(self, console: Console | None = None, title: str = "planner") -> None:
        super().__init__(console)
        self._title, self._phase, self._steps = title, "", 0

    def __call__(self, phase: str, steps_left: int) -> None:
        """Show the progress.

        Args:
            phase: the planner's phase; ``stable`` is the end.
            steps_left: the most steps that are left in the phase.
        """
        if phase == "stable":
            self.close()
            return
        if not self._is_drawn():
            return
        if self._progress is None or phase != self._phase:
            self.close()
            self._phase, self._steps = phase, steps_left
        left = "{task.fields[left]} step(s) left at most"
        columns = TextColumn(f"{self._title}: {phase}"), BarColumn(), TextColumn(left)
        self._draw(columns, max(self._steps - steps_left, 0), max(self._steps, 1), steps_left)


@contextmanager
def console_logging(logger: logging.Logger) -> Iterator[None]:
    """Let INFO lines of ``logger`` and of those below it reach the console, whatever the program shows.

    Programs show INFO lines of their own, and of libraries only warnings (Axolotl by filters, also on
    loggers); these lines are all that is said of a plan. A handler on ``hf_actswap`` decides instead, and so
    does a level that the program has set on it, or one above warnings on the root.
    """
    own = list(_own_line(logger))
    root = own[-1].parent or logging.root
    if any(item.handlers for item in own) or root.level > logging.WARNING:
        yield
        return
    has_level = any(item.level for item in own)
    with ExitStack() as undo:
        for item in _and_below(logger):
            undo.callback(setattr, item, "filters", item.filters)
            item.filters = []
        if not has_level and not (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.INFO)
        line = logger.makeRecord(logger.name, logging.INFO, "", 0, "", (), None)
        if not logger.hasHandlers() or not any(_shows(handler, line) for handler in _handlers(logger)):
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
            if logger.hasHandlers():  # they show the warnings
                handler.addFilter(lambda record: record.levelno < logging.WARNING)
            logger.addHandler(handler)
            undo.callback(logger.removeHandler, handler)
        yield


def _own_line(logger: logging.Logger) -> Iterator[logging.Logger]:
    """Yield ``logger`` and what is above it, but for the root, which is the program's."""
    current: logging.Logger | None = logger
    while current is not None and current.parent is not None:
        yield current
        current = current.parent


def _and_below(logger: logging.Logger) -> Iterator[logging.Logger]:
    for name, item in list(logger.manager.loggerDict.items()):
        if isinstance(item, logging.Logger) and (item is logger or name.startswith(f"{logger.name}.")):
            yield item


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None


def _shows(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Whether the handler puts the record on the console. One without a stream, as Rich's, is taken to."""
    console = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    if isinstance(handler, logging.NullHandler):
        return False
    there = not isinstance(handler, logging.StreamHandler) or handler.stream in console
    return there and record.levelno >= handler.level and bool(handler.filter(record))


def plan_summary(plan: MemoryPlan, structure: ModelStructure | None = None) -> list[str]:
    """Return what a plan does (`plan_in_words`), and which requests were changed, in at most eight lines."""
    title = f"Activation plan, {plan.num_layers} {plan.family} layers:".replace("  ", " ")
    lines = [title, *(f"  {line}" for line in plan_in_words(plan, structure))]
    lines += [f"  changed: {item}" for item in plan.adjustments[:1]]
    if (left := len(plan.adjustments) - 1) > 0:
        lines.append(f"  changed: {left} more request(s) (`log: full` lists them)")
    return lines


def plan_table(plan: MemoryPlan, width: int = 110) -> str:
    """Return the plan as text: a table of the fates, then every adjustment with its reason.

    Args:
        plan: the plan to show.
        width: width of the table in characters; each adjustment is one line, however long.
    """
    title = f"Activation plan: {plan.num_layers} {plan.family} layers".replace("  ", " ")
    table = Table(title=title, title_justify="left")
    for column in ("Layers", "Op", "Fate", "Prefetch (ops)", "Release (ops)"):
        table.add_column(column, justify="right" if "ops" in column else "left")
    for rows in folded_rows(plan):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    out = StringIO()
    # In a notebook a console would show HTML and write nothing to its file.
    console = Console(file=out, width=width, color_system=None, highlight=False, force_jupyter=False)
    console.print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if plan.adjustments:
        lines += ["Requests that were changed:", *(f"  - {adjustment}" for adjustment in plan.adjustments)]
    return "\n".join(lines)


Cells = tuple[str, str, str, str, str]
"""Layers, op, fate, prefetch and release windows; the layers only in the first row of a group."""


def folded_rows(plan: MemoryPlan) -> Iterator[list[Cells]]:
    """Yield the rows of a plan's table in groups: layers with equal rows, then tiles and chunks."""

    def cells_of(scope: Scope) -> list[tuple[str, str, str, str]]:
        return [_cells(row) for row in plan.rows if row.scope == scope]

    for label, found, _ in folded(plan, cells_of):
        if label:
            cells = found or (_cells(PlanRow(0, "", "keep")),)
            yield [(label if not number else "", *row) for number, row in enumerate(cells)]
    if plan.tiles:
        yield [(*line, "", "") for line in folded_tiles(plan.tiles)]
    if plan.streamed is not None:
        yield [("the model", "the sequence", str(plan.streamed), "", "")]


def folded(
    plan: MemoryPlan, lines_of: Callable[[Scope], Iterable[T]]
) -> Iterator[tuple[str, tuple[T, ...], list[Scope]]]:
    """Yield label, lines and scopes of scopes with equal lines; the label is empty if nothing is to say."""
    groups: dict[tuple[T, ...], list[Scope]] = {}
    for scope in plan.scopes:
        groups.setdefault(tuple(lines_of(scope)), []).append(scope)
    for lines, scopes in groups.items():
        yield format_scopes(scope for scope in scopes if lines or scope not in SCOPES), lines, scopes


def op_and_fate(row: PlanRow) -> tuple[str, str]:
    """Return a row's op and fate as texts."""
    op = row.op_path or "everything"
    if row.ordinal is not None:
        op += f" (call {row.ordinal})"
    budget = row.parameters.get(COMPILE_BUDGET)
    return op, row.fate if budget is None else f"{row.fate}, compile budget {budget:g}"


def _cells(row: PlanRow) -> tuple[str, str, str, str]:
    name, fate = op_and_fate(row)
    if row.windows is None:  # the engine chooses a swap's from measured times: it is among the adjustments
        windows = "auto" if row.fate == "swap" else ""
        return name, fate, windows, windows
    return name, fate, str(row.windows.prefetch_ops), str(row.windows.release_ops)
