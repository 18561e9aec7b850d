"""Tables that fit into 80 columns: fates with bytes, and predicted steps side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich import box
from rich.table import Table

from ..plan import MemoryPlan, PlanRow
from ..plan.actions import COMPILE_BUDGET, SCOPES, Scope, folded
from ..planner.profile import Prediction, Profile
from .numbers_text import size_text, step_ms_text
from .planned import MemoryParts
from .step import saved_by_row

_Line = tuple[str, str, str, int]
"""Op, fate, windows, bytes."""


def fate_table(plan: MemoryPlan, profile: Profile | None) -> Table:
    """Return what happens to what, equal layers folded.

    Args:
        plan: to show.
        profile: of the step; ``None``: no bytes are shown.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Layers", overflow="fold")
    table.add_column("Op", overflow="fold")
    table.add_column("Fate")
    table.add_column("Prefetch/release", justify="right")
    if profile is not None:
        table.add_column("Saved", justify="right", no_wrap=True)
    sizes = {} if profile is None else dict(saved_by_row(profile, plan))
    groups: dict[tuple[_Line, ...], list[Scope]] = {}
    for scope in plan.scopes:
        groups.setdefault(tuple(_lines(plan, sizes, scope)), []).append(scope)
    for lines, scopes in groups.items():
        label = _label(scopes, bool(lines))
        for op, fate, windows, size in lines or ((("everything", "keep", "", 0),) if label else ()):
            saved = [size_text(size * len(scopes)) if size else ""] if profile is not None else []
            table.add_row(label, op, fate, windows, *saved)
            label = ""
    for tile in plan.tiles:
        table.add_row(str(tile.scope), tile.op_path or "everything", str(tile))
    return table


def short_table(plan: MemoryPlan, profile: Profile) -> Table:
    """Return a line for each fate: bytes, and the ops with the number of layers in which they have it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Fate")
    table.add_column("Saved", justify="right", no_wrap=True)
    table.add_column("Ops (layers)", overflow="fold")
    sizes = dict(saved_by_row(profile, plan))
    saved: dict[str, int] = {}
    layers: dict[str, dict[str, int]] = {}
    for scope in plan.scopes:
        for ops, fate, _, size in _by_fate(_lines(plan, sizes, scope)):
            saved[fate] = saved.get(fate, 0) + size
            for op in ops.split(", "):
                layers.setdefault(fate, {}).setdefault(op, 0)
                layers[fate][op] += 1
    for fate in sorted(saved):
        ops = ", ".join(f"{op} ({count})" for op, count in layers[fate].items() if fate != "keep")
        table.add_row(fate, size_text(saved[fate]), ops or "everything else")
    return table


def memory_table(parts: Mapping[str, MemoryParts]) -> Table:
    """Return what peaks consist of, by what is done to the activations."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for name in ("Weights", "Gradients", "States", "Activations", "Decides"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, part in parts.items():
        sizes = (part.weights, part.gradients, part.states, part.activations)
        table.add_row(name, *map(size_text, sizes), part.decides)
    return table


def summary_table(plan: MemoryPlan, profile: Profile) -> Table:
    """Return the same with all ops of one fate in one line, and without windows."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Layers", overflow="fold", max_width=18)
    table.add_column("Fate")
    table.add_column("Ops", overflow="fold")
    table.add_column("Saved", justify="right", no_wrap=True)
    sizes = dict(saved_by_row(profile, plan))
    groups: dict[tuple[_Line, ...], list[Scope]] = {}
    for scope in plan.scopes:
        groups.setdefault(tuple(_by_fate(_lines(plan, sizes, scope))), []).append(scope)
    for lines, scopes in groups.items():
        label = _label(scopes, bool(lines))
        for ops, fate, _, size in lines:
            table.add_row(label, fate, ops, size_text(size * len(scopes)))
            label = ""
    return table


def step_table(steps: Mapping[str, Prediction], device_bytes: int | None = None) -> Table:
    """Return predicted steps side by side.

    Args:
        steps: by what is done to the activations.
        device_bytes: peaks above it are marked; ``None``: none are.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for name in ("Peak", "Step", "Kept", "Swapped", "Recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, step in steps.items():
        over = " !" if device_bytes is not None and step.peak_bytes > device_bytes else ""
        table.add_row(
            name,
            f"{size_text(step.peak_bytes)}{over}",
            step_ms_text(step.step_ms),
            size_text(step.kept_bytes),
            size_text(step.swapped_bytes),
            size_text(step.recomputed_bytes),
        )
    return table


def windows_text(row: PlanRow) -> str:
    """Return the windows of a swap in operators; ``auto``: chosen from measured times."""
    if row.fate != "swap":
        return ""
    return f"{row.windows.prefetch_ops}/{row.windows.release_ops}" if row.windows else "auto"


def _lines(
    plan: MemoryPlan, sizes: Mapping[tuple[Scope, PlanRow | None], int], scope: Scope
) -> Iterator[_Line]:
    for row in plan.rows:
        if row.scope != scope:
            continue
        op = row.op_path or "everything"
        op += "" if row.ordinal is None else f" (call {row.ordinal})"
        fate: str = row.fate
        if COMPILE_BUDGET in row.parameters:
            fate += f", budget {row.parameters[COMPILE_BUDGET]:g}"
        yield op, fate, windows_text(row), _size_of(sizes, row)
    rest = sizes.get((scope, None), 0)
    if rest:
        named = any(row.scope == scope for row in plan.rows)
        yield "everything else" if named else "everything", "keep", "", rest


def _by_fate(lines: Iterable[_Line]) -> Iterator[_Line]:
    ops: dict[str, dict[str, None]] = {}
    sizes: dict[str, int] = {}
    for op, fate, _, size in lines:
        if not size:
            continue
        ops.setdefault(fate, {})[op.partition(" (call")[0]] = None
        sizes[fate] = sizes.get(fate, 0) + size
    for fate, size in sizes.items():
        yield ", ".join(ops[fate]), fate, "", size


def _label(scopes: list[Scope], with_names: bool) -> str:
    return folded(scope for scope in scopes if with_names or scope not in SCOPES)


def _size_of(sizes: Mapping[tuple[Scope, PlanRow | None], int], row: PlanRow) -> int:
    return sizes.get((row.scope, row), 0)
