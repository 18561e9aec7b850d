"""Copies between device and host memory.

The engine uses one interface, which two classes implement:

* `StreamTransfer` (`transfer_streams`): any device of ``torch.accelerator``, two copy streams, events.
* `BlockingTransfer`: the CPU, where "device" and "host" are the same memory. Each copy is complete when the
  call returns, and its duration is a stall: compute did wait.

The contract of both: Between ``offload`` and ``wait`` on its copy the caller keeps the source alive and
unchanged; after ``wait`` it may drop the source (a stream orders the reuse of its memory behind the wait).
Between ``reload`` and ``wait`` the caller neither reads the new block nor drops it. A host block may be given
back to the pool as soon as it will not be reloaded again: the next ``offload`` into it is ordered after
copies that still read it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from .blocks import HostBuffer
from .link import Link
from .stats import PendingTime

Event = TypeVar("Event")


class Copy(Protocol):
    """A copy that has been asked for."""

    def wait(self) -> PendingTime | None:
        """Make compute wait for the copy; return what measures the wait, ``None`` if there was none."""


class Stamp(Protocol):
    """A place in compute's order of work, and so a time."""

    def ms_since(self, earlier: Any) -> float:
        """Return the time from ``earlier`` to here, in ms; compute must have passed both (synchronize)."""


class StepLog(Generic[Event]):
    """Events of one step in compute's order of work. There is a log only while a listener is registered.

    The planner's `OpEventLog` is another log: at each of its marks it also looks at the meter and at
    autograd's node numbers, and its clock may add up op by op where nothing is computed.

    Args:
        transfer: makes the time stamps.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._start = transfer.stamp()
        self._events: list[tuple[Event, Stamp]] = []

    def note(self, event: Event) -> None:
        """Record ``event`` at the present place in compute's order of work."""
        self._events.append((event, self._transfer.stamp()))

    def ms(self, stamp: Stamp) -> float:
        """Return the time in ms from the start of the log to ``stamp``; the device must have reached it."""
        return stamp.ms_since(self._start)

    def times(self) -> list[tuple[Event, float]]:
        """Return the events, each with its time in ms since the start; the device must have reached all."""
        return [(event, self.ms(stamp)) for event, stamp in self._events]


class Transfer(Protocol):
    """Moves bytes; one object per device."""

    overlaps: bool
    """Whether copies run beside compute, out of page-locked memory."""

    def stamp(self) -> Stamp:
        """Mark the present place in compute's order of work."""

    def synchronize(self) -> None:
        """Wait until compute has done all that it was given."""

    def link(self) -> Link | None:
        """Measure the link; ``None`` if copies do not overlap compute. Between steps only."""

    def free_bytes(self) -> int | None:
        """Return the bytes of device memory that this process can still use; ``None``: it is the host's."""

    def empty_cache(self) -> None:
        """Give cached device memory back to the device. Between steps only."""

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """Copy ``source`` (contiguous, on the device) to ``host``, after `HostBuffer.hold` on it."""

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """Copy ``host`` to a new contiguous tensor on the device, once ``after`` is complete.

        It has the dtype and shape that ``host`` holds, or it is the same bytes as uint8, shape (bytes,).
        """

    def host_reader_done(self, host: HostBuffer) -> None:
        """Note that the present content of ``host`` will not be reloaded again."""


@dataclass(frozen=True, slots=True)
class HostStamp:
    """A time on the host's clock, in seconds. Where that has been set back, no time has passed."""

    seconds: float

    @classmethod
    def now(cls) -> HostStamp:
        """Return the present time."""
        return cls(time.perf_counter())

    def ms_since(self, earlier: HostStamp) -> float:
        return max(0.0, (self.seconds - earlier.seconds) * 1e3)


@dataclass(frozen=True, slots=True)
class _Spent:
    """A wait whose length is known."""

    milliseconds: float

    def elapsed_ms(self) -> float:
        return self.milliseconds


@dataclass
class _Done:
    """A copy that was complete when its call returned: compute stood still meanwhile."""

    spent: _Spent | None

    def wait(self) -> PendingTime | None:
        spent, self.spent = self.spent, None
        return spent


class BlockingTransfer:
    """Copies that are complete when the call returns.

    Args:
        device: where reloaded tensors live.
    """

    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """Copy ``source`` (contiguous, on the device) to ``host``, after `HostBuffer.hold` on it."""
        start = HostStamp.now()
        for target, part in host.pairs(source):
            target.copy_(part)
        return _Done(_Spent(HostStamp.now().ms_since(start)))

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """Copy ``host`` to a new contiguous tensor on the device, once ``after`` is complete."""
        start = HostStamp.now()
        block = host.new_block(self._device)
        for part, target in host.pairs(block):
            target.copy_(part)
        return block, _Done(_Spent(HostStamp.now().ms_since(start)))

    def host_reader_done(self, host: HostBuffer) -> None:
        """Do nothing: no copy is under way."""

    def stamp(self) -> Stamp:
        """Mark the present place in compute's order of work."""
        return HostStamp.now()

    def synchronize(self) -> None:
        """Do nothing: compute is done when its call returns."""

    def link(self) -> Link | None:
        """Return ``None``: copies do not overlap compute."""
        return None

    def free_bytes(self) -> int | None:
        """Return ``None``: device and host are the same memory."""
        return None

    def empty_cache(self) -> None:
        """Do nothing: this transfer caches no memory."""
