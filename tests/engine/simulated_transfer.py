"""Copies on a simulated clock: compute's time is what the test says, and so the step is the same every time.

Compute advances the clock from hooks on the leaf modules (`Clock.drive`): in forward after a module has run,
in backward when the gradient of its output arrives, just before its node runs. Copies of one direction run
one after another at the rates of a `Link`, and the bytes really move when the clock reaches a copy's end:
until then its target is full of 0xA5, so that a read that comes too early gives wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_actswap.engine import Copy, HostBuffer, Link
from hf_actswap.engine.stats import PendingTime

NOTHING = 0xA5


class Clock:
    """Compute's time, in ms; calls its listeners whenever it has moved."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.listeners: list[Callable[[], None]] = []

    def advance(self, ms: float) -> None:
        """Compute, or a wait, takes ``ms``."""
        self.now_ms += ms
        for listener in self.listeners:
            listener()

    def drive(self, model: nn.Module, forward_ms: float = 1.0, backward_ms: float = 2.0) -> None:
        """Let each call of a leaf module take ``forward_ms``, and its gradient ``backward_ms``.

        The hooks sit on tensors, not on modules, in backward: those would add nodes and views to the graph.
        """

        def ran(_module: nn.Module, _args: Any, output: Any) -> None:
            self.advance(forward_ms)
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _gradient: self.advance(backward_ms))

        for module in model.modules():
            if next(module.children(), None) is None:
                module.register_forward_hook(ran)


@dataclass(frozen=True)
class SimulatedStamp:
    """A time on a `Clock`, in ms."""

    at_ms: float

    def ms_since(self, earlier: SimulatedStamp) -> float:
        return self.at_ms - earlier.at_ms


@dataclass(frozen=True)
class _Waited:
    milliseconds: float

    def elapsed_ms(self) -> float:
        return self.milliseconds


class SimulatedCopy:
    """Complete when the clock passes ``finish_ms``."""

    def __init__(
        self,
        clock: Clock,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        host: HostBuffer,
        finish_ms: float,
    ) -> None:
        self._clock, self._pairs = clock, pairs
        self.host, self.finish_ms = host, finish_ms

    def move(self) -> None:
        """The bytes arrive."""
        for source, target in self._pairs:
            target.data.copy_(source)  # as a copy engine does: no new version
        self._pairs.clear()

    def wait(self) -> PendingTime | None:
        """See `hf_actswap.engine.transfer.Copy`: compute stands still until the end."""
        left_ms = self.finish_ms - self._clock.now_ms
        if left_ms <= 0:
            return None
        self._clock.advance(left_ms)
        self._clock.now_ms = max(self._clock.now_ms, self.finish_ms)  # rounding
        self.move()
        return _Waited(left_ms)


class SimulatedTransfer:
    """A `Transfer` with copies in two lanes that do not slow each other down.

    Args:
        clock: compute's.
        link: its rates alone and its latency hold, in each direction.
        free_bytes: of the device, whatever has been taken from it.
        slowdown: copies last this many times as long as ``link`` says.

    Attributes:
        links_measured, caches_emptied: how often `link` and `empty_cache` were called.
    """

    overlaps = True

    def __init__(
        self, clock: Clock, link: Link, free_bytes: int | None = None, slowdown: float = 1.0
    ) -> None:
        self._clock, self._link, self._free_bytes, self._slowdown = clock, link, free_bytes, slowdown
        self._out_end_ms = self._in_end_ms = 0.0
        self._flying: list[SimulatedCopy] = []
        self.links_measured = self.caches_emptied = 0
        clock.listeners.append(self._land)

    def offload(self, source: torch.Tensor, host: HostBuffer) -> SimulatedCopy:
        """See `Transfer`."""
        for piece in host.pieces:
            piece.fill_(NOTHING)
        start_ms = max(self._clock.now_ms, self._out_end_ms)
        self._out_end_ms = start_ms + self._link.out_ms(host.size_bytes) * self._slowdown
        pairs = [(part, target) for target, part in host.pairs(source)]
        return self._fly(pairs, host, self._out_end_ms)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, SimulatedCopy]:
        """See `Transfer`."""
        block = torch.full((host.size_bytes,), NOTHING, dtype=torch.uint8).view(host.dtype).view(host.shape)
        start_ms = max(self._clock.now_ms, self._in_end_ms, getattr(after, "finish_ms", 0.0))
        self._in_end_ms = start_ms + self._link.in_ms(host.size_bytes) * self._slowdown
        return block, self._fly(list(host.pairs(block)), host, self._in_end_ms)

    def host_reader_done(self, host: HostBuffer) -> None:
        """What still reads or writes the block does so before anybody else can write it."""
        for copy in [copy for copy in self._flying if copy.host is host]:
            self._flying.remove(copy)
            copy.move()

    def stamp(self) -> SimulatedStamp:
        """See `Transfer`."""
        return SimulatedStamp(self._clock.now_ms)

    def synchronize(self) -> None:
        """Compute is done when its call returns."""

    def link(self) -> Link | None:
        """See `Transfer`."""
        self.links_measured += 1
        return self._link

    def free_bytes(self) -> int | None:
        """See `Transfer`."""
        return self._free_bytes

    def empty_cache(self) -> None:
        """See `Transfer`."""
        self.caches_emptied += 1

    def _fly(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], host: HostBuffer, finish_ms: float
    ) -> SimulatedCopy:
        copy = SimulatedCopy(self._clock, pairs, host, finish_ms)
        self._flying.append(copy)
        return copy

    def _land(self) -> None:
        landed = sorted(
            (copy for copy in self._flying if copy.finish_ms <= self._clock.now_ms),
            key=lambda copy: copy.finish_ms,
        )
        for copy in landed:
            self._flying.remove(copy)
            copy.move()
