"""Measures the link between host and device. The windows under ``auto`` are computed from these rates.

Measure between steps, on all ranks at once: they may share a switch or a socket. The result holds for this
rank; ranks that must decide alike exchange their results and take the `slowest`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

_MIB = 2**20
_REPEATS = 4
_LEAST_MS = 1e-3
"""Least time of a measurement: CUDA's events resolve half a microsecond."""


@dataclass(frozen=True, slots=True)
class Link:
    """Rates of copies between page-locked host memory and the device, in bytes per ms (GB/s times 10^6).

    Args:
        out_bytes_per_ms, in_bytes_per_ms: device to host, and host to device, nothing else on the link.
        out_beside_in_bytes_per_ms, in_beside_out_bytes_per_ms: each way while the other way is busy.
        latency_ms: fixed time of each copy: 4 MiB pieces reach 44 of 55 GB/s on one H200.

    Raises:
        ValueError: a rate is not positive, or the latency negative.
    """

    out_bytes_per_ms: float
    in_bytes_per_ms: float
    out_beside_in_bytes_per_ms: float
    in_beside_out_bytes_per_ms: float
    latency_ms: float = 0.02

    def __post_init__(self) -> None:
        rates = [getattr(self, field.name) for field in fields(self) if field.name != "latency_ms"]
        if min(rates) <= 0 or self.latency_ms < 0:
            raise ValueError(f"a link needs positive rates and a latency that is not negative: {self}")

    def out_ms(self, size_bytes: int) -> float:
        return size_bytes / self.out_bytes_per_ms + self.latency_ms

    def in_ms(self, size_bytes: int) -> float:
        return size_bytes / self.in_bytes_per_ms + self.latency_ms

    def slowed(self, factor: float) -> Link:
        """Return a link on which copies take ``factor`` times as long."""
        return Link(
            self.out_bytes_per_ms / factor,
            self.in_bytes_per_ms / factor,
            self.out_beside_in_bytes_per_ms / factor,
            self.in_beside_out_bytes_per_ms / factor,
            self.latency_ms * factor,
        )


NO_COPIES = Link(math.inf, math.inf, math.inf, math.inf, 0.0)
"""For what has no link: copies take no time."""


class Lane:
    """One direction of a simulated link, on which copies run in order.

    Its rates are ``alone`` while the other direction is idle, and ``beside`` while that is busy.
    """

    def __init__(self, alone_bytes_per_ms: float, beside_bytes_per_ms: float, latency_ms: float) -> None:
        self.rates = (alone_bytes_per_ms, beside_bytes_per_ms)
        self.latency_bytes = latency_ms * alone_bytes_per_ms
        self.finish_ms: dict[int, float] = {}
        self.queue: deque[int] = deque()
        self.left_bytes: dict[int, float] = {}
        self.end_ms = 0.0


class DuplexLink:
    """Simulates copies on both directions of a link, which slow each other down while both are busy."""

    def __init__(self, link: Link) -> None:
        latency = link.latency_ms
        self.out = Lane(link.out_bytes_per_ms, link.out_beside_in_bytes_per_ms, latency)
        self.back = Lane(link.in_bytes_per_ms, link.in_beside_out_bytes_per_ms, latency)
        self._now_ms = 0.0

    def enqueue(self, lane: Lane, item: int, size_bytes: int, now_ms: float) -> None:
        """Add a copy, numbered ``item``, at ``now_ms``, which is not before the time of any earlier call."""
        self._advance(now_ms)
        lane.queue.append(item)
        lane.left_bytes[item] = size_bytes + lane.latency_bytes

    def wait(self, lane: Lane, item: int, now_ms: float) -> float:
        """Return when a waiter at ``now_ms`` may continue: at once, or when the copy is complete."""
        self._advance(now_ms)
        while item in lane.left_bytes:
            self._step(float("inf"))
        return max(now_ms, lane.finish_ms[item])

    def _advance(self, now_ms: float) -> None:
        while self._now_ms < now_ms:
            self._step(now_ms)

    def _step(self, limit_ms: float) -> None:
        """Run until the next copy is complete, or until ``limit_ms``."""
        both = bool(self.out.queue) and bool(self.back.queue)
        end_ms = limit_ms
        for lane in (self.out, self.back):
            if lane.queue:
                lane.end_ms = self._now_ms + lane.left_bytes[lane.queue[0]] / lane.rates[both]
                end_ms = min(end_ms, lane.end_ms)
        for lane in (self.out, self.back):
            if not lane.queue:
                continue
            if lane.end_ms <= end_ms:
                item = lane.queue.popleft()
                del lane.left_bytes[item]
                lane.finish_ms[item] = end_ms
            else:
                lane.left_bytes[lane.queue[0]] -= (end_ms - self._now_ms) * lane.rates[both]
        self._now_ms = end_ms


def slowest(links: Iterable[Link]) -> Link:
    """Return a link as slow as the slowest in each number. Raises `ValueError` for no links."""
    known = list(links)
    if not known:
        raise ValueError("no links to take the slowest of")
    return Link(
        out_bytes_per_ms=min(link.out_bytes_per_ms for link in known),
        in_bytes_per_ms=min(link.in_bytes_per_ms for link in known),
        out_beside_in_bytes_per_ms=min(link.out_beside_in_bytes_per_ms for link in known),
        in_beside_out_bytes_per_ms=min(link.in_beside_out_bytes_per_ms for link in known),
        latency_ms=max(link.latency_ms for link in known),
    )


def measure_link(device: torch.device) -> Link:
    """Measure copies out, back, and both at once, on two streams of an accelerator.

    About 20 ms of copies at PCIe 5 speed; it synchronizes the device, so call it between steps. Device and
    host hold two pieces meanwhile. Where the device has no room for them, they are smaller.

    Raises:
        ValueError: the device is a CPU.
        torch.OutOfMemoryError: the device has no room for two pieces of 1 MiB.
    """
    if device.type == "cpu":
        raise ValueError("a CPU has no link to measure: its copies block")
    blocks = _two_blocks(device)
    piece_bytes = blocks[0].numel()
    host = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    out, back = (host[0], blocks[0]), (blocks[1], host[1])  # (target, source)
    _copies_ms(device, [out, back], 1)
    (out_ms,) = _copies_ms(device, [out], _REPEATS)
    (in_ms,) = _copies_ms(device, [back], _REPEATS)
    both_ms = _copies_ms(device, [out, back], _REPEATS)
    return link_of_times(_REPEATS * piece_bytes, out_ms, in_ms, both_ms[0], both_ms[1])


def _two_blocks(device: torch.device) -> list[torch.Tensor]:
    """Return blocks of 64 MiB, or of a half, a quarter, ... where the device has no room."""
    size_bytes = 64 * _MIB
    while True:
        try:
            return [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        except torch.OutOfMemoryError:
            if size_bytes == _MIB:
                raise
        size_bytes //= 2


def link_of_times(
    moved_bytes: int, out_ms: float, in_ms: float, out_beside_ms: float, in_beside_ms: float
) -> Link:
    """Return the link on which ``moved_bytes`` each way took these times.

    When both ways ran, the one that ended later had the link to itself after the other's end: the bytes that
    it moved then, at its rate alone, are not counted. A time below a microsecond, which a clock that was set
    back can give, counts as one microsecond.
    """
    out_rate, in_rate = (moved_bytes / max(ms, _LEAST_MS) for ms in (out_ms, in_ms))
    together_ms = max(min(out_beside_ms, in_beside_ms), _LEAST_MS)

    def beside(ended_ms: float, alone: float) -> float:
        rate = (moved_bytes - (ended_ms - together_ms) * alone) / together_ms
        # Noise can raise it above the rate alone; on a link that serves one way at a time it can be 0.
        return min(max(rate, alone / 100), alone)

    return Link(out_rate, in_rate, beside(out_beside_ms, out_rate), beside(in_beside_ms, in_rate))


def _copies_ms(
    device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], repeats: int
) -> list[float]:
    """Return ms from a common start until each (target, source) was copied, each pair on its own stream."""
    torch.accelerator.synchronize(device)
    streams = [torch.Stream(device) for _ in pairs]
    start, ends = torch.Event(device, enable_timing=True), []
    start.record(torch.accelerator.current_stream(device))
    for stream in streams:
        stream.wait_event(start)
    for _ in range(repeats):  # alternately, so that neither stream waits for the other's enqueueing
        for stream, (target, source) in zip(streams, pairs, strict=True):
            with stream:
                target.copy_(source, non_blocking=True)
    for stream in streams:
        end = torch.Event(device, enable_timing=True)
        end.record(stream)
        ends.append(end)
    torch.accelerator.synchronize(device)
    return [float(start.elapsed_time(end)) for end in ends]
