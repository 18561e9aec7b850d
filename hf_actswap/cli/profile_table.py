"""What a profile says, as a table: time, saved bytes, and what it would cost to be without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rich import box
from rich.table import Table

from ..plan import MemoryPlan, PlanRow
from ..plan.actions import Scope, folded
from ..planner.cost.simulate import Simulator
from ..planner.profile import Profile
from .numbers_text import op_ms_text, size_text

_AROUND = "around"
"""Outside of all scopes: rotary tables, masks, the loss."""


@dataclass(frozen=True)
class OpCost:
    """An op of a layer, or several ops of equal layers, added up.

    Args:
        scope: ``embedding``, ``final_norm``, ``head`` or ``around``; empty for layers.
        layers: that it is of.
        op: first part of the op path; ``""``: what runs between the ops.
        forward_ms, backward_ms: compute's time.
        saved_bytes: of what it produces, autograd saves.
        rebuild_ms: how much longer backward lasts if it is recomputed.
        rebuilt_bytes: of what is saved, not kept then.
    """

    scope: str
    layers: tuple[int, ...]
    op: str
    forward_ms: float
    backward_ms: float
    saved_bytes: int
    rebuild_ms: float | None = None
    rebuilt_bytes: int | None = None

    def document(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {**asdict(self), "layers": list(self.layers)}


def op_costs(profile: Profile) -> list[OpCost]:
    """Return what the ops of a step cost, equal layers together, in the order in which they run."""
    times: dict[Scope | None, dict[str, list[float]]] = defaultdict(dict)
    for span in profile.spans:
        scope, path, _ = span.call
        sums = times[scope].setdefault(_op_of(scope, path), [0.0, 0.0])
        sums[0] += span.forward_ms
        sums[1] += span.backward_ms
    sizes: dict[Scope | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (of, path), size_bytes in profile.saved.by_op().items():
        sizes[of][_op_of(of, path)] += size_bytes
    for scope, by_op in sizes.items():
        for op in by_op:
            times[scope].setdefault(op, [0.0, 0.0])
    found: list[OpCost] = []
    for scopes in _equal(times, sizes):
        layers = tuple(scope for scope in scopes if isinstance(scope, int))
        name = "" if layers else str(scopes[0] or _AROUND)
        for op in times[scopes[0]]:
            forward_ms, backward_ms = (sum(times[scope][op][way] for scope in scopes) for way in (0, 1))
            size_bytes = sum(sizes[scope][op] for scope in scopes)
            found.append(OpCost(name, layers, op, forward_ms, backward_ms, size_bytes))
    return _with_rebuilding(profile, found)


def cost_table(profile: Profile, costs: Sequence[OpCost]) -> Table:
    """Return them as a table, times in ms; ``Copy`` where copies run beside compute."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("", overflow="fold")
    for name in ("Forward", "Backward", "Saved", "Rebuild", *(("Copy",) if profile.link else ())):
        table.add_column(name, justify="right", no_wrap=True)
    shown: tuple[int, ...] = ()
    for cost in costs:
        if cost.layers and cost.layers != shown:
            shown = cost.layers
            table.add_row(f"layers {folded(shown)}")
        table.add_row(f"  {cost.op or 'between'}" if cost.layers else cost.scope, *_numbers(profile, cost))
    return table


def _numbers(profile: Profile, cost: OpCost) -> list[str]:
    size_bytes, link = cost.saved_bytes, profile.link
    shown = [
        op_ms_text(cost.forward_ms),
        op_ms_text(cost.backward_ms),
        size_text(size_bytes) if size_bytes else "",
        "" if cost.rebuild_ms is None else op_ms_text(cost.rebuild_ms),
    ]
    if link is not None:
        shown.append(op_ms_text(link.out_ms(size_bytes) - link.latency_ms) if size_bytes else "")
    return shown


def _op_of(scope: Scope | None, path: str) -> str:
    """The first part of an op's path; what is outside of the layers is not divided."""
    return path.partition(".")[0] if isinstance(scope, int) else ""


def _equal(
    times: Mapping[Scope | None, Mapping[str, object]], sizes: Mapping[Scope | None, Mapping[str, int]]
) -> list[list[Scope | None]]:
    """Layers with the same ops that save as much; every other scope alone."""
    groups: dict[object, list[Scope | None]] = {}
    for scope, ops in times.items():
        layer = isinstance(scope, int)
        key: object = (tuple(ops), tuple(sorted(sizes[scope].items()))) if layer else scope
        groups.setdefault(key, []).append(scope)
    return list(groups.values())


def _with_rebuilding(profile: Profile, costs: Sequence[OpCost]) -> list[OpCost]:
    simulator = Simulator(profile)
    found = []
    for cost in costs:
        if not (cost.layers and cost.op and cost.saved_bytes):
            found.append(cost)
            continue
        rows = tuple(PlanRow(layer, cost.op, "recompute") for layer in cost.layers)
        step = simulator.predict(MemoryPlan(rows, profile.num_layers, profile.family), curve=False)
        found.append(replace(cost, rebuild_ms=step.recompute_ms, rebuilt_bytes=step.recomputed_bytes))
    return found
