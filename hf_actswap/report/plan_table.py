"""Shows the effective plan: in a few lines of words, or as a table with equal layers in one row."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

from rich.console import Console
from rich.table import Table

from ..plan.actions import COMPILE_BUDGET, SCOPES, MemoryPlan, PlanRow, Scope, folded_tiles, format_scopes
from ..plan.in_words import plan_in_words
from ..plan.model_structure import ModelStructure

_MEASURED = "auto"
"""Text for windows that the engine chooses from measured times; its choice is among the adjustments."""


_MOST_ADJUSTMENTS = 1


def plan_summary(plan: MemoryPlan, structure: ModelStructure | None = None) -> list[str]:
    """Return what a plan does, and which requests were changed, in at most eight lines.

    Args:
        plan: the plan.
        structure: layers and ops of the model; see `plan_in_words`.
    """
    title = f"Activation plan, {plan.num_layers} {plan.family} layers:".replace("  ", " ")
    lines = [title, *(f"  {line}" for line in plan_in_words(plan, structure))]
    changed = [str(item) for item in plan.adjustments]
    lines += [f"  changed: {item}" for item in changed[:_MOST_ADJUSTMENTS]]
    if (left := len(changed) - _MOST_ADJUSTMENTS) > 0:
        lines.append(f"  changed: {left} more request(s) (`log: full` lists them)")
    return lines


def plan_table(plan: MemoryPlan, width: int = 110) -> str:
    """Return the plan as text: a table of the fates, then every adjustment with its reason.

    Args:
        plan: the plan to show.
        width: width of the table in characters; each adjustment is one line, however long.
    """
    out = StringIO()
    # In a notebook a console would show HTML and write nothing to its file.
    console = Console(file=out, width=width, color_system=None, highlight=False, force_jupyter=False)
    console.print(_rows_table(plan))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if plan.adjustments:
        lines += ["Requests that were changed:", *(f"  - {adjustment}" for adjustment in plan.adjustments)]
    return "\n".join(lines)


def _rows_table(plan: MemoryPlan) -> Table:
    title = f"Activation plan: {plan.num_layers} {plan.family} layers".replace("  ", " ")
    table = Table(title=title, title_justify="left")
    for column in ("Layers", "Op", "Fate", "Prefetch (ops)", "Release (ops)"):
        table.add_column(column, justify="right" if "ops" in column else "left")
    for rows in folded_rows(plan):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


Cells = tuple[str, str, str, str, str]
"""Layers, op, fate, prefetch and release windows; the layers only in the first row of a group."""


def folded_rows(plan: MemoryPlan) -> Iterator[list[Cells]]:
    """Yield the rows of a plan's table in groups: layers with equal rows, then tiles and chunks."""
    by_rows: dict[tuple[PlanRow, ...], list[Scope]] = {}
    for scope in plan.scopes:
        by_rows.setdefault(_shape(plan, scope), []).append(scope)
    for rows, scopes in by_rows.items():
        label = format_scopes(scope for scope in scopes if rows or scope not in SCOPES)
        if label:
            cells = [_cells(row) for row in rows or (PlanRow(0, "", "keep"),)]
            yield [(label if not number else "", *row) for number, row in enumerate(cells)]
    if plan.tiles:
        yield [(*line, "", "") for line in folded_tiles(plan.tiles)]
    if plan.streamed is not None:
        yield [("the model", "the sequence", str(plan.streamed), "", "")]


def _shape(plan: MemoryPlan, scope: Scope) -> tuple[PlanRow, ...]:
    """Return the rows of a scope with the scope left out, so that the rows of equal layers are equal."""
    return tuple(
        PlanRow(0, row.op_path, row.fate, row.ordinal, row.windows, row.parameters)
        for row in plan.rows
        if row.scope == scope
    )


def _cells(row: PlanRow) -> tuple[str, str, str, str]:
    name = row.op_path or "everything"
    if row.ordinal is not None:
        name += f" (call {row.ordinal})"
    fate: str = row.fate
    if COMPILE_BUDGET in row.parameters:
        fate += f", compile budget {row.parameters[COMPILE_BUDGET]:g}"
    if row.windows is None:
        windows = _MEASURED if row.fate == "swap" else ""
        return name, fate, windows, windows
    return name, fate, str(row.windows.prefetch_ops), str(row.windows.release_ops)
