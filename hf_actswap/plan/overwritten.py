"""Finds ops that cannot be recomputed, because their inputs are written in place after they were read.

An op that is run again needs its inputs as they were. If a later op, or the op itself, writes into them,
they are gone: a router divides its scores by their sum in place, so the sum alone cannot be run again. It can
if the scores are recomputed too, or if a module around both is. The model structure has recorded each write
(`record.StaleRead`), so this is known before the first step. A layer that is recomputed whole is run by
``torch.utils.checkpoint``, which has its own message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .actions import Adjustment, MemoryPlan, PlanRow, Scope
from .model_structure import LayerStructure, ModelStructure, is_below
from .op_facts import is_repeatable
from .recomputed_modules import RUN_AGAIN, RecomputedModules
from .record import LAYER_INPUT, OpKey, StaleRead

WHERE = "recompute_config.select_recompute"
OVERWRITTEN = "what it reads is written in place afterwards, so that it could not be run again from it"

Unit = tuple[Scope, str, int | None]
"""Layer, op path, and ordinal of a call that cannot be run again; ordinal ``None``: all calls of the op."""


def overwritten(plan: MemoryPlan, structure: ModelStructure) -> list[Unit]:
    """Return the ops that ``plan`` recomputes although they cannot be run again.

    Args:
        plan: a plan for the model.
        structure: structure of the model. If its functions are not known, no op is found.
    """
    found: list[Unit] = []
    if plan.num_layers != len(structure.layers):
        return found  # the plan is another model's, which is rejected elsewhere
    while more := _first_impossible(_kept(plan, found), structure):
        found += more  # these are kept now; an op that reads them may have relied on their recomputation
    return found


def keep_what_is_overwritten(plan: MemoryPlan, structure: ModelStructure) -> MemoryPlan:
    """Return ``plan`` with the ops that `overwritten` finds kept, and an adjustment for each op path.

    If it finds none, the same plan is returned.
    """
    units = overwritten(plan, structure)
    layers: dict[str, list[Scope]] = {}
    for layer, path, _ in units:
        if layer not in layers.setdefault(path, []):
            layers[path].append(layer)
    adjustments = tuple(
        Adjustment(WHERE, tuple(where), path, "recompute", "keep", OVERWRITTEN)
        for path, where in layers.items()
    )
    return replace(_kept(plan, units), adjustments=(*plan.adjustments, *adjustments)) if units else plan


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
        elif ordinal is not None and _is_impossible(plan, layer, inside, read, ordinal):
            functions.setdefault(path, set()).add(ordinal)
    for path, ordinals in functions.items():
        calls = {call.key[1] for call in layer.calls if call.key[0] == path}
        row = plan.row(layer.index, path)
        if calls == ordinals and row is not None and row.op_path == path:
            yield path, None
        else:
            for ordinal in sorted(ordinals):
                yield path, ordinal


def _is_impossible(
    plan: MemoryPlan, layer: LayerStructure, inside: RecomputedModules, read: StaleRead, ordinal: int
) -> bool:
    row = plan.row(layer.index, read.reader[0], ordinal)
    if row is None or row.fate not in RUN_AGAIN:
        return False
    return read.rewritten or not _is_rebuilt(plan, layer, inside, read.producer)


def _is_rebuilt(plan: MemoryPlan, layer: LayerStructure, inside: RecomputedModules, producer: OpKey) -> bool:
    """Whether a function is run again by itself, so that backward has its first output anew."""
    path, ordinal = producer
    row = None if producer == LAYER_INPUT else plan.row(layer.index, path, ordinal)
    if row is None or row.fate not in RUN_AGAIN or inside.root(layer.index, path) is not None:
        return False
    return is_repeatable(path)
