"""Profiles of layers that are compiled one by one, by hand: 7B shapes in bfloat16, in times of one H200."""

from __future__ import annotations

from hf_actswap.engine import Link
from hf_actswap.plan import OpCall, SavedBytes, SavedStorage, Use
from hf_actswap.plan.saved_bytes import UseKind
from hf_actswap.planner import FrontierPoint, OpEvent, Profile

GIB = 2**30
LINK = Link(54.9e6, 55.1e6, 49.8e6, 49.8e6, 0.02)

FEED_FORWARD = FrontierPoint(1.0, ("mlp", "norm.mul"), (), 0.332, 0.267, 0.30)
"""At 8,192 tokens, guessed."""


def compiled_profile(
    layers: int = 16, tokens: int = 8192, step_ms: float = 329.0, base_gib: float = 0.84
) -> Profile:
    """Return the profile of decoder layers alone: each is one op event, and saves ten storages at its end.

    Args:
        layers: how many.
        tokens: of the batch.
        step_ms: forward and backward, of which forward is a third.
        base_gib: on the device while any layer runs, beside what is saved.
    """
    unit, wide = tokens * 4096 * 2, tokens * 11008 * 2
    sizes = (*(unit,) * 7, *(wide,) * 3)
    base, forward_ms = int(base_gib * GIB), step_ms / 3 / layers
    storages: list[SavedStorage] = []
    op_events: list[OpEvent] = []
    order, hidden = 0, ("embedding", "output", None)

    def use(kind: UseKind, at: OpCall, producer: OpCall, size_bytes: int) -> Use:
        nonlocal order
        order += 1
        return Use(kind, at, producer, 0, size_bytes, size_bytes, 0, order)

    for layer in range(layers):
        call, first = (layer, "", None), order + 1
        incoming = (use("module", call, hidden, unit), use("saved", call, hidden, unit))
        storages.append(SavedStorage(unit, incoming))
        storages += [SavedStorage(size, (use("saved", call, call, size),)) for size in sizes]
        place = layers - 1 - layer
        op_events.append(
            OpEvent(call, first, order, 80 * layer, 80, forward_ms, 2 * forward_ms, base, base, place)
        )
        hidden = (layer, "output", None)
    return Profile(
        saved=SavedBytes(tuple(storages), {layer: frozenset({""}) for layer in range(layers)}),
        op_events=tuple(op_events),
        num_layers=layers,
        family="made by hand",
        compiled_layers=frozenset(range(layers)),
        link=LINK,
        device="none",
        device_bytes=140 * GIB,
        outside_ms=0.0,
        outside_base_bytes=0,
        optimizer_state_bytes=0,
        reserved_bytes=0,
        batch_shape=(1, tokens),
        source="measured",
    )
