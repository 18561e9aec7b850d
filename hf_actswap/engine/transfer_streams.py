"""Copies on two streams of their own, beside compute.

Streams and lifetimes, for one device:

* **Out.** The copy stream waits for an event recorded on the compute stream at ``offload``: everything
  that wrote the tensor was enqueued before. That is when autograd first saves the tensor, the earliest time
  at which its value is known; later forward uses only read it beside the copy (a write raises, `tickets`).
  The caller holds the source until ``wait``, which makes the compute stream wait for the copy's event; only
  then is the reference dropped, so the allocator hands the block to work that is ordered behind the copy.
  No ``record_stream`` (it defers reuse to a polled event and makes the peak depend on time), no
  ``resize_(0)`` (it breaks whoever else holds the storage).
* **In.** The new block is allocated on the compute stream, whose pool holds what backward just freed. Its
  previous owner's kernels may still be running there, so the copy-in stream waits for an event recorded on
  the compute stream at allocation; and for the event of the copy out, so that it never reads an
  unfinished host block.
* **Host blocks.** The out stream writes them, the in stream reads them. A block given back while the in
  stream still reads it carries the event of that read (``last_use``); the next offload into it waits, and
  the pool synchronizes with it before it cuts the block up for others. A block whose graph died before any
  reload carries none: its copy out was waited for when the group died, and the next offload into the same
  memory, whatever its size, is enqueued on the same stream behind it.
* **A reload that nobody waited for** (its graph died): its block would go back to the compute pool while
  the in stream still writes it, so whoever drops it calls ``wait`` first.
* **Pieces.** A block is copied piece by piece (32 MiB): the copy engine serves other streams in between, so
  a batch on its way to the device does not wait behind a gigabyte.

The compute stream is read at each call: FSDP2 and custom functions run on others, and backward runs on a
thread of its own. Events carry no timing, except the pair around a wait that was late, and stamps. They are
pooled: creating one costs more than recording it. An event goes back to the pool when the last object that
could ask for it is gone; a wait that was enqueued on it refers to the recording, not to the event (CUDA:
``cudaStreamWaitEvent`` captures the event's contents at the call), so recording it again is safe.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import torch

from .blocks import HostBuffer
from .link import Link, measure_link
from .stats import PendingTime
from .transfer import BlockingTransfer, Copy, Stamp, Transfer


class _Event:
    """An event without timing that returns to its pool."""

    __slots__ = ("_pool", "event")

    def __init__(self, pool: deque[torch.Event], device: torch.device) -> None:
        self._pool = pool
        try:
            self.event = pool.pop()
        except IndexError:
            self.event = torch.Event(device)

    def __del__(self) -> None:
        self._pool.append(self.event)

    def synchronize(self) -> None:
        """Wait, on the host, for what was recorded."""
        self.event.synchronize()


class _TimedWait:
    """The time between two events on the compute stream."""

    def __init__(self, before: torch.Event, after: torch.Event) -> None:
        self._before, self._after = before, after

    def elapsed_ms(self) -> float | None:
        if not self._after.query():
            return None
        return float(self._before.elapsed_time(self._after))


class _StreamStamp:
    """A timing event on the compute stream."""

    __slots__ = ("event",)

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def ms_since(self, earlier: _StreamStamp) -> float:
        return float(earlier.event.elapsed_time(self.event))


class _StreamCopy:
    """A copy on one of the copy streams, complete when its event is."""

    __slots__ = ("_device", "done")

    def __init__(self, device: torch.device, done: _Event) -> None:
        self._device = device
        self.done = done

    def wait(self) -> PendingTime | None:
        """See `Copy`."""
        compute = torch.accelerator.current_stream(self._device)
        done = self.done.event
        if done.query():
            compute.wait_event(done)  # already complete; keeps the allocator's order without a stall
            return None
        before, after = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        before.record(compute)
        compute.wait_event(done)
        after.record(compute)
        return _TimedWait(before, after)


class StreamTransfer:
    """Copies on two streams of one accelerator.

    Args:
        device: with an index.
    """

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.Stream(device)
        self._in = torch.Stream(device)
        self._events: deque[torch.Event] = deque()

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """See `Transfer`."""
        self._out.wait_event(self._recorded_on(torch.accelerator.current_stream(self._device)).event)
        if host.last_use is not None:
            self._out.wait_event(host.last_use.event)
            host.last_use = None
        with self._out:
            for target, part in host.pairs(source):
                target.copy_(part, non_blocking=True)
        return _StreamCopy(self._device, self._recorded_on(self._out))

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """See `Transfer`."""
        block = host.new_block(self._device)
        self._in.wait_event(self._recorded_on(torch.accelerator.current_stream(self._device)).event)
        if isinstance(after, _StreamCopy):
            self._in.wait_event(after.done.event)
        with self._in:
            for part, target in host.pairs(block):
                target.copy_(part, non_blocking=True)
        done = self._recorded_on(self._in)
        host.last_use = done
        return block, _StreamCopy(self._device, done)

    def host_reader_done(self, host: HostBuffer) -> None:
        """The block's ``last_use`` orders the next writer."""

    def stamp(self) -> Stamp:
        """See `Transfer`."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return _StreamStamp(event)

    def copy_stamp(self, way: Literal["out", "in"]) -> Stamp:
        """Mark the present place in the order of the copies out, or in."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._out if way == "out" else self._in)
        return _StreamStamp(event)

    def synchronize(self) -> None:
        """See `Transfer`."""
        torch.accelerator.synchronize(self._device)

    def link(self) -> Link | None:
        """See `Transfer`."""
        return measure_link(self._device)

    def free_bytes(self) -> int | None:
        """Free on the device, or cached by this process and unused."""
        free_bytes, _ = torch.accelerator.get_memory_info(self._device)
        reserved = torch.accelerator.memory_reserved(self._device)
        return int(free_bytes) + int(reserved) - int(torch.accelerator.memory_allocated(self._device))

    def _recorded_on(self, stream: torch.Stream) -> _Event:
        event = _Event(self._events, self._device)
        event.event.record(stream)
        return event


def transfer_of(device: torch.device) -> Transfer:
    """Return what moves bytes on ``device``: streams of their own, or the CPU's blocking copies."""
    return BlockingTransfer(device) if device.type == "cpu" else StreamTransfer(device)
