"""Reads ``recompute_config`` (MindFormers, Memory Optimization), whose lists mean two different things.

Without swap a number says how many layers of a pipeline stage are recomputed; with ``swap_config.swap``
true a list holds global layer indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .keys import RECOMPUTE_KEYS
from .reader import Findings, Path, is_int, read_bool, read_items, read_section, show
from .schema import CompileBudget, LayerCounts, OpSelection, RecomputeConfig
from .swap_section import read_layers, read_op_path
from .tables import TableShape, is_list, read_table

SELECTION_KEYS = ("select_recompute", "select_comm_recompute")
EXCLUDE_KEYS = ("select_recompute_exclude", "select_comm_recompute_exclude")
FLAG_KEYS = ("parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation")

EXPECTED_SHARE = "a number from 0 to 1"
EXPECTED_BUDGET = "a number from 0 to 1, or a list with one for each layer"
EXPECTED_COUNTS = "true, false, a list of layer counts per stage, or a table per (interleave, stage)"
EXPECTED_INDICES = "true, false or a flat list of layer indices (swap is on)"


class _Reader:
    """Reads layer counts or layer indices, whichever ``swap`` says.

    Args:
        findings: the document, and where problems go.
        swap: whether lists hold layer indices.
        shape: shape of the pipeline that the document states; ``None``: it states none, or it is unreadable.
    """

    def __init__(self, findings: Findings, swap: bool, shape: TableShape | None) -> None:
        self.findings = findings
        self.swap = swap
        self.shape = shape

    def layers(self, path: Path, value: object) -> LayerCounts | None:
        """Read a bool, a list or (without swap) a table."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, list | tuple):
            self.findings.problem(path, EXPECTED_INDICES if self.swap else EXPECTED_COUNTS, show(value))
            return None
        if not self.swap:
            return read_table(
                self.findings,
                path,
                value,
                _read_count,
                shape=self.shape,
                bool_rows=True,
                may_be_short=True,
            )
        if any(is_list(item) for item in value):
            hint = "With swap on, layers are global indices in one flat list."
            self.findings.problem(path, EXPECTED_INDICES, show(value), hint)
            return None
        return read_layers(self.findings, path, value)

    def selection(self, path: Path, value: object) -> OpSelection | None:
        """Read what `layers` reads for the default ops, a list of op paths, or a mapping of op paths."""
        if isinstance(value, Mapping):
            return self._mapping(path, value)
        if isinstance(value, list | tuple) and any(isinstance(item, str) for item in value):
            return self._op_paths(path, value)
        if isinstance(value, bool | list | tuple):
            return self.layers(path, value)
        expected = EXPECTED_INDICES if self.swap else EXPECTED_COUNTS
        ops = "a mapping of op paths" if self.swap else "a list or mapping of op paths"
        self.findings.problem(path, f"{expected}; or {ops}", show(value))
        return None

    def exclusion(self, path: Path, value: object) -> OpSelection | None:
        """Read a selection that names its ops: there are no default ops to exclude."""
        names_none = value is True or (
            isinstance(value, list | tuple)
            and bool(value)
            and not any(isinstance(item, str) for item in value)
        )
        if names_none:
            ops = "a mapping of op paths" if self.swap else "a list or mapping of op paths"
            hint = "It names no op, and an exclude key has no default ops."
            self.findings.problem(path, f"false or {ops}", show(value), hint)
            return None
        return self.selection(path, value)

    def _mapping(self, path: Path, value: Mapping[Any, Any]) -> dict[str, LayerCounts] | None:
        selection: dict[str, LayerCounts] = {}
        healthy = True
        for op_path, layers in value.items():
            if not isinstance(op_path, str):
                self.findings.problem(path, "op paths (texts) as keys", f"the key {show(op_path)}")
                healthy = False
                continue
            here = (*path, op_path)
            read = self.layers(here, layers)
            if read_op_path(self.findings, here, op_path) is None or read is None:
                healthy = False
            else:
                selection[op_path] = read
        return selection if healthy else None

    def _op_paths(self, path: Path, value: list[object] | tuple[object, ...]) -> tuple[str, ...] | None:
        if self.swap:
            ops = [item for item in value if isinstance(item, str)]
            hint = f"Write a mapping: {show({op: True for op in ops})}."
            self.findings.problem(path, f"{EXPECTED_INDICES}; or a mapping of op paths", show(value), hint)
            return None
        return read_items(self.findings, path, value, read_op_path)


def read_recompute(findings: Findings, *, swap: bool | None, shape: TableShape | None) -> RecomputeConfig:
    """Read ``recompute_config``.

    Args:
        findings: the document, and where problems go.
        swap: ``swap_config.swap``; ``None``: it is unreadable, and only what is wrong either way is named.
        shape: shape of the pipeline that the document states; ``None``: it states none.
    """
    section = read_section(findings, "recompute_config", RECOMPUTE_KEYS)
    reader = _Reader(findings, swap is True, None if swap is None else shape)
    values: dict[str, Any] = {}
    for key, value in section.items():
        path = ("recompute_config", key)
        if key == "recompute":
            values[key] = reader.layers(path, value)
        elif key in SELECTION_KEYS:
            values[key] = reader.selection(path, value)
        elif key in EXCLUDE_KEYS:
            values[key] = reader.exclusion(path, value)
        elif key in FLAG_KEYS:
            values[key] = read_bool(findings, path, value)
        elif key == "compile_budget" and value is not None:
            values[key] = _read_budget(findings, path, value)
    return RecomputeConfig(**{key: value for key, value in values.items() if value is not None})


def selects_anything(value: OpSelection | None) -> bool:
    """Whether a value of ``recompute`` or a select key recomputes any layer (zeros do not)."""
    if value is None:
        return False
    if isinstance(value, dict):
        return any(selects_anything(layers) for layers in value.values())
    if isinstance(value, tuple):
        return any(selects_anything(item) if isinstance(item, tuple) else bool(item) for item in value)
    return value


def _read_count(findings: Findings, path: Path, value: object) -> int | bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and is_int(value) and value >= 0:
        return value
    hint = "Op paths go to select_recompute." if isinstance(value, str) and path[1] == "recompute" else ""
    findings.problem(path, "a number of layers (at least 0), true or false", show(value), hint)
    return None


def _read_budget(findings: Findings, path: Path, value: object) -> CompileBudget:
    """Read one share of activation memory for all compiled layers, or a list with one for each."""
    if not isinstance(value, list | tuple):
        return _read_share(findings, path, value, EXPECTED_BUDGET)
    if not value:
        findings.problem(path, EXPECTED_BUDGET, "an empty list")
        return None
    return read_items(findings, path, value, _read_share)


def _read_share(
    findings: Findings, path: Path, value: object, expected: str = EXPECTED_SHARE
) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    percent = isinstance(value, int | float) and not isinstance(value, bool) and 1 < value <= 100
    hint = f"Percent are written as a share: {value / 100:g}." if percent else ""  # type: ignore[operator]
    findings.problem(path, expected, show(value), hint)
    return None
