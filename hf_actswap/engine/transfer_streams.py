"""Copies on two streams of their own, beside compute.

Streams and lifetimes, for one device:

* **Out.** The copy stream waits for an event recorded on the compute stream at ``offload``: everything
  that wrote the tensor was enqueued before. That is when autograd first saves the tensor, the earliest time
  at which its value is known; later forward uses only read it beside the copy (a write raises, `tickets`).
  The caller holds the source until ``wait``, which makes the compute stream wait for the copy's event; only
  then is the reference dropped, so the allocator hands the block to work that is ordered behind the copy.
  No ``record_stream`` (it defers reuse to a polled event and makes the peak depend on time), no
  ``resize_(0)`` (it breaks others that hold the storage).
* **In.** The new block is allocated on the compute stream, whose pool holds what backward just freed. Its
  previous owner's kernels may still be running there, so the copy-in stream waits for an event recorded on
  the compute stream at allocation; and for the event of the copy out, so that it never reads an
  unfinished host block.
* **Host blocks.** The out stream writes them, the in stream reads them. A block given back while the in
  stream still reads it carries the event of that read (``last_use``); the next offload into it waits, and
  the pool synchronizes with it before it cuts the block up for others. A block whose graph died before any
  reload carries none: its copy out was waited for when the group died, and the next offload into the same
  memory, whatever its size, is enqueued on the same stream behind it.
* **A reload for which nothing waited** (its graph was freed): its block would go back to the compute pool
  while the in stream still writes it, so the code that drops it calls ``wait`` first.
* **Which streams wait.** Memory goes back to the pool of the stream that was current when it was allocated.
  That need not be the stream that is current when a copy is waited for: a graph in a reference cycle is freed
  by the garbage collector, which runs at any allocation, also while a copy stream is current; and parts of a
  model may run on a stream of their own. So every stream that ever requested a copy waits (mostly there is
  one), and the current one too. A block that is read on another stream than it was prefetched on is recorded
  on its reader (``record_stream``): nothing else orders its reuse behind the read.
* **Pieces.** A block is copied piece by piece (64 MiB): the copy engine serves other streams in between, so
  a batch on its way to the device does not wait behind a gigabyte.

The compute stream is read at each call: FSDP2 and custom functions run on others, and backward runs on a
thread of its own. A ``torch.Stream`` keeps the streams to go back to on itself when it is entered, so two
threads must not enter one at once: a lock is around it. Events carry no timing, except stamps and the pair
around a wait for a copy that was not complete. The host usually runs ahead of the device, so such a wait is
no stall yet: the time between the two events is the stall. All but stamps are pooled: creating an event
costs more than recording it. An event goes back to the pool when the last object that could ask for it is
gone; a wait that was enqueued on it refers to the recording, not to the event (CUDA: ``cudaStreamWaitEvent``
captures the event's contents at the call), so recording it again is safe.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Literal

import torch

from .blocks import HostBuffer
from .link import Link, measure_link
from .stats import PendingTime
from .transfer import BlockingTransfer, Copy, Stamp, Transfer

TIMED_WAIT_MS = 0.02
"""Most time between two timing events around a wait for a complete copy: such a wait is no stall."""


class _Events:
    """A pool of events of one kind, which are used again.

    Args:
        device: the accelerator, with its index.
        timing: whether the events carry a time.
    """

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
    """A recorded event that returns to its pool."""

    __slots__ = ("_free", "event")

    def __init__(self, free: deque[torch.Event], event: torch.Event) -> None:
        self._free, self.event = free, event

    def __del__(self) -> None:
        self._free.append(self.event)

    def synchronize(self) -> None:
        """Wait on the host until the device has reached the event."""
        self.event.synchronize()


class _TimedWait:
    """The time between two events on the compute stream."""

    def __init__(self, before: _Event, after: _Event) -> None:
        self._before, self._after = before, after

    def elapsed_ms(self) -> float | None:
        """Return the length in ms (0: no wait), ``None`` while the device has not reached its end."""
        if not self._after.event.query():
            return None
        elapsed_ms = float(self._before.event.elapsed_time(self._after.event))
        return elapsed_ms if elapsed_ms > TIMED_WAIT_MS else 0.0


class _StreamStamp:
    """A timing event on the compute stream."""

    __slots__ = ("event",)

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def ms_since(self, earlier: _StreamStamp) -> float:
        return float(earlier.event.elapsed_time(self.event))


class _StreamCopy:
    """A copy on one of the copy streams, complete when its event is.

    Args:
        owner: the transfer that has the streams and events.
        done: event at the end of the copy.
        block: for a copy in: the tensor that it fills, and the stream that this was allocated on.
    """

    __slots__ = ("_block", "_owner", "done")

    def __init__(
        self, owner: StreamTransfer, done: _Event, block: tuple[torch.Tensor, torch.Stream] | None = None
    ) -> None:
        self._owner, self._block = owner, block
        self.done = done

    def wait(self) -> PendingTime | None:
        """Make compute wait for the copy; return what measures the wait, ``None`` if there was none."""
        compute = torch.accelerator.current_stream(self._owner.index)
        done, timing = self.done.event, self._owner.timing
        for stream in self._owner.compute_streams:
            if stream != compute:
                stream.wait_event(done)
        block, self._block = self._block, None
        if block is not None and block[1] != compute:
            block[0].record_stream(compute)
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
        timing: timing events for waits.
    """

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index = device.index
        self.compute_streams: list[torch.Stream] = []
        self.timing = _Events(device, timing=True)
        self._events = _Events(device, timing=False)
        self._out = torch.Stream(device)
        self._in = torch.Stream(device)
        self._entering = Lock()

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """Copy ``source`` (contiguous, on the device) to ``host``, after `HostBuffer.hold` on it."""
        compute = self._compute_stream()
        self._out.wait_event(self._events.recorded_on(compute).event)
        if host.last_use is not None:
            self._out.wait_event(host.last_use.event)
            host.last_use = None
        with self._entering, self._out:
            for target, part in host.pairs(source):
                target.copy_(part, non_blocking=True)
        return _StreamCopy(self, self._events.recorded_on(self._out))

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """Copy ``host`` to a new contiguous tensor on the device, once ``after`` is complete."""
        compute = self._compute_stream()
        block = host.new_block(self.device)
        self._in.wait_event(self._events.recorded_on(compute).event)
        if isinstance(after, _StreamCopy):
            self._in.wait_event(after.done.event)
        with self._entering, self._in:
            for part, target in host.pairs(block):
                target.copy_(part, non_blocking=True)
        host.last_use = done = self._events.recorded_on(self._in)
        return block, _StreamCopy(self, done, (block, compute))

    def host_reader_done(self, host: HostBuffer) -> None:
        """Do nothing: the block's ``last_use`` orders the next writer."""

    def stamp(self) -> Stamp:
        """Mark the present place in compute's order of work."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.index))
        return _StreamStamp(event)

    def copy_stamp(self, direction: Literal["out", "in"]) -> Stamp:
        """Mark the present place in the order of the copies out, or in."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(self._out if direction == "out" else self._in)
        return _StreamStamp(event)

    def synchronize(self) -> None:
        """Wait until compute has done all that it was given."""
        torch.accelerator.synchronize(self.device)

    def link(self) -> Link | None:
        """Measure the link; ``None`` if copies do not overlap compute. Between steps only."""
        return measure_link(self.device)

    def free_bytes(self) -> int | None:
        """Return the bytes that are free on the device, or cached by this process and unused."""
        free_bytes, _ = torch.accelerator.get_memory_info(self.device)
        reserved = torch.accelerator.memory_reserved(self.device)
        return int(free_bytes) + int(reserved) - int(torch.accelerator.memory_allocated(self.device))

    def empty_cache(self) -> None:
        """Give cached device memory back to the device. Between steps only."""
        torch.accelerator.empty_cache()

    def _compute_stream(self) -> torch.Stream:
        """Return the current stream, and add it to those that have requested copies."""
        compute = torch.accelerator.current_stream(self.index)
        if compute not in self.compute_streams:
            self.compute_streams.append(compute)
        return compute


def transfer_of(device: torch.device) -> Transfer:
    """Return the transfer for ``device``: on streams of its own, or the CPU's blocking copies."""
    return BlockingTransfer(device) if device.type == "cpu" else StreamTransfer(device)
