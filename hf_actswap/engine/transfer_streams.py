"""Copies on two streams of their own, beside compute.

Streams and lifetimes, for one device:

* **Out.** The copy stream waits for an event recorded on the compute stream at ``offload``: everything
  that wrote the tensor was enqueued before. The caller holds the source until ``wait``, which makes the
  compute stream wait for the copy's event; only then is the reference dropped, so the allocator hands the
  block to work that is ordered behind the copy. No ``record_stream`` (it defers reuse to a polled event and
  makes the peak depend on time), no ``resize_(0)`` (it breaks whoever else holds the storage).
* **In.** The new block is allocated on the compute stream, whose pool holds what backward just freed. Its
  previous owner's kernels may still be running there, so the copy-in stream waits for an event recorded on
  the compute stream at allocation; and for the event of the copy out, so that it never reads an
  unfinished host block.
* **Host blocks.** The out stream writes them, the in stream reads them. A block given back while the in
  stream still reads it carries the event of that read (``last_use``); the next offload into it waits.
* **A reload that nobody waited for** (its graph died): its block would go back to the compute pool while
  the in stream still writes it, so whoever drops it calls ``wait`` first.

The compute stream is read at each call: FSDP2 and custom functions run on others, and backward runs on a
thread of its own. Events carry no timing, except the pair around a wait that was late.
"""

from __future__ import annotations

import torch

from .host_pool import HostBuffer
from .stats import PendingTime
from .transfer import Copy


class _TimedWait:
    """The time between two events on the compute stream."""

    def __init__(self, before: torch.Event, after: torch.Event) -> None:
        self._before, self._after = before, after

    def elapsed_ms(self) -> float | None:
        if not self._after.query():
            return None
        return float(self._before.elapsed_time(self._after))


class _StreamCopy:
    """A copy on one of the copy streams, complete when its event is."""

    def __init__(self, device: torch.device, done: torch.Event) -> None:
        self._device = device
        self.done = done

    def wait(self) -> PendingTime | None:
        """See `Copy`."""
        compute = torch.accelerator.current_stream(self._device)
        if self.done.query():
            compute.wait_event(self.done)  # already complete; keeps the allocator's order without a stall
            return None
        before, after = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        before.record(compute)
        compute.wait_event(self.done)
        after.record(compute)
        return _TimedWait(before, after)


class StreamTransfer:
    """Copies on two streams of one accelerator.

    Args:
        device: with an index.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.Stream(device)
        self._in = torch.Stream(device)

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """See `Transfer`."""
        self._out.wait_event(self._recorded_on(torch.accelerator.current_stream(self._device)))
        if host.last_use is not None:
            self._out.wait_event(host.last_use)
            host.last_use = None
        with self._out:
            host.data.copy_(source, non_blocking=True)
        return _StreamCopy(self._device, self._recorded_on(self._out))

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """See `Transfer`."""
        block = torch.empty(host.size_bytes, dtype=torch.uint8, device=self._device)
        self._in.wait_event(self._recorded_on(torch.accelerator.current_stream(self._device)))
        if isinstance(after, _StreamCopy):
            self._in.wait_event(after.done)
        with self._in:
            block.copy_(host.data, non_blocking=True)
        done = self._recorded_on(self._in)
        host.last_use = done
        return block, _StreamCopy(self._device, done)

    def host_reader_done(self, host: HostBuffer) -> None:
        """The block's ``last_use`` orders the next writer."""

    def _recorded_on(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self._device)
        event.record(stream)
        return event
