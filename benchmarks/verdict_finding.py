"""A claim, what came of it, and where its numbers are in the rows of `frontier.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""The rows of one workload, by method."""


@dataclass(frozen=True)
class Finding:
    """One claim and what came of it.

    Args:
        claim: in words; its number, workload and method.
        measured: the number, ``None`` where there is none.
        bound: what it is held against.
        sense: on which side of the bound it must be.
        remark: why there is no number, or which row it is of.
    """

    claim: str
    measured: float | None
    bound: float
    sense: Literal["at most", "at least", "below"]
    remark: str = ""

    @property
    def verdict(self) -> str:
        """``pass``, ``FAIL`` or ``not measured``."""
        if self.measured is None:
            return "not measured"
        holds = {
            "at most": self.measured <= self.bound,
            "at least": self.measured >= self.bound,
            "below": self.measured < self.bound,
        }
        return "pass" if holds[self.sense] else "FAIL"


def of_shape(rows: Sequence[Row], shape: tuple[Any, ...]) -> Rows:
    """Return the rows of one workload, measured on an accelerator, by method."""
    keys = ("model", "layers", "seq", "batch", "head")
    return {
        row["method"]: row
        for row in rows
        if tuple(row[key] for key in keys) == shape and row["device"] != "cpu" and not row.get("longest")
    }


def missing(rows: Rows, *methods: str) -> str:
    """Why a claim about these methods cannot be judged, ``""`` if it can."""
    missing = [f"no row {method}" for method in methods if method not in rows]
    unmeasured = [
        f"{method}: {rows[method].get('status')}"
        for method in methods
        if method in rows and rows[method]["ms"] is None
    ]
    return "; ".join(missing + unmeasured)


def ratio(rows: Rows, one: str, base: str, key: str) -> float | None:
    """Return one method's number over another's, ``None``: one is missing."""
    values = [rows[method][key] if method in rows else None for method in (one, base)]
    return values[0] / values[1] if None not in values and values[1] else None


def worst_of(rows: Sequence[Row], number: Callable[[Row], float | None]) -> tuple[float | None, str]:
    """Return the largest number, and of which method."""
    found = [(value, row["method"]) for row in rows if (value := number(row)) is not None]
    return max(found) if found else (None, "")
