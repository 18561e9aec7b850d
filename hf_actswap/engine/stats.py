"""Statistics of an applied plan: bytes copied, waits for copies, recomputations, host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..config.sizes import gib
from .host_pool import HostPool

_PENDING_WAITS = 1024
"""Most waits that are pending before they are added up."""

_OF_COPIES_IN = ("prefetched_bytes", "prefetches", "late_prefetches", "stalls", "stall_ms")
_TOTALS = (*_OF_COPIES_IN, "forwards", "offloaded_bytes", "offloads", "recomputes")
_OF_POOL = {
    "host_bytes": "used_bytes",
    "host_peak_bytes": "peak_bytes",
    "host_pool_bytes": "held_bytes",
    "pinning_ms": "allocating_ms",
}
"""The statistics of host memory, by the attribute of `HostPool`."""


class PendingTime(Protocol):
    """A measured wait whose length is not known yet."""

    def elapsed_ms(self) -> float | None:
        """Return the length in ms; ``None`` while the device has not reached its end."""


@dataclass(frozen=True)
class SwapStats:
    """Totals since the plan was applied; subtract two to get a step.

    Args:
        forwards: training forwards of the model (micro-batches).
        offloaded_bytes: copied device to host.
        prefetched_bytes: copied host to device.
        offloads: copies device to host, one per storage.
        prefetches: copies host to device.
        late_prefetches: of these, the ones that started only when the tensor was needed.
        stalls: times that compute had to wait for a copy.
        stall_ms: how long it waited.
        recomputes: calls of layers, modules and functions that backward ran again; none of compiled layers.
        rejected: reason -> bytes of tensors that the plan wanted to swap and that stayed.
        host_bytes: host memory in use now (not a total).
        host_peak_bytes: most host memory in use at once (not a total).
        host_pool_bytes: host memory held, in use or not (not a total).
        pinning_ms: how long allocating (on an accelerator: page-locking) that memory took, beside compute or
            not (not a total: plans that share host memory share the number).
        live_swaps: swapped storages whose graph still exists (not a total).
    """

    forwards: int = 0
    offloaded_bytes: int = 0
    prefetched_bytes: int = 0
    offloads: int = 0
    prefetches: int = 0
    late_prefetches: int = 0
    stalls: int = 0
    stall_ms: float = 0.0
    recomputes: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int = 0
    host_peak_bytes: int = 0
    host_pool_bytes: int = 0
    pinning_ms: float = 0.0
    live_swaps: int = 0

    def __sub__(self, earlier: SwapStats) -> SwapStats:
        """Return what happened since ``earlier``; the values that are not totals are this one's."""
        totals = {name: getattr(self, name) - getattr(earlier, name) for name in _TOTALS}
        rejected = {
            reason: count - earlier.rejected.get(reason, 0) for reason, count in self.rejected.items()
        }
        changed = {reason: count for reason, count in rejected.items() if count}
        return replace(self, **totals, rejected=changed)

    def __add__(self, later: SwapStats) -> SwapStats:
        """Return the totals of two plans, one after the other; values that are not totals are ``later``'s."""
        totals = {name: getattr(self, name) + getattr(later, name) for name in _TOTALS}
        rejected = Counter(self.rejected)
        rejected.update(later.rejected)
        return replace(later, **totals, rejected=dict(rejected))

    def with_weights(self, moved: SwapStats) -> SwapStats:
        """Return the numbers with those of frozen weights copied in the same time added."""
        names = (*_OF_COPIES_IN, *_OF_POOL)
        return replace(self, **{name: getattr(self, name) + getattr(moved, name) for name in names})

    def as_log(self, prefix: str = "actswap_") -> dict[str, float]:
        """Return all numbers for a training log, by name."""
        numbers = {
            "offloaded_gib": gib(self.offloaded_bytes),
            "prefetched_gib": gib(self.prefetched_bytes),
            "rejected_gib": gib(sum(self.rejected.values())),
            "host_peak_gib": gib(self.host_peak_bytes),
            "stalls": self.stalls,
            "stall_ms": round(self.stall_ms, 3),
            "recomputes": self.recomputes,
        }
        return {f"{prefix}{name}": value for name, value in numbers.items()}


class Counters:
    """What the engine counts, under the names of `SwapStats`."""

    forwards = offloaded_bytes = prefetched_bytes = offloads = prefetches = late_prefetches = 0
    stalls = recomputes = live_swaps = 0
    stall_ms = 0.0

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
        self._pending: list[PendingTime] = []
        self._settle_at = _PENDING_WAITS
        self.listener: Callable[[PendingTime], None] | None = None
        """Called with each wait while a step is observed."""

    def stalled(self, waited: PendingTime | None) -> None:
        """Count a wait of compute for a copy, whose length is known later; ``None``: compute did not wait."""
        if waited is None:
            return
        self._pending.append(waited)
        if len(self._pending) >= self._settle_at:  # a snapshot may never be taken
            self._settle()
            self._settle_at = len(self._pending) + _PENDING_WAITS
        if self.listener is not None:
            self.listener(waited)

    def snapshot(self, pool: HostPool | None) -> SwapStats:
        """Return the totals and the use of ``pool``, without waits whose end the device has not reached."""
        self._settle()
        numbers = {name: getattr(self, name) for name in (*_TOTALS, "live_swaps")}
        if pool is not None:
            numbers.update((name, getattr(pool, attribute)) for name, attribute in _OF_POOL.items())
        return SwapStats(**numbers, rejected=dict(self.rejected))

    def _settle(self) -> None:
        still: list[PendingTime] = []
        for waited in self._pending:
            elapsed = waited.elapsed_ms()
            if elapsed is None:
                still.append(waited)
            elif elapsed > 0:
                self.stalls += 1
                self.stall_ms += elapsed
        self._pending = still
