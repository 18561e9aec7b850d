"""Copies on an accelerator that come when nobody expects them, and memory that is reused at once.

A kernel that spins for a random time stands before copies on their streams, and now and then on the compute
stream. What was released is allocated anew and filled with NaN on the compute stream: memory that is freed
before its copy out is complete arrives on the host as NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch

from hf_actswap.engine import Copy, HostBuffer, StreamTransfer
from hf_actswap.engine.transfer import _StreamCopy

Direction = Literal["out", "in"]
SPINS_CYCLES = (0, 0, 0, 20_000, 100_000, 400_000)
"""Drawn from; about 0.2 ms at most, 0.05 ms on average."""
NAN_BYTE = 0xFF


class StressedTransfer(StreamTransfer):
    """See the module's text.

    Args:
        device: with an index.
        seed: of the delays.
        spins_cycles: drawn from for each copy.
        never_waits: the direction in which `wait` returns at once, which a correct engine cannot survive.
    """

    def __init__(
        self,
        device: torch.device,
        seed: int = 0,
        spins_cycles: Sequence[int] = SPINS_CYCLES,
        never_waits: Direction | None = None,
    ) -> None:
        super().__init__(device)
        self.never_waits = never_waits
        self.released_bytes: list[int] = []
        self._random, self._spins_cycles = random.Random(seed), spins_cycles

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """See `Transfer`."""
        self._reuse_released()
        self._delay(self._out)
        return StressedCopy(self, "out", host.size_bytes, super().offload(source, host))

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """See `Transfer`."""
        self._reuse_released()
        self._delay(self._in)
        block, copy = super().reload(host, after)
        return block, StressedCopy(self, "in", host.size_bytes, copy)

    def _delay(self, stream: torch.Stream) -> None:
        """Spin behind all that compute was given so far, and sometimes let compute spin ahead of that."""
        compute = torch.accelerator.current_stream(self.device)
        if self._random.random() < 0.05:
            torch.cuda._sleep(max(self._spins_cycles))
        cycles = self._random.choice(self._spins_cycles)
        if cycles:
            enqueued = torch.Event(self.device)
            enqueued.record(compute)
            stream.wait_event(enqueued)
            with stream:
                torch.cuda._sleep(cycles)

    def _reuse_released(self) -> None:
        """Take what was freed out of the compute stream's pool, write NaN over it, and give it back."""
        sizes_bytes, self.released_bytes = self.released_bytes, []
        taken = [
            torch.full((size_bytes,), NAN_BYTE, dtype=torch.uint8, device=self.device)
            for size_bytes in sizes_bytes
        ]
        del taken


class StressedCopy(_StreamCopy):
    """Tells its transfer that it was waited for; the memory is freed just after."""

    __slots__ = ("_direction", "_reuse", "_size_bytes")

    def __init__(self, owner: StressedTransfer, direction: Direction, size_bytes: int, copy: Copy) -> None:
        assert isinstance(copy, _StreamCopy)
        super().__init__(owner, copy.done, copy._block, copy._home)
        self._reuse, self._direction, self._size_bytes = owner, direction, size_bytes

    def wait(self) -> object:
        """See `hf_actswap.engine.transfer.Copy`."""
        self._reuse.released_bytes.append(self._size_bytes)
        return None if self._reuse.never_waits == self._direction else super().wait()
