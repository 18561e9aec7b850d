"""Where in a step without a plan the storages of a profile are made, read and freed.

A storage is made in the span of its first use. Forward has done with it after the span of its last use; an
argument of a module, at the module's end, for its caller holds it. Backward frees it after the last place
that reads it; where backward never comes by the span that saved it, at its end. What nobody saves (a result
that only the next op reads) is part of a span's base bytes.

The recorder takes what is on the device by this rule off the measured peaks, which gives the base bytes of
spans, and the simulator adds it to them again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ...plan.saved_bytes import OpCall, SavedBytes


class PlacedSpan(Protocol):
    """What is read here of a `Span`, also of one that is still being recorded."""

    @property
    def call(self) -> OpCall:
        """Scope, op path and ordinal, as plan rows name them."""

    @property
    def last_order(self) -> int:
        """The number of the last use that belongs to it."""

    @property
    def backward_place(self) -> int:
        """Its turn in backward; -1 where backward does not come by."""


@dataclass(frozen=True, slots=True)
class StorageLife:
    """One storage of a profile.

    Args:
        size_bytes: of it.
        birth: span of its first use.
        made_in: span that makes it; -1: none of those that use it.
        forward_end: last span of forward that has it in use.
        spans: of each of its uses, in their order.
        last_place: last place of backward that reads it without a policy; -1: nothing saves it, and it is
            part of the base bytes.
    """

    size_bytes: int
    birth: int
    made_in: int
    forward_end: int
    spans: tuple[int, ...]
    last_place: int


class Places:
    """The spans in the order of backward.

    Args:
        spans: in the order of forward.
    """

    def __init__(self, spans: Sequence[PlacedSpan]) -> None:
        reached = [number for number, span in enumerate(spans) if span.backward_place >= 0]
        self.order = sorted(reached, key=lambda number: spans[number].backward_place)
        self.of_span = [-1] * len(spans)
        for place, number in enumerate(self.order):
            self.of_span[number] = place
        self.last = len(self.order) - 1

    def of_reader(self, span: int) -> int:
        """When backward reads what ``span`` saved; what it does not come by lasts until its end."""
        place = self.of_span[span]
        return self.last if place < 0 else place


def lives(saved: SavedBytes, spans: Sequence[PlacedSpan], places: Places) -> tuple[StorageLife, ...]:
    """Return the life of each storage.

    Args:
        saved: storages and their uses.
        spans: of the step, in the order of forward.
        places: of these spans.
    """
    last_orders = list(accumulate((span.last_order for span in spans), max))
    module_ends: dict[tuple[object, str], int] = {}
    for number, span in enumerate(spans):
        scope, path, _ = span.call
        module_ends[scope, path] = module_ends[scope, ""] = number
        while path := path.rpartition(".")[0]:
            module_ends[scope, path] = number
    found = []
    for storage in saved.storages:
        at = tuple(span_of(last_orders, use.order) for use in storage.uses)
        last, end = -1, max(at)
        for use, span_number in zip(storage.uses, at, strict=True):
            scope, path, _ = use.at
            if use.kind == "saved":
                last = max(last, places.of_reader(span_number))
            elif use.kind == "module" and scope is not None:
                end = max(end, module_ends.get((scope, path), 0))
        made_in = min(at) if storage.uses[0].kind in ("returned", "saved") else -1
        found.append(StorageLife(storage.size_bytes, min(at), made_in, end, at, last))
    return tuple(found)


def span_of(last_orders: Sequence[int], order: int) -> int:
    """Return the number of the span to which a use belongs.

    Args:
        last_orders: `Span.last_order` of each span, or where it has no uses, that of the span before.
        order: of the use.
    """
    return min(bisect_right(last_orders, order - 1), len(last_orders) - 1)


def saved_on_device(known: Sequence[StorageLife], places: Places) -> tuple[list[int], list[int]]:
    """Return the bytes of saved storages on the device while each span runs: in forward, and in backward.

    Args:
        known: from `lives`.
        places: of the spans. Where backward does not come by, the second number is 0.
    """
    born, gone_after = [0] * len(places.of_span), [0] * (places.last + 2)
    for life in known:
        if life.last_place >= 0:
            born[life.birth] += life.size_bytes
            gone_after[life.last_place] += life.size_bytes
    there = list(accumulate(reversed(gone_after)))[::-1]  # the last one is 0, and -1 means it
    return list(accumulate(born)), [there[place] for place in places.of_span]
