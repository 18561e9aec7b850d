"""How many bytes autograd saves for a batch, by the op that produced them, and how many a plan swaps of it.

Known before anything is computed: the model runs once on fake tensors of the real shapes
(`engine/forecast.py`). The record does not depend on a plan, so several plans can be priced with one.

A plan is priced by the engine's rules, in the order in which the engine meets the tensors:

* the fate is the producer's; one storage is copied once, whoever saves it;
* a tensor under ``min_tensor_bytes`` stays, a larger view of the same storage may still move;
* a view that shows under half of its storage moves alone; what the copy does not cover is copied again,
  whole;
* layers that are recomputed whole save what they are called with. A recomputed module or function holds what
  it is called with, so that these move if their producers say so, and its output stays;
* an op that is kept or swapped inside a recomputed module is not run again, and its result is held for the
  ops after it, or moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .actions import MemoryPlan, PlanRow, Scope
from .kept_inside import KeptInside
from .outline import OUTPUT, is_below
from .record import OpCall as OpCall
from .record import SavedStorage as SavedStorage
from .record import Use as Use
from .record import UseKind as UseKind

_ALIGNMENT_BYTES = 64
"""Where a view that moves alone may begin, as in the engine."""


@dataclass(frozen=True)
class SavedBytes:
    """What one forward saves and hands around; weights and what comes from outside the layers left out.

    Args:
        storages: in the order in which they were met.
        modules: by layer, the paths of its modules (``""`` is the layer itself).
    """

    storages: tuple[SavedStorage, ...]
    modules: Mapping[Scope, frozenset[str]]

    def by_op(self) -> Mapping[tuple[Scope, str], int]:
        """Return the bytes that autograd saves by (scope, op path) of the producer, each storage once."""
        found: Counter[tuple[Scope, str]] = Counter()
        for storage in self.storages:
            first = next((use for use in storage.uses if use.kind == "saved"), None)
            if first is not None and first.producer[0] is not None:
                found[first.producer[0], first.producer[1]] += storage.size_bytes
        return found


@dataclass(frozen=True, slots=True)
class SwappedCopy:
    """One copy to the host in one forward, and the row that asks for it."""

    row: PlanRow
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AskedSwap:
    """The engine is asked for a ticket, and it is one on a host copy.

    Args:
        use: at which it is asked.
        row: that says so.
        copy: number of the copy among those of this storage.
        size_bytes: of the copy.
        is_new: whether the copy out starts here.
    """

    use: Use
    row: PlanRow
    copy: int
    size_bytes: int
    is_new: bool


def swapped_bytes(saved: SavedBytes, plan: MemoryPlan) -> int:
    """Return the bytes that ``plan`` swaps in one forward, if host memory has room for all of them.

    Rows whose windows are chosen by measurement count in full; the engine may keep some of it.
    """
    return sum(copy.size_bytes for copy in swapped_copies(saved, plan))


def dropped_bytes(saved: SavedBytes, plan: MemoryPlan) -> int:
    """Return by how many bytes less one forward leaves for backward because ``plan`` runs ops again.

    What it swaps counts as kept: on the device or on the host, it is there.
    """
    return _left_bytes(saved, MemoryPlan((), plan.num_layers)) - _left_bytes(saved, plan)


def _left_bytes(saved: SavedBytes, plan: MemoryPlan) -> int:
    """Bytes of the storages that are there when forward has ended, each whole."""
    regions = Regions(plan, saved.modules)
    held = {index: use for index, use in held_results(saved, plan)}
    return sum(
        storage.size_bytes
        for index, storage in enumerate(saved.storages)
        if _is_left(storage, regions, held.get(index))
    )


def _is_left(storage: SavedStorage, regions: Regions, held: Use | None) -> bool:
    handed_on = None
    for use in storage.uses:
        if use.kind == "returned" and regions.is_root(use.at):
            handed_on = use.producer  # a recomputed module keeps its output
        if held is use or regions.asks(use):
            row = regions.row(use.producer)
            if row is None or row.fate not in ("recompute", "re-gather") or use.producer == handed_on:
                return True
    return False


def swapped_copies(saved: SavedBytes, plan: MemoryPlan) -> Iterator[SwappedCopy]:
    """Yield the copies to the host of one forward under ``plan``, storage by storage."""
    regions = Regions(plan, saved.modules)
    held = {index: use for index, use in held_results(saved, plan)}
    for index, storage in enumerate(saved.storages):
        for ticket in swap_tickets(storage, plan, regions, held.get(index)):
            if ticket.is_new:
                yield SwappedCopy(ticket.row, ticket.size_bytes)


def swap_tickets(
    storage: SavedStorage, plan: MemoryPlan, regions: Regions, held: Use | None
) -> Iterator[AskedSwap]:
    """Yield the tickets of one storage that are on the host during the turn.

    Args:
        storage: with its uses.
        plan, regions: of the forward.
        held: the use at which a recomputed module holds it (`held_results`).
    """
    copied: tuple[int, int, int] | None = None
    number, kept = -1, None
    for use in storage.uses:
        if use.kind == "returned":
            kept = use.producer if regions.is_root(use.at) else kept
        if not (held is use or regions.asks(use)) or use.producer == kept:
            continue
        row = regions.row(use.producer)
        if row is None or row.fate != "swap":
            continue
        is_new = copied is None or not _covers(copied, use)
        if is_new:
            if use.size_bytes < max(1, plan.min_tensor_bytes):
                continue
            start, stop = (0, storage.size_bytes) if copied is not None else _moved(use, storage.size_bytes)
            copied = start, stop, use.version
            number += 1
        if copied is not None:
            yield AskedSwap(use, row, number, copied[1] - copied[0], is_new)


def held_results(saved: SavedBytes, plan: MemoryPlan) -> Iterator[tuple[int, Use]]:
    """Yield what recomputed modules hold so as not to run kept and swapped ops inside them again.

    Yields:
        Number of the storage, and the use at which the op's call returns it.
    """
    inside = KeptInside(plan, saved.modules)
    uses = [use for storage in saved.storages for use in storage.uses]
    ends = {use.at[:2]: use.order for use in uses if use.kind == "returned" and use.at[2] is None}
    last: dict[tuple[Scope, str], int] = {}
    for use in uses:
        scope, path, _ = use.producer
        root = inside.root(scope, path) if scope is not None and use.kind == "saved" else None
        row = _row(plan, use.producer)
        if scope is None or root is None or row is None or row.fate != "recompute" or use.at[0] != scope:
            continue
        if use.order < ends.get((scope, root), use.order + 1):  # else it was handed on, and is kept
            last[scope, root] = max(last.get((scope, root), 0), use.order)
    for index, storage in enumerate(saved.storages):
        for use in storage.uses:
            scope, path, ordinal = use.at
            if use.kind != "returned" or scope is None or not inside.is_held(scope, path, ordinal):
                continue
            needed = use.order < last.get((scope, inside.root(scope, path) or ""), 0)
            if needed and not _is_argument(storage, use) and not _is_inner(storage, use):
                yield index, use
                break


def _is_argument(storage: SavedStorage, returned: Use) -> bool:
    """Whether the call returns a view of what it was given."""
    earlier = (use for use in storage.uses if use.order < returned.order)
    return any(use.at == returned.at and use.kind in ("function", "module") for use in earlier)


def _is_inner(storage: SavedStorage, returned: Use) -> bool:
    """Whether only other functions of the same op read what a function returns."""
    later = [use for use in storage.uses if use.order > returned.order and use.kind in ("function", "module")]
    readers = {use.at[1] for use in later}
    return returned.at[2] is not None and readers == {returned.at[1]}


def _row(plan: MemoryPlan, op: OpCall) -> PlanRow | None:
    scope, path, ordinal = op
    return None if scope is None else plan.row(scope, path, ordinal)


def _covers(copied: tuple[int, int, int], use: Use) -> bool:
    start, stop, version = copied
    return version == use.version and start <= use.start_bytes and use.stop_bytes <= stop


def _moved(use: Use, storage_bytes: int) -> tuple[int, int]:
    start, stop = use.start_bytes, use.stop_bytes
    start -= start % _ALIGNMENT_BYTES
    return (start, stop) if 2 * (stop - start) < storage_bytes else (0, storage_bytes)


class Regions:
    """What a plan recomputes, as far as that decides which tensors are asked for.

    Args:
        plan: rows.
        modules: by layer, the paths of its modules (``""`` is the layer itself).
    """

    def __init__(self, plan: MemoryPlan, modules: Mapping[Scope, frozenset[str]]) -> None:
        self._plan, self._modules = plan, modules
        self._rows: dict[OpCall, PlanRow | None] = {}
        self._known: dict[tuple[Scope | None, str], list[str]] = {}
        self._roots: dict[Scope, list[str]] = {}
        for row in plan.rows:
            if row.fate == "recompute" and self._is_module(row.scope, row.op_path):
                self._roots.setdefault(row.scope, []).append(row.op_path)
        inside = {row.scope for row in plan.rows if row.op_path not in ("", OUTPUT)}
        self.checkpointed = frozenset(
            scope for scope, roots in self._roots.items() if "" in roots and scope not in inside
        )
        """Layers that are recomputed whole, with nothing inside decided otherwise."""

    def row(self, call: OpCall) -> PlanRow | None:
        """The row that decides what ``call`` produces."""
        if call not in self._rows:
            self._rows[call] = _row(self._plan, call)
        return self._rows[call]

    def root(self, scope: Scope | None, path: str) -> str | None:
        """The outermost recomputed module that ``path`` is, or is inside."""
        return min(self._around(scope, path), key=len, default=None)

    def is_root(self, call: OpCall) -> bool:
        """Whether a module is recomputed as one."""
        scope, path, _ = call
        return scope is not None and path in self._roots.get(scope, ())

    def asks(self, use: Use) -> bool:
        """Whether the engine is asked for a ticket at this use."""
        scope, path, _ = use.at
        if use.kind == "saved":
            return scope not in self.checkpointed
        if use.kind == "returned" or scope not in self._modules:
            return False
        around = self._around(scope, path)
        if use.kind == "module":
            return around == [path]
        if around:
            return False
        row = self.row(use.at)
        return row is not None and row.fate in ("recompute", "re-gather")

    def _around(self, scope: Scope | None, path: str) -> list[str]:
        """The recomputed modules that ``path`` is, or is inside."""
        found = self._known.get((scope, path))
        if found is None:
            roots = () if scope is None else self._roots.get(scope, ())
            found = self._known[scope, path] = [root for root in roots if is_below(path, root)]
        return found

    def _is_module(self, scope: Scope, path: str) -> bool:
        return path in self._modules.get(scope, ())
