"""Counts the bytes that autograd saves for a batch, by producing op, and those that a plan swaps or drops.

The counts are known before anything is computed: the model runs once on fake tensors of the real shapes
(`engine/host_budget.py`). The record does not depend on a plan, so one record serves for several plans.

Bytes are counted by the engine's rules, in the order in which the engine meets the tensors:

* a storage has the fate of its producer, and is copied once, whichever ops save it;
* a tensor under ``min_tensor_bytes`` stays; a larger view of the same storage may still move;
* a view that shows under half of its storage is copied alone; if a later view shows more than this copy, the
  whole storage is copied too;
* a layer that is recomputed whole saves its inputs. A recomputed module or function holds its inputs, which
  move if their producers' fate is swap; its output stays;
* an op that is kept or swapped inside a recomputed module is not run again: its result is held for the ops
  after it, or moves.

`RecomputedModules` is an index of what a plan recomputes, for the engine, the counts, the rules that settle a
plan, and the planner. A *root* is a module that is run again as one; of roots inside each other the outermost
counts.

What a plan keeps or swaps inside a root is not run again (an excluded op, a communication whose result is
kept, a swapped op): when the module runs again, the op's result is handed out in its place
(`engine/recompute.py`). MindSpore does the same: an op without the recompute flag is not duplicated,
and its result is held as long as a duplicate reads it. Where autograd does not save that result, it costs
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from .actions import OUTPUT, MemoryPlan, PlanRow, Scope
from .actions import OpCall as OpCall
from .model_structure import is_below
from .op_facts import is_communication, is_repeatable
from .record import SavedStorage as SavedStorage
from .record import Use as Use
from .record import UseKind as UseKind

RUN_AGAIN = ("recompute", "re-gather")
"""Fates of tensors that are dropped, and made again in backward."""


@dataclass(frozen=True, eq=False)
class RecomputedModules:
    """The index of one plan; ``modules``: paths of the modules of each layer (``""`` is the layer itself)."""

    plan: MemoryPlan
    modules: Mapping[Scope, frozenset[str]]
    _rows: dict[OpCall, PlanRow | None] = field(init=False, repr=False, default_factory=dict)
    _outermost: dict[tuple[Scope | None, str], str | None] = field(
        init=False, repr=False, default_factory=dict
    )
    _kept_modules: dict[tuple[Scope, str], bool] = field(init=False, repr=False, default_factory=dict)

    @cached_property
    def roots(self) -> Mapping[Scope, frozenset[str]]:
        """Paths of the modules of each layer that are run again as one."""
        found: dict[Scope, set[str]] = {}
        for row in self.plan.rows:
            if row.fate == "recompute" and row.ordinal is None and self._is_module(row):
                found.setdefault(row.scope, set()).add(row.op_path)
        return {scope: frozenset(paths) for scope, paths in found.items()}

    @cached_property
    def _recomputes(self) -> bool:
        return any(row.fate in RUN_AGAIN for row in self.plan.rows)

    @cached_property
    def scopes_with_op_rows(self) -> frozenset[Scope]:
        """Scopes in which rows of the plan name single ops."""
        return frozenset(row.scope for row in self.plan.rows if row.op_path not in ("", OUTPUT))

    @cached_property
    def whole_layers(self) -> frozenset[Scope]:
        """Layers that are run again whole, and in which no row names single ops."""
        whole = frozenset(scope for scope, paths in self.roots.items() if "" in paths)
        return whole - self.scopes_with_op_rows

    @cached_property
    def selective_layers(self) -> frozenset[Scope]:
        """Layers in which something is recomputed, except `whole_layers`."""
        again = {row.scope for row in self.plan.rows if row.fate == "recompute"}
        return self.scopes_with_op_rows.intersection(again, self.modules)

    def row(self, call: OpCall) -> PlanRow | None:
        if call not in self._rows:
            scope, path, ordinal = call
            self._rows[call] = None if scope is None else self.plan.row(scope, path, ordinal)
        return self._rows[call]

    def is_root(self, scope: Scope | None, path: str) -> bool:
        return scope is not None and path in self.roots.get(scope, ())

    def root(self, scope: Scope | None, path: str) -> str | None:
        """Return the outermost root that ``path`` is, or is inside."""
        key = scope, path
        if key not in self._outermost:
            roots = () if scope is None else self.roots.get(scope, ())
            around = [root for root in roots if is_below(path, root)]
            self._outermost[key] = min(around, key=len, default=None)
        return self._outermost[key]

    def rebuilt_by(self, call: OpCall) -> OpCall | None:
        """Return the call that is run again, from its inputs, to rebuild what ``call`` produces.

        That is the root around ``call`` (as a call with ordinal ``None``); ``call`` itself without a root, or
        if it is a communication that is done again; ``None`` if what it produces is kept or swapped.
        """
        if not self._recomputes:
            return None
        scope, path, _ = call
        row = self.row(call)
        if row is None or row.fate not in RUN_AGAIN:
            return None
        root = self.root(scope, path)
        if root is None or (is_communication(path) and not self._is_module(row)):
            return call if is_repeatable(path) else None
        return scope, root, None

    def keeps_inside(self, scope: Scope, root: str) -> bool:
        inside = self._inside.get(scope, ())
        return any(kept and path != root and is_below(path, root) for path, kept in inside)

    def is_kept_module(self, scope: Scope, path: str) -> bool:
        """Whether ``path`` is a module inside a root, and nothing in this module is run again."""
        key = scope, path
        if key not in self._kept_modules:
            inside_root = path in self.modules.get(scope, ()) and self.root(scope, path) is not None
            row = self.row((scope, path, None)) if inside_root else None
            kept = row is not None and row.fate not in RUN_AGAIN
            self._kept_modules[key] = kept and all(
                kept_inside for inside, kept_inside in self._inside[scope] if is_below(inside, path)
            )
        return self._kept_modules[key]

    def is_held(self, call: OpCall) -> bool:
        """Whether the root around a call holds its result, if the root must rebuild what comes after."""
        scope, path, ordinal = call
        root = self.root(scope, path)
        if scope is None or root is None or root == path:
            return False
        above = path.rpartition(".")[0]
        while above and above != root:
            if self.is_kept_module(scope, above):
                return False  # the module's own output is held
            above = above.rpartition(".")[0]
        if ordinal is None:
            return self.is_kept_module(scope, path)
        row = self.row(call)
        return row is not None and row.fate not in RUN_AGAIN

    def runs_again(self, call: OpCall, region: OpCall) -> bool:
        """Whether a call inside a region runs again with it; kept ops inside a recomputed module do not."""
        (_, path, ordinal), (scope, root, _) = call, region
        if scope is None or not self.keeps_inside(scope, root):
            return True
        while path and path != root:
            if self.is_held((scope, path, ordinal)) or self.is_kept_module(scope, path):
                return False
            path, ordinal = path.rpartition(".")[0], None
        return True

    @cached_property
    def _inside(self) -> Mapping[Scope, list[tuple[str, bool]]]:
        """For each layer, the op paths of its rows, each with whether the op is not run again."""
        found: dict[Scope, list[tuple[str, bool]]] = {}
        for row in self.plan.rows:
            if row.scope in self.modules and row.op_path != OUTPUT:
                found.setdefault(row.scope, []).append((row.op_path, row.fate not in RUN_AGAIN))
        return found

    def _is_module(self, row: PlanRow) -> bool:
        return row.op_path in self.modules.get(row.scope, ())


_ALIGNMENT_BYTES = 64
"""The copy of a single view begins at a multiple of this."""


@dataclass(frozen=True)
class SavedBytes:
    """The storages that one forward saves or passes on, in the order of their first use, and each layer's
    modules.

    Without weights and tensors from outside the layers.
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
    row: PlanRow
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TicketUse:
    """A use of a storage for which the engine hands out a ticket, and what a plan does with the tensor.

    Args:
        number: number of the use among those of its storage.
        use: the use.
        row: the row that decides the fate; ``None``: no row does, and the tensor stays.
        kind: whether the tensor stays, is on the host, or is built again.
        holder: the call that has the tensor as an input when it runs again (a module: ordinal ``None``);
            ``None``: the autograd node that saved it.
        source: the call that runs again to build the tensor; ``None``: it is not built.
        copy: number of the host copy among those of the storage; -1: none.
        copy_bytes: size of that copy.
        starts_copy: whether this use starts it.
    """

    number: int
    use: Use
    row: PlanRow | None
    kind: Literal["keep", "swap", "built"]
    holder: OpCall | None = None
    source: OpCall | None = None
    copy: int = -1
    copy_bytes: int = 0
    starts_copy: bool = False


def swapped_bytes(saved: SavedBytes, plan: MemoryPlan) -> int:
    """Return the bytes that ``plan`` swaps in one forward, if all of them fit in host memory.

    Rows whose windows are chosen by measurement count in full; the engine may keep some of it.
    """
    return sum(copy.size_bytes for copy in swapped_copies(saved, plan))


def dropped_bytes(saved: SavedBytes, plan: MemoryPlan) -> int:
    """Return how many bytes fewer one forward leaves for backward because ``plan`` recomputes ops.

    Swapped tensors count as kept: they exist, on the device or on the host.
    """
    return _left_bytes(saved, MemoryPlan((), plan.num_layers)) - _left_bytes(saved, plan)


def _left_bytes(saved: SavedBytes, plan: MemoryPlan) -> int:
    """Return the bytes of the storages that exist when forward has ended; each counts whole."""
    recomputed = RecomputedModules(plan, saved.modules)
    held = dict(held_results(saved, recomputed))
    return sum(
        storage.size_bytes
        for index, storage in enumerate(saved.storages)
        if any(ticket.kind != "built" for ticket in ticket_uses(storage, recomputed, held.get(index)))
    )


def swapped_copies(saved: SavedBytes, plan: MemoryPlan) -> Iterator[SwappedCopy]:
    """Yield the copies to the host of one forward under ``plan``, storage by storage."""
    recomputed = RecomputedModules(plan, saved.modules)
    held = dict(held_results(saved, recomputed))
    for index, storage in enumerate(saved.storages):
        for ticket in ticket_uses(storage, recomputed, held.get(index)):
            if ticket.starts_copy and ticket.row is not None:
                yield SwappedCopy(ticket.row, ticket.copy_bytes)


def ticket_uses(
    storage: SavedStorage,
    recomputed: RecomputedModules,
    held: Use | None = None,
    calls: Sequence[OpCall] | None = None,
) -> Iterator[TicketUse]:
    """Yield what a plan does with one storage: the one statement of who leaves what, and who rebuilds it.

    Args:
        storage: the storage with its uses.
        recomputed: index of the plan.
        held: the use at which a recomputed module holds the storage (`held_results`), if one does.
        calls: for each use the call in which it happens, if known. Then a result counts as built only where
            the engine rebuilds it: what a recomputed module makes, for what is saved inside this module; what
            a recomputed function makes, once it has returned.
    """
    copied: tuple[int, int, int] | None = None
    copy = -1
    kept, returned = None, None
    born_in = None if storage.uses[0].kind in ("module", "function") else storage.uses[0].at[0]
    for number, use in enumerate(storage.uses):
        if use.kind == "returned":
            kept = use.producer if recomputed.is_root(*use.at[:2]) else kept  # a module's output stays
            returned = use.at if use.at == use.producer and use.at[2] is not None else returned
        holder = _holder(use, recomputed, held)
        if holder is None and use.kind != "saved":
            continue
        row = recomputed.row(use.producer)
        if use.kind == "saved" and use.at[0] in recomputed.whole_layers:
            # `torch.utils.checkpoint` builds all that the layer makes, and reads what it was given.
            if use.at[0] == born_in:
                yield TicketUse(number, use, row, "built", None, (use.at[0], "", None))
            else:
                yield TicketUse(number, use, row, "keep" if copied is None else "swap", copy=copy)
            continue
        source = None if use.producer == kept else recomputed.rebuilt_by(use.producer)
        if source is not None and (calls is None or _rebuilds(source, use, calls[number], returned)):
            yield TicketUse(number, use, row, "built", holder, source)
            continue
        moves = starts = False
        if row is not None and row.fate == "swap" and use.producer != kept:
            moves = copied is not None and _covers(copied, use)
            starts = not moves and use.size_bytes >= max(1, recomputed.plan.min_tensor_bytes)
        if starts:
            whole = 0, storage.size_bytes
            start, stop = whole if copied else moved_range(use, use.size_bytes, storage.size_bytes)
            copied, copy = (start, stop, use.version), copy + 1
        if copied is not None and (starts or moves):
            yield TicketUse(number, use, row, "swap", holder, None, copy, copied[1] - copied[0], starts)
        else:
            yield TicketUse(number, use, row, "keep", holder)


def _holder(use: Use, recomputed: RecomputedModules, held: Use | None) -> OpCall | None:
    """Return the call that has the tensor of a use as an input when it runs again, if there is one."""
    scope, path, _ = use.at
    if use is held:
        root = recomputed.root(scope, path)
        return None if scope is None or root is None else (scope, root, None)
    asks = use.kind not in ("saved", "returned") and recomputed.rebuilt_by(use.at) == use.at
    return use.at if asks else None


def _rebuilds(source: OpCall, use: Use, call: OpCall, returned: OpCall | None) -> bool:
    if source == returned:
        return True
    is_inside = (
        call == source if source[2] is not None else call[0] == source[0] and is_below(call[1], source[1])
    )
    return use.kind == "saved" and is_inside


def held_results(saved: SavedBytes, recomputed: RecomputedModules) -> Iterator[tuple[int, Use]]:
    """Yield the results that recomputed modules hold, so that kept and swapped ops inside do not run again.

    As number of the storage, and the use at which the op's call returns it.
    """
    uses = [use for storage in saved.storages for use in storage.uses]
    ends = {use.at[:2]: use.order for use in uses if use.kind == "returned" and use.at[2] is None}
    last: dict[tuple[Scope, str], int] = {}
    for use in uses:
        scope, path, _ = use.producer
        root = recomputed.root(scope, path) if use.kind == "saved" else None
        row = recomputed.row(use.producer)
        if scope is None or root is None or row is None or row.fate != "recompute" or use.at[0] != scope:
            continue
        if use.order < ends.get((scope, root), use.order + 1):  # else it was handed on, and is kept
            last[scope, root] = max(last.get((scope, root), 0), use.order)
    for index, storage in enumerate(saved.storages):
        for use in storage.uses:
            scope, path, _ = use.at
            if use.kind != "returned" or scope is None or not recomputed.is_held(use.at):
                continue
            needed = use.order < last.get((scope, recomputed.root(scope, path) or ""), 0)
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


def _covers(copied: tuple[int, int, int], use: Use) -> bool:
    start, stop, version = copied
    return version == use.version and start <= use.start_bytes and use.stop_bytes <= stop


class _View(Protocol):
    @property
    def range_bytes(self) -> tuple[int, int]: ...


def moved_range(view: _View, view_bytes: int, storage_bytes: int) -> tuple[int, int]:
    """Return the bytes to move for a first view of a storage: all of it, unless the view shows under half.

    A slice is worth moving alone only where it is small beside its storage: what else is saved of the
    storage then has a copy of its own.
    """
    if view_bytes == storage_bytes:
        return 0, storage_bytes
    start, stop = view.range_bytes
    start -= start % _ALIGNMENT_BYTES
    return (start, stop) if 2 * (stop - start) < storage_bytes else (0, storage_bytes)
