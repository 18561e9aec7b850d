"""Finds where in a step without a plan the storages of a profile are made, read and freed.

A storage is made in the op event of its first use. Forward needs it until the op event of its last use; an
argument of a module until the module's end, because its caller holds it. Backward frees it after the last
place that reads it, or at the end of backward if that never visits the op event that saved it. What is not
saved (a result that only the next op reads) is part of an op event's base bytes.

The recorder subtracts the bytes that are on the device by this rule from the measured peaks, which gives the
base bytes of op events. The simulator adds them again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ...plan.saved_bytes import OpCall, SavedBytes


class PlacedEvent(Protocol):
    """The attributes of an `OpEvent` that are read here; rows of a step under recording have them too."""

    @property
    def call(self) -> OpCall:
        """Scope, op path and ordinal, as plan rows name them."""

    @property
    def last_order(self) -> int:
        """The order of the last use that belongs to it."""

    @property
    def backward_place(self) -> int:
        """Its number in the order of backward; -1 where backward does not visit it."""


@dataclass(frozen=True, slots=True)
class StorageLifetime:
    """When one storage of a profile is made, used and freed; op events are given by number.

    Args:
        size_bytes: size of the storage.
        birth: op event of its first use.
        made_in: op event that makes it; -1: none of those that use it.
        forward_end: last op event of forward that needs it.
        op_events: the op event of each of its uses, in their order.
        last_place: last place of backward that reads it without a policy; -1: nothing saves it, and it is
            part of the base bytes.
    """

    size_bytes: int
    birth: int
    made_in: int
    forward_end: int
    op_events: tuple[int, ...]
    last_place: int


class Places:
    """The op events in the order of backward; the number of one in this order is its place.

    Args:
        op_events: the op events in the order of forward.
    """

    def __init__(self, op_events: Sequence[PlacedEvent]) -> None:
        reached = [number for number, op_event in enumerate(op_events) if op_event.backward_place >= 0]
        self.order = sorted(reached, key=lambda number: op_events[number].backward_place)
        self.of_event = [-1] * len(op_events)
        for place, number in enumerate(self.order):
            self.of_event[number] = place
        self.last = len(self.order) - 1

    def of_reader(self, op_event: int) -> int:
        """Return the place that reads what ``op_event`` saved; the last one if backward never visits it."""
        place = self.of_event[op_event]
        return self.last if place < 0 else place


def lifetimes(
    saved: SavedBytes, op_events: Sequence[PlacedEvent], places: Places
) -> tuple[StorageLifetime, ...]:
    """Return the lifetime of each storage.

    Args:
        saved: the storages and their uses.
        op_events: the op events of the step, in the order of forward.
        places: the places of these op events.
    """
    last_orders = list(accumulate((op_event.last_order for op_event in op_events), max))
    module_ends: dict[tuple[object, str], int] = {}
    for number, op_event in enumerate(op_events):
        scope, path, _ = op_event.call
        module_ends[scope, path] = module_ends[scope, ""] = number
        while path := path.rpartition(".")[0]:
            module_ends[scope, path] = number
    found = []
    for storage in saved.storages:
        at = tuple(event_of(last_orders, use.order) for use in storage.uses)
        last, end = -1, max(at)
        for use, event_number in zip(storage.uses, at, strict=True):
            scope, path, _ = use.at
            if use.kind == "saved":
                last = max(last, places.of_reader(event_number))
            elif use.kind == "module" and scope is not None:
                end = max(end, module_ends.get((scope, path), 0))
        made_in = min(at) if storage.uses[0].kind in ("returned", "saved") else -1
        found.append(StorageLifetime(storage.size_bytes, min(at), made_in, end, at, last))
    return tuple(found)


def event_of(last_orders: Sequence[int], order: int) -> int:
    """Return the number of the op event to which a use belongs.

    Args:
        last_orders: `OpEvent.last_order` of each op event, or of the one before if it has no uses.
        order: order of the use.
    """
    return min(bisect_right(last_orders, order - 1), len(last_orders) - 1)


def saved_on_device(known: Sequence[StorageLifetime], places: Places) -> tuple[list[int], list[int]]:
    """Return the bytes of saved storages on the device while each op event runs: in forward, and in backward.

    Args:
        known: what `lifetimes` returned.
        places: places of the op events. If backward does not visit one, its second number is 0.
    """
    born, gone_after = [0] * len(places.of_event), [0] * (places.last + 2)
    for lifetime in known:
        if lifetime.last_place >= 0:
            born[lifetime.birth] += lifetime.size_bytes
            gone_after[lifetime.last_place] += lifetime.size_bytes
    there = list(accumulate(reversed(gone_after)))[::-1]  # the last item is 0; place -1 reads it
    return list(accumulate(born)), [there[place] for place in places.of_event]
