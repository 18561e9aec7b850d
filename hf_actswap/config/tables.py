"""Reads tables over the pipeline: a list with an item per stage, or rows per interleave of such lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .reader import Findings, Path, read_items, show


@dataclass(frozen=True)
class TableShape:
    """The pipeline that the document states: ``pipeline_stage`` columns and ``pp_interleave_num`` rows."""

    pipeline_stage: int
    pp_interleave_num: int


def is_list(value: object) -> bool:
    """Whether a value is a list or a tuple: both count as lists of a document."""
    return isinstance(value, list | tuple)


def read_table(
    findings: Findings,
    path: Path,
    value: Sequence[object],
    read_item: Callable[[Findings, Path, object], Any],
    *,
    shape: TableShape | None,
    bool_rows: bool,
    may_be_short: bool,
) -> tuple[Any, ...] | None:
    """Read a list per stage, or a table if any item is a list.

    Args:
        findings: where problems go.
        path: path of the list.
        value: the list or tuple.
        read_item: function that reads one item.
        shape: shape that the document states; ``None``: only the rows' equal length is checked.
        bool_rows: whether a row of a table may be true or false.
        may_be_short: whether a list per stage may leave out the last stages.

    Returns:
        The tuple, of tuples for a table; ``None`` after a problem.
    """
    if any(is_list(item) for item in value):
        return _read_rows(findings, path, value, read_item, shape, bool_rows)
    row = read_items(findings, path, value, read_item)
    if shape is None:
        return row
    count, stages = len(value), shape.pipeline_stage
    if count > stages or (count < stages and not may_be_short):
        amount = "at most " if may_be_short else ""
        findings.problem(
            path, f"{amount}{_items(stages)}, one per pipeline stage", str(count), _stage_hint(stages)
        )
        return None
    return row


def _read_rows(
    findings: Findings,
    path: Path,
    rows: Sequence[object],
    read_item: Callable[[Findings, Path, object], Any],
    shape: TableShape | None,
    bool_rows: bool,
) -> tuple[Any, ...] | None:
    healthy = True
    if shape is not None and len(rows) != shape.pp_interleave_num:
        expected = f"{_rows(shape.pp_interleave_num)}, one per interleave"
        findings.problem(path, expected, str(len(rows)), f"pp_interleave_num is {shape.pp_interleave_num}.")
        healthy = False
    lengths = [len(row) for row in rows if isinstance(row, list | tuple)]
    width = lengths[0] if shape is None else shape.pipeline_stage
    read: list[Any] = []
    for index, row in enumerate(rows):
        here = (*path, index)
        if isinstance(row, list | tuple):
            items = read_items(findings, here, row, read_item)
            if len(row) != width or not row:
                hint = "" if shape is None else _stage_hint(width)
                expected = (
                    "rows of one length" if shape is None else f"{_items(width)}, one per pipeline stage"
                )
                findings.problem(here, expected, str(len(row)) if row else "an empty row", hint)
                items = None
            healthy = healthy and items is not None
            read.append(items)
        elif bool_rows and isinstance(row, bool):
            read.append(row)
        else:
            expected = "a row (a list), because other items are lists"
            findings.problem(here, f"{expected}, or true or false" if bool_rows else expected, show(row))
            healthy = False
    return tuple(read) if healthy else None


def _items(count: int) -> str:
    return f"{count} item{'' if count == 1 else 's'}"


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def _stage_hint(stages: int) -> str:
    return f"pipeline_stage is {stages}."
