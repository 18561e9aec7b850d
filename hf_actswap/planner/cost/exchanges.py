"""Counts collectives: how many bytes a rank sends, how long that takes, and what of it no compute hides.

Time is that of a ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; the factors of
``nccl-tests``): ``(n - 1) / n`` of the larger side at the rate of the fabric, twice that for an all-reduce,
and a latency for each. All ranks are assumed to be in one machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..devices import Fabric

Phase = Literal["forward", "backward", "after backward"]
Kind = Literal["all_gather", "re-gather", "reduce_scatter", "all_reduce", "all_to_all"]
"""``re-gather``: backward gathers once more what forward has gathered."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective between the ranks of a group.

    Args:
        whole_bytes: bytes of its larger side.
        beside_ms: time of the compute that runs meanwhile.
    """

    phase: Phase
    kind: Kind
    whole_bytes: int
    beside_ms: float = 0.0

    def ring_bytes(self, ranks: int) -> float:
        """Return the bytes that one rank sends in a ring."""
        return (2 if self.kind == "all_reduce" else 1) * self.whole_bytes * (ranks - 1) / ranks

    def ms(self, ranks: int, fabric: Fabric) -> float:
        return self.ring_bytes(ranks) / fabric.bytes_per_ms + fabric.latency_ms


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The sums over all exchanges of a step.

    Args:
        sent_bytes: bytes that one rank sends.
        forward_ms: part of that time in forward; ``backward_ms``: in backward.
        added_ms: part of it that no compute hides.
    """

    sent_bytes: int
    collectives: int
    ms: float
    forward_ms: float
    backward_ms: float
    added_ms: float


def exchanged(exchanges: Iterable[Exchange], ranks: int, fabric: Fabric) -> Exchanged:
    """Add up the exchanges of a step of ``ranks`` ranks."""
    found = list(exchanges) if ranks > 1 else []
    times = [(item, item.ms(ranks, fabric)) for item in found]
    return Exchanged(
        sent_bytes=round(sum(item.ring_bytes(ranks) for item in found)),
        collectives=len(found),
        ms=sum(ms for _, ms in times),
        forward_ms=sum(ms for item, ms in times if item.phase == "forward"),
        backward_ms=sum(ms for item, ms in times if item.phase == "backward"),
        added_ms=sum(max(ms - item.beside_ms, 0.0) for item, ms in times),
    )
