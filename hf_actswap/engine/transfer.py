"""Copies between device and host memory.

`Transfer` is the interface. `StreamTransfer` is for any device of ``torch.accelerator``; `BlockingTransfer`
for the CPU, where device and host are the same memory, each copy is complete when its call returns, and its
duration is a stall.

The contract of both: between ``offload`` and ``wait`` on its copy the caller keeps the source alive and
unchanged; after ``wait`` it may drop the source (a stream orders the reuse of its memory behind the wait).
Between ``reload`` and ``wait`` the caller neither reads the new block nor drops it. A host block may be given
back to the pool as soon as it will not be reloaded again: the next ``offload`` into it is ordered after
copies that still read it.

**Streams and lifetimes**, for one device:

* **Out.** The copy stream waits for an event recorded on the compute stream at ``offload``: everything
  that wrote the tensor was enqueued before. That is when autograd first saves the tensor, the earliest time
  at which its value is known; later forward uses only read it beside the copy (a write raises, `tickets`).
  The caller holds the source until ``wait``, which makes the compute stream wait for the copy's event; only
  then is the reference dropped, so the allocator hands the block to work that is ordered behind the copy.
  No ``record_stream`` (it defers reuse to a polled event and makes the peak depend on time), no
  ``resize_(0)`` (it breaks others that hold the storage).
* **In.** The new block is allocated on the compute stream, whose pool holds what backward just freed. Its
  previous owner's kernels may still run there, so the copy-in stream waits for an event recorded on the
  compute stream at allocation; and for the event of the copy out, so that it never reads an unfinished host
  block.
* **Host blocks.** The out stream writes them, the in stream reads them. A block given back while the in
  stream still reads it carries the event of that read (``last_use``); the next offload into it waits, and
  the pool synchronizes with it before it cuts the block up for others. A block whose graph died before any
  reload carries none: its copy out was waited for when the group died, and the next offload into the same
  memory, whatever its size, is enqueued on the same stream behind it.
* **A reload for which nothing waited** (its graph was freed): its block would go back to the compute pool
  while the in stream still writes it, so the code that drops it calls ``wait`` first.
* **Which streams wait.** Memory goes back to the pool of the stream that was current when it was allocated.
  That need not be the one that is current when a copy is waited for: a graph in a reference cycle is freed
  by the garbage collector, which runs at any allocation, also while a copy stream is current; and parts of a
  model may run on a stream of their own. So every stream that ever requested a copy waits (mostly there is
  one), and the current one too. A block may have several readers, each on a stream of its own, so each calls
  ``wait``. A stream that it was not prefetched on is recorded on it (``record_stream``): nothing else orders
  its reuse behind the read.
* **Pieces.** A block is copied piece by piece (256 MiB, 5 ms of PCIe): the copy engine serves other streams
  in between, so a batch on its way to the device does not wait behind a gigabyte. Shorter ones gain little,
  and each costs the host a copy.

The compute stream is read at each call: FSDP2 and custom functions run on others, and backward runs on a
thread of its own. A ``torch.Stream`` that is entered keeps the streams to go back to on itself, so two
threads must not enter one at once: a lock is around it. Under that lock one event is recorded on compute and
waited for, for all copies in turn. The host usually runs ahead of the device, so waiting for a copy that is
not complete is no stall yet: the time between two events around the wait is. All events but stamps are
pooled: creating one costs more than recording it. An event goes back to the pool when the last object that
could ask for it is gone; a wait that was enqueued on it refers to the recording, not to the event (CUDA:
``cudaStreamWaitEvent`` captures the event's contents at the call), so recording it again is safe.

**Observed copies** are named for a profiler that is on, and reported to a listener: `WatchedTransfer` wraps
another transfer for one forward and its backward (`PlanRuntime.watched`), only where there is either.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch.autograd.profiler import record_function

from ..plan.actions import Scope
from .host_pool import HostBuffer
from .link import Link, measure_link
from .stats import PendingTime

Direction = Literal["out", "in"]
Event = TypeVar("Event")


class Copy(Protocol):
    """A copy that has been asked for."""

    def wait(self) -> PendingTime | None:
        """Make compute wait for the copy; return what measures the wait, ``None`` if there was none.

        Each reader of a block calls it, on its own stream: mostly that one has waited already.
        """


class Stamp(Protocol):
    """A place in compute's order of work, and so a time."""

    def ms_since(self, earlier: Any) -> float:
        """Return the time from ``earlier`` to here, in ms; compute must have passed both (synchronize)."""


class StepLog(Generic[Event]):
    """Events of one step in compute's order of work. There is a log only while a listener is registered.

    The planner's `OpEventLog` is another one: its marks also read the meter and autograd's node numbers, and
    its clock may add up op by op where nothing is computed.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._start = transfer.stamp()
        self._events: list[tuple[Event, Stamp]] = []

    def note(self, event: Event) -> None:
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
        return cls(time.perf_counter())

    def ms_since(self, earlier: HostStamp) -> float:
        return max(0.0, (self.seconds - earlier.seconds) * 1e3)


@dataclass(frozen=True, slots=True)
class _Spent:
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


COMPLETE: Copy = _Done(None)
"""In the place of a copy out, of a host block that has its content already."""


class BlockingTransfer:
    """Copies that are complete when the call returns; reloaded tensors live on ``device``."""

    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        start = HostStamp.now()
        for target, part in host.pairs(source):
            target.copy_(part)
        return _Done(_Spent(HostStamp.now().ms_since(start)))

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        start = HostStamp.now()
        block = host.new_block(self._device)
        for part, target in host.pairs(block):
            target.copy_(part)
        return block, _Done(_Spent(HostStamp.now().ms_since(start)))

    def host_reader_done(self, host: HostBuffer) -> None:
        """Do nothing: no copy is under way."""

    def stamp(self) -> Stamp:
        return HostStamp.now()

    def synchronize(self) -> None:
        """Do nothing: compute is done when its call returns."""

    def link(self) -> Link | None:
        return None

    def free_bytes(self) -> int | None:
        return None

    def empty_cache(self) -> None:
        """Do nothing: this transfer caches no memory."""


TIMED_WAIT_MS = 0.02
"""Most time between two timing events around a wait for a complete copy: such a wait is no stall."""


class _Events:
    """A pool of events, with or without timing, which are used again."""

    def __init__(self, device: torch.device, timing: bool) -> None:
        self._device, self._timing = device, timing
        self._free: deque[torch.Event] = deque()

    def recorded_on(self, stream: torch.Stream) -> _Event:
        """Record an event; it can be reused when the returned object is freed."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.Event(self._device, enable_timing=self._timing)
        event.record(stream)
        return _Event(self._free, event)


class _Event:
    """A recorded event, which returns to its pool."""

    __slots__ = ("_free", "event")

    def __init__(self, free: deque[torch.Event], event: torch.Event) -> None:
        self._free, self.event = free, event

    def __del__(self) -> None:
        self._free.append(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class _TimedWait(NamedTuple):
    before: _Event
    after: _Event

    def elapsed_ms(self) -> float | None:
        if not self.after.event.query():
            return None
        elapsed_ms = float(self.before.event.elapsed_time(self.after.event))
        return elapsed_ms if elapsed_ms > TIMED_WAIT_MS else 0.0


class _StreamStamp(NamedTuple):
    event: torch.Event

    def ms_since(self, earlier: _StreamStamp) -> float:
        return float(earlier.event.elapsed_time(self.event))


class _StreamCopy:
    """A copy on one of the copy streams, complete when the event ``done`` is.

    Args:
        block: for a copy in: the tensor that it fills.
        home: the stream that ``block`` was allocated on.
    """

    __slots__ = ("_block", "_home", "_owner", "_waited", "done")

    def __init__(
        self,
        owner: StreamTransfer,
        done: _Event,
        block: torch.Tensor | weakref.ref[torch.Tensor] | None = None,
        home: torch.Stream | None = None,
    ) -> None:
        self._owner, self._block, self._home = owner, block, home
        self._waited: Sequence[torch.Stream] = ()
        self.done = done

    def wait(self) -> PendingTime | None:
        compute = torch.accelerator.current_stream(self._owner.index)
        block = self._block
        if isinstance(block, weakref.ref):
            block = block()
        elif block is not None:
            self._block = weakref.ref(block)  # whoever reads it again holds it; a listener holds this copy
        if block is not None and self._home != compute:
            block.record_stream(compute)
        if compute in self._waited:
            return None
        done, timing = self.done.event, self._owner.timing
        for stream in self._owner.compute_streams:
            if stream != compute:
                stream.wait_event(done)
        self._waited = [*self._owner.compute_streams, compute, *self._waited]
        if done.query():
            compute.wait_event(done)  # already complete; keeps the allocator's order without a stall
            return None
        before = timing.recorded_on(compute)
        compute.wait_event(done)
        return _TimedWait(before, timing.recorded_on(compute))


class StreamTransfer:
    """Copies on two streams of one accelerator.

    Args:
        device: the accelerator, with its index.

    Attributes:
        compute_streams: streams that have requested copies.
    """

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index = device.index
        self.compute_streams: list[torch.Stream] = []
        self.timing = _Events(device, timing=True)
        self._events = _Events(device, timing=False)
        self._asked = torch.Event(device)
        self._out = torch.Stream(device)
        self._in = torch.Stream(device)
        self._entering = Lock()

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        compute = self._compute_stream()
        with self._entering, self._out:
            self._asked.record(compute)
            self._out.wait_event(self._asked)
            if host.last_use is not None:
                self._out.wait_event(host.last_use.event)
                host.last_use = None
            for target, part in host.pairs(source):
                target.copy_(part, non_blocking=True)
            return _StreamCopy(self, self._events.recorded_on(self._out))

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        compute = self._compute_stream()
        block = host.new_block(self.device)
        with self._entering, self._in:
            self._asked.record(compute)
            self._in.wait_event(self._asked)
            if isinstance(after, _StreamCopy):
                self._in.wait_event(after.done.event)
            for part, target in host.pairs(block):
                target.copy_(part, non_blocking=True)
            host.last_use = done = self._events.recorded_on(self._in)
        return block, _StreamCopy(self, done, block, compute)

    def host_reader_done(self, host: HostBuffer) -> None:
        """Do nothing: ``last_use`` orders the next writer."""

    def stamp(self) -> Stamp:
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.index))
        return _StreamStamp(event)

    def copy_stamp(self, direction: Direction) -> Stamp:
        event = torch.Event(self.device, enable_timing=True)
        event.record(self._out if direction == "out" else self._in)
        return _StreamStamp(event)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def link(self) -> Link | None:
        return measure_link(self.device)

    def free_bytes(self) -> int | None:
        free_bytes, _ = torch.accelerator.get_memory_info(self.device)
        reserved = torch.accelerator.memory_reserved(self.device)
        return int(free_bytes) + int(reserved) - int(torch.accelerator.memory_allocated(self.device))

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def _compute_stream(self) -> torch.Stream:
        """Return the current stream, and add it to those that have requested copies."""
        compute = torch.accelerator.current_stream(self.index)
        if compute not in self.compute_streams:
            self.compute_streams.append(compute)
        return compute


def transfer_of(device: torch.device) -> Transfer:
    return BlockingTransfer(device) if device.type == "cpu" else StreamTransfer(device)


OpName = tuple[Scope | None, str]
"""Scope and op path of the plan row that swaps; ``(None, "")`` if none is known."""

_NO_OP: OpName = (None, "")


@dataclass(eq=False, slots=True)
class WatchedCopy:
    """One copy, as it was asked for.

    Args:
        name: the plan row that swaps the tensor.
        asked: where compute was when the copy was asked for.
        done: end of the copy, in the order of work of the copying stream.
        first: for a copy in: the copy out of the same host block.
    """

    direction: Direction
    name: OpName
    size_bytes: int
    asked: Stamp
    done: Stamp
    inner: Copy
    first: WatchedCopy | None
    _listener: CopyListener | None
    _clock: Transfer

    def wait(self) -> PendingTime | None:
        if self._listener is None:
            return self.inner.wait()
        start = self._clock.stamp()
        waited = self.inner.wait()
        if waited is not None:
            self._listener.waited(self, start, waited)
        return waited


@runtime_checkable
class StampsCopies(Protocol):
    """A transfer whose copies run in an order of their own beside compute's (`StreamTransfer`)."""

    def copy_stamp(self, direction: Direction) -> Stamp:
        """Mark the present place in the order of the copies out, or in."""


class CopyListener(Protocol):
    """Is told of each copy and of each wait for one."""

    def copied(self, copy: WatchedCopy, on_device: torch.Tensor) -> None:
        """Receive a copy when it is asked for; ``on_device`` is its source or its target."""

    def waited(self, copy: WatchedCopy, start: Stamp, length: PendingTime) -> None:
        """Receive a wait of compute for a copy, from ``start`` on."""


class WatchedTransfer:
    """A `Transfer` around another, which names each copy for a profiler and reports it to a listener."""

    def __init__(self, inner: Transfer, listener: CopyListener | None, profiled: bool) -> None:
        self._inner, self._listener, self._profiled = inner, listener, profiled
        self.overlaps, self.stamp, self.synchronize = inner.overlaps, inner.stamp, inner.synchronize
        self.link, self.free_bytes, self.empty_cache = inner.link, inner.free_bytes, inner.empty_cache
        self.host_reader_done = inner.host_reader_done
        self._next = _NO_OP

    def name(self, name: OpName) -> None:
        """Set the name of the next copy out."""
        self._next = name

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        name, self._next = self._next, _NO_OP
        asked = self._inner.stamp()
        with self._range("offload", name):
            inner = self._inner.offload(source, host)
        return self._told("out", name, host, asked, inner, None, source)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        first = after if isinstance(after, WatchedCopy) else None
        name = _NO_OP if first is None else first.name
        asked = self._inner.stamp()
        with self._range("prefetch", name):
            block, inner = self._inner.reload(host, after if first is None else first.inner)
        return block, self._told("in", name, host, asked, inner, first, block)

    def _range(self, what: str, name: OpName) -> AbstractContextManager[object]:
        if not self._profiled:
            return nullcontext()
        return profiler_range(what, " ".join(str(part) for part in name if part not in (None, "")))

    def _told(
        self,
        direction: Direction,
        name: OpName,
        host: HostBuffer,
        asked: Stamp,
        inner: Copy,
        first: WatchedCopy | None,
        on_device: torch.Tensor,
    ) -> WatchedCopy:
        transfer = self._inner
        done = transfer.copy_stamp(direction) if isinstance(transfer, StampsCopies) else transfer.stamp()
        copy = WatchedCopy(
            direction, name, host.size_bytes, asked, done, inner, first, self._listener, transfer
        )
        if self._listener is not None:
            self._listener.copied(copy, on_device)
        return copy


def profiler_is_on() -> bool:
    """Whether ``torch.profiler`` records at present; it only reads an attribute, so it is cheap."""
    return torch.autograd.profiler._is_profiler_enabled


def profiler_range(what: str, place: str) -> record_function:
    """Return a range ``hf_actswap.<what> <layer> <op path>`` for the profiler's trace."""
    return record_function(f"hf_actswap.{what} {place}".rstrip())
