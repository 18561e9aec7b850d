"""From when to when the storages that autograd saves are on the device, in a step without a policy.

A storage is there from the span that first uses it: forward keeps it, as autograd does. Backward lets go of
it behind the span whose nodes are the last to read it, that is the first that saved it; where backward never
comes by that span, it stays. What nobody saves (a result that only the next op reads) is none of a span's
saved storages but part of its base bytes.

The base bytes of spans are the measured peaks less the storages that are there by *this* rule, so that
whoever adds them again by it gets what was measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...plan.saved_bytes import SavedBytes
from ..profile import Profile


@dataclass(frozen=True, slots=True)
class Life:
    """Of one storage that autograd saves.

    Args:
        storage: its number in `Profile.saved`.
        size_bytes: of all of it.
        born_in: number of the span that first uses it; it is there while that runs.
        read_last_by: number of the span whose backward reads it last; it is there while that runs.
    """

    storage: int
    size_bytes: int
    born_in: int
    read_last_by: int


def lives(saved: SavedBytes, last_orders: Sequence[int]) -> tuple[Life, ...]:
    """Return the lives of the storages that autograd saves.

    Args:
        saved: storages and their uses.
        last_orders: `Span.last_order` of each span, or where it has no uses, that of the span before.
    """
    found = []
    for number, storage in enumerate(saved.storages):
        read = next((use.order for use in storage.uses if use.kind == "saved"), None)
        if read is not None:
            born_in = span_of(last_orders, storage.uses[0].order)
            found.append(Life(number, storage.size_bytes, born_in, span_of(last_orders, read)))
    return tuple(found)


def span_of(last_orders: Sequence[int], order: int) -> int:
    """Return the number of the span to which a use belongs."""
    return min(bisect_right(last_orders, order - 1), len(last_orders) - 1)


def saved_on_device(known: Sequence[Life], backward_places: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the bytes of saved storages on the device while each span runs: in forward, and in backward.

    Args:
        known: from `lives`.
        backward_places: `Span.backward_place` of each span. Where it is -1, the second number is that of the
            end of backward.
    """
    born = [0] * len(backward_places)
    turns = max(backward_places, default=-1) + 1
    gone_after = [0] * (turns + 1)
    for life in known:
        born[life.born_in] += life.size_bytes
        place = backward_places[life.read_last_by]
        gone_after[place if place >= 0 else turns] += life.size_bytes
    there = list(accumulate(reversed(gone_after)))[::-1]
    return list(accumulate(born)), [there[place if place >= 0 else turns] for place in backward_places]


def measured_peak_bytes(profile: Profile) -> int:
    """Return the most device memory in use in the recorded step, in which everything is kept."""
    last_orders = list(accumulate((span.last_order for span in profile.spans), max))
    known = lives(profile.saved, last_orders)
    forward, backward = saved_on_device(known, [span.backward_place for span in profile.spans])
    peaks = [profile.outside_base_bytes]
    for span, ahead, back in zip(profile.spans, forward, backward, strict=True):
        peaks.append(span.forward_base_bytes + ahead)
        if span.backward_place >= 0:
            peaks.append(span.backward_base_bytes + back)
    return max(peaks)
