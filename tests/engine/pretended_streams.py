"""Streams and events for a machine that has none: everything happens at once, in the order of the calls.

They prove no order. They let the code that is written for accelerators run, so that it is at least sound
Python when it meets one.
"""

from __future__ import annotations

from itertools import count, cycle
from typing import Any

import pytest
import torch

from hf_actswap.engine import StreamTransfer, host_budget, transfer_streams
from hf_actswap.engine.link import Link
from hf_actswap.engine.slabs import PageableSlabs


class PretendedStream:
    """Enqueues nothing."""

    def __init__(self, *_: object) -> None:
        self.waited = 0

    def wait_event(self, event: object) -> None:
        assert isinstance(event, PretendedEvent)
        assert event.recorded, "a stream waits for an event that nobody recorded"
        self.waited += 1

    def __enter__(self) -> PretendedStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class PretendedEvent:
    """Is complete at every other query; 0.1 ms pass between one that is recorded and the next."""

    _times_ms = count(0.0, 0.1)

    def __init__(self, *_: object, enable_timing: bool = False) -> None:
        self.recorded, self._timing, self._answers = False, enable_timing, cycle((False, True))
        self._at_ms = 0.0

    def record(self, stream: object) -> None:
        assert isinstance(stream, PretendedStream)
        self.recorded, self._at_ms = True, next(self._times_ms)

    def query(self) -> bool:
        return next(self._answers)

    def synchronize(self) -> None:
        assert self.recorded

    def elapsed_time(self, other: object) -> float:
        assert isinstance(other, PretendedEvent)
        assert all((self._timing, other._timing, self.recorded, other.recorded))
        return other._at_ms - self._at_ms


def pretend(patch: pytest.MonkeyPatch) -> list[int]:
    """Replace what an accelerator would bring; return the list that spins are written to."""
    spins: list[int] = []
    compute = PretendedStream()

    def current_stream(_device: Any = None) -> PretendedStream:
        return compute

    patch.setattr(torch, "Stream", PretendedStream)
    patch.setattr(torch, "Event", PretendedEvent)
    patch.setattr(torch.accelerator, "current_stream", current_stream)
    patch.setattr(torch.cuda, "_sleep", spins.append)
    patch.setattr(host_budget, "PinnedSlabs", lambda *_: PageableSlabs())
    patch.setattr(transfer_streams, "measure_link", lambda _device: Link(1e9, 1e9, 1e9, 1e9, latency_ms=0.0))
    patch.setattr(StreamTransfer, "synchronize", lambda _self: None)
    patch.setattr(StreamTransfer, "free_bytes", lambda _self: 2**30)
    return spins
