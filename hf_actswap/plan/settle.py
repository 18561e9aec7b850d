"""Settles a plan: changes it by what the first forward shows of real shapes.

Ops that cannot be run again are kept, and ops whose recomputation would not reduce the bytes
saved. Results that are held so that their ops need not run again are named. Each is an adjustment.

An op that is run again holds its inputs. If autograd saves them anyway (``silu``, a product), they are
free; if not (the fp32 product before a cast, the bf16 tensor before its fp32 copy), they count. So ops are
judged together: a norm of eight functions holds its bf16 input and drops everything else, while its last
cast alone would hold four bytes in place of two. One layer is judged at a time, by the exact bytes of one
recorded forward (`saved_bytes`). Each storage counts once and whole, on the device or on the host.

An op, or an op and everything that is rebuilt from it, goes back to "keep" if this does not increase the
bytes saved. The order is fixed, so all ranks that saw the same shapes decide the same.

**Overwritten inputs.** An op that is run again needs its inputs as they were. If a later op, or the op
itself, writes into them, they are gone: a router divides its scores by their sum in place, so the sum
alone cannot be run again. It can if the scores are recomputed too, or if a module around both is. The
model structure has recorded each write (`record.StaleRead`), so this is known before the first step. A
layer that is recomputed whole is run by ``torch.utils.checkpoint``, which has its own message.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from .actions import Adjustment, MemoryPlan, OpCall, PlanRow, Scope, layer_order
from .model_structure import LayerStructure, ModelStructure, is_below
from .op_facts import is_communication
from .record import LAYER_INPUT, OpKey
from .saved_bytes import RUN_AGAIN, RecomputedModules, SavedBytes, held_results, ticket_uses

WHERE = "recompute_config.select_recompute"
OVERWRITTEN = "what it reads is written in place afterwards, so that it could not be run again from it"

Unit = tuple[Scope, str, int | None]
"""Layer, op path, and ordinal of a call that cannot be run again; ordinal ``None``: all calls of the op."""


def overwritten(plan: MemoryPlan, structure: ModelStructure) -> list[Unit]:
    """Return the ops that ``plan`` recomputes although they cannot be run again."""
    found: list[Unit] = []
    if plan.num_layers != len(structure.layers):
        return found  # the plan is another model's, which is rejected elsewhere
    while more := _first_impossible(_kept(plan, found), structure):
        found += more  # these are kept now; an op that reads them may have relied on their recomputation
    return found


def keep_what_is_overwritten(plan: MemoryPlan, structure: ModelStructure) -> MemoryPlan:
    """Return ``plan`` with the ops that `overwritten` finds kept; the same plan if it finds none."""
    units = overwritten(plan, structure)
    layers: dict[str, dict[Scope, None]] = {}
    for layer, path, _ in units:
        layers.setdefault(path, {})[layer] = None
    adjustments = tuple(
        Adjustment(WHERE, tuple(where), path, "recompute", "keep", OVERWRITTEN)
        for path, where in layers.items()
    )
    return replace(_kept(plan, units), adjustments=(*plan.adjustments, *adjustments)) if units else plan


def keep_what_differs(plan: MemoryPlan, calls: Iterable[OpCall]) -> MemoryPlan:
    """Return ``plan`` with the ops kept that gave other numbers when they ran again."""
    calls = list(calls)
    units = [(scope, path, ordinal) for scope, path, ordinal in calls if scope is not None]
    adjustments = tuple(
        Adjustment(_VERIFY, scopes, path, "recompute", "keep", DIFFERED)
        for path, scopes in scopes_by_path(calls).items()
    )
    return replace(_kept(plan, units), adjustments=(*plan.adjustments, *adjustments))


def scopes_by_path(calls: Iterable[OpCall]) -> dict[str, tuple[Scope, ...]]:
    """Return for each op path of ``calls`` the scopes in which it is called, each once, in order."""
    found: dict[str, set[Scope]] = {}
    for scope, path, _ in calls:
        if scope is not None:
            found.setdefault(path, set()).add(scope)
    return {path: tuple(sorted(scopes, key=layer_order)) for path, scopes in found.items()}


_VERIFY = "memory.verify"
DIFFERED = (
    "run again in backward, it gave other numbers than in forward: what it reads besides its inputs changed, "
    "or its results depend on timing. The last step's gradients are those of the other numbers"
)


def _kept(plan: MemoryPlan, units: Iterable[Unit]) -> MemoryPlan:
    rows = {(row.scope, row.op_path, row.ordinal): row for row in plan.rows}
    for layer, path, ordinal in units:
        rows[layer, path, ordinal] = PlanRow(layer, path, "keep", ordinal)
    return replace(plan, rows=tuple(rows.values()))


def _first_impossible(plan: MemoryPlan, structure: ModelStructure) -> list[Unit]:
    inside = RecomputedModules(plan, structure.modules)
    found: dict[Unit, None] = {}
    for layer in structure.all_layers:
        if layer.compiled or structure.compiled:
            continue  # the compiler knows what is written
        for path, ordinal in _of_layer(plan, layer, inside):
            found[layer.index, path, ordinal] = None
    return list(found)


def _of_layer(
    plan: MemoryPlan, layer: LayerStructure, inside: RecomputedModules
) -> Iterator[tuple[str, int | None]]:
    functions: dict[str, set[int]] = {}
    for read in layer.stale_reads:
        path, ordinal = read.reader
        root = inside.root(layer.index, path)
        if root is not None:
            if root and (read.producer == LAYER_INPUT or not is_below(read.producer[0], root)):
                yield root, None
        elif ordinal is not None:
            row = plan.row(layer.index, path, ordinal)
            runs_again = row is not None and row.fate in RUN_AGAIN
            if runs_again and (read.rewritten or not _is_rebuilt(layer, inside, read.producer)):
                functions.setdefault(path, set()).add(ordinal)
    for path, ordinals in functions.items():
        calls = {call.key[1] for call in layer.calls if call.key[0] == path}
        row = plan.row(layer.index, path)
        if calls == ordinals and row is not None and row.op_path == path:
            yield path, None
        else:
            for ordinal in sorted(ordinals):
                yield path, ordinal


def _is_rebuilt(layer: LayerStructure, inside: RecomputedModules, producer: OpKey) -> bool:
    """Whether a function is run again by itself, so that backward has its first output anew."""
    if producer == LAYER_INPUT or inside.root(layer.index, producer[0]) is not None:
        return False
    return inside.rebuilt_by((layer.index, *producer)) is not None


_EXCLUDE = "recompute_config.select_recompute_exclude"
_HELD = (
    "its result, {:,} bytes in a layer, is held although autograd would not save it, so that the op is not "
    "run again with the module around it"
)
_REASON = (
    "run again it would hold {:,} bytes in a layer in place of {:,}, and an op is recomputed only if the "
    "bytes saved fall"
)


def settled(plan: MemoryPlan, structure: ModelStructure, saved: SavedBytes | None) -> MemoryPlan:
    """Return ``plan`` as it is carried out, with an adjustment for each rule that changed it.

    The rules are applied until none changes anything: an op may have relied on the recomputation of another
    that is now kept, and ops inside a module that is now kept are judged one by one. ``saved``: what the
    forward that starts will save; ``None``: unknown, and nothing is judged by it.
    """
    found = keep_what_is_overwritten(plan, structure)
    if saved is None:
        return found
    found = keep_what_costs(found, saved)
    return _say_what_is_held(plan, saved) if found is plan else settled(found, structure, saved)


def keep_what_costs(plan: MemoryPlan, saved: SavedBytes) -> MemoryPlan:
    """Return ``plan`` without the selective recomputation that holds at least as many bytes as it drops.

    It is the same plan, if all recomputation reduces the bytes saved; else the adjustments say how many bytes
    each op path would hold in a layer, in place of how many.
    """
    recomputed = RecomputedModules(plan, saved.modules)
    if not recomputed.selective_layers:
        return plan
    rows = {(row.scope, row.op_path, row.ordinal): row for row in plan.rows}
    by_reason: dict[tuple[str, int, int], dict[Scope, None]] = {}
    decided: dict[Hashable, tuple[list[tuple[OpCall, int, int]], set[OpCall]]] = {}
    for layer, graph in sorted(_graphs(saved, recomputed).items(), key=lambda item: layer_order(item[0])):
        # Layers that are alike are decided once: only paths and ordinals are read of what was decided.
        if (form := graph.form(layer)) not in decided:
            decided[form] = graph.decided()
        costly, still_run = decided[form]
        for (_, path, ordinal), held, dropped in costly:
            row, own = rows.get((layer, path, None)), (layer, path, ordinal) in rows
            kept = row is not None and row.fate == "keep"
            if row is not None and not (own or kept) and all(op[1] != path for op in still_run):
                ordinal = None  # every call of it
            if own or not kept:
                rows[layer, path, ordinal] = PlanRow(layer, path, "keep", ordinal)
            by_reason.setdefault((path, held, dropped), {})[layer] = None
    if not by_reason:
        return plan
    adjustments = tuple(
        Adjustment(WHERE, tuple(where), path, "recompute", "keep", _REASON.format(held, dropped))
        for (path, held, dropped), where in by_reason.items()
    )
    return replace(plan, rows=tuple(rows.values()), adjustments=(*plan.adjustments, *adjustments))


def _say_what_is_held(plan: MemoryPlan, saved: SavedBytes) -> MemoryPlan:
    """Return ``plan`` with an adjustment for each op whose result is held for a recomputed module around it.

    Only results that autograd would not save anyway have one: they cost bytes. Results of communications have
    none: the keys for communication name them.
    """
    found: dict[tuple[str, str, int], dict[Scope, None]] = {}
    recomputed = RecomputedModules(plan, saved.modules)
    for index, use in held_results(saved, recomputed):
        storage, (scope, path, _), row = saved.storages[index], use.at, recomputed.row(use.at)
        if row is None or is_communication(path) or any(other.kind == "saved" for other in storage.uses):
            continue
        layers = found.setdefault((path, row.fate, storage.size_bytes), {})
        if scope is not None:
            layers[scope] = None
    adjustments = tuple(
        Adjustment(_EXCLUDE, tuple(layers), path, fate, fate, _HELD.format(size_bytes))
        for (path, fate, size_bytes), layers in found.items()
    )
    new = [adjustment for adjustment in adjustments if adjustment not in plan.adjustments]
    return replace(plan, adjustments=(*plan.adjustments, *new)) if new else plan


@dataclass
class _Graph:
    """The storages that one layer saves, and the units (calls that run again as one) that can rebuild them.

    Attributes:
        sizes: bytes of each storage, by its number.
        saved: for each saved storage (storage, the unit that can rebuild it; ``None``: it is held).
        inputs: for each unit, its inputs in the same form.
        made: the units, in the order in which their results are first used.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    saved: set[tuple[int, OpCall | None]] = field(default_factory=set)
    inputs: dict[OpCall, dict[tuple[int, OpCall | None], None]] = field(default_factory=dict)
    made: dict[OpCall, None] = field(default_factory=dict)

    def form(self, scope: Scope) -> Hashable:
        """Return what is equal for the graphs of two layers, ``scope`` being this one's, that are alike."""
        number = {storage: at for at, storage in enumerate(self.sizes)}

        def unit(call: OpCall | None) -> object:
            return call[1:] if call is not None and call[0] == scope else call

        def uses(of: Iterable[tuple[int, OpCall | None]]) -> frozenset[object]:
            return frozenset((number[storage], unit(source)) for storage, source in of)

        inputs = tuple((unit(call), uses(of)) for call, of in self.inputs.items())
        return tuple(self.sizes.values()), uses(self.saved), inputs, tuple(map(unit, self.made))

    def held(self, kept: frozenset[OpCall]) -> tuple[set[int], set[OpCall]]:
        """Return the storages held if the units in ``kept`` are not run again, and the units that are."""
        held: set[int] = set()
        needed: set[OpCall] = set()
        uses = list(self.saved)
        while uses:
            storage, unit = uses.pop()
            if unit is None or unit in kept:
                held.add(storage)
            elif unit not in needed:
                needed.add(unit)
                uses += [use for use in self.inputs.get(unit, ()) if use[1] != unit]
        return held, needed

    def decided(self) -> tuple[list[tuple[OpCall, int, int]], set[OpCall]]:
        """Return the units to keep, since running them again would not reduce the bytes saved, and those to
        run again.

        The former with the bytes that would be held only in order to run it again, and those that would be
        dropped for it, both of all units that are decided together.
        """
        kept: frozenset[OpCall] = frozenset()
        costly: list[tuple[OpCall, int, int]] = []
        held, needed = self.held(kept)
        untried = held != {storage for storage, unit in self.saved if unit is None}  # else none costs bytes
        while untried:
            untried = False
            for group in self._candidates(needed):
                other, still_needed = self.held(kept | group)
                if self._bytes(other) <= self._bytes(held):
                    more, less = self._bytes(held - other), self._bytes(other - held)
                    costly += [(op, more, less) for op in self.made if op in group]
                    kept, held, needed, untried = kept | group, other, still_needed, True
                    break
        return costly, needed

    def _candidates(self, needed: set[OpCall]) -> Iterator[set[OpCall]]:
        """Yield each unit that is run again (the last first), alone and with all that is rebuilt from it."""
        for unit in reversed(self.made):
            if unit in needed and unit[1]:
                yield {unit}
                yield self._rebuilt_from(unit) & needed

    def _bytes(self, storages: set[int]) -> int:
        return sum(self.sizes[storage] for storage in storages)

    def _rebuilt_from(self, unit: OpCall) -> set[OpCall]:
        """Return ``unit`` and the units that depend on its results, directly or not, except whole layers."""
        found, waiting = {unit}, [unit]
        while waiting:
            new = self._readers.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    @cached_property
    def _readers(self) -> Mapping[OpCall, set[OpCall]]:
        """For each unit the units, except whole layers, that have a result of it among their inputs."""
        readers: dict[OpCall, set[OpCall]] = {}
        for reader, uses in self.inputs.items():
            for _, source in uses:
                if source is not None and reader[1]:
                    readers.setdefault(source, set()).add(reader)
        return readers


def _graphs(saved: SavedBytes, recomputed: RecomputedModules) -> dict[Scope, _Graph]:
    """Return one graph for each layer in which ops are recomputed one by one."""
    graphs = {scope: _Graph() for scope in recomputed.selective_layers}
    held = dict(held_results(saved, recomputed))

    def is_recomputed(call: OpCall) -> bool:
        row = recomputed.row(call)  # communications that are done again do not count
        return row is not None and row.fate == "recompute"

    for index, storage in enumerate(saved.storages):
        for ticket in ticket_uses(storage, recomputed, held.get(index)):
            scope, holder = ticket.use.at[0], ticket.holder
            graph = graphs.get(scope) if scope is not None else None
            if graph is None or (holder is not None and holder[2] is not None and not is_recomputed(holder)):
                continue
            source = ticket.source if is_recomputed(ticket.use.producer) else None
            source = None if source is None or source[0] != scope else source
            graph.sizes[index] = storage.size_bytes
            if holder is None:
                graph.saved.add((index, source))
            else:
                graph.inputs.setdefault(holder, {})[index, source] = None
            if source is not None:
                graph.made.setdefault(source)
    return graphs
