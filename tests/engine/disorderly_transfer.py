"""A machine whose copies take as long as a test says, and which notices when memory is freed too early.

Copies out run one after another, and so do copies back, as on two streams; how the two interleave with each
other and with compute follows from the durations alone. Bytes move only when the clock reaches the end of a
copy. The transfer holds neither a source nor a block: what is gone when its copy ends was freed too early,
and on an accelerator the copy would read, or write, somebody else's memory. A block is full of NaN until its
copy has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_actswap.engine import Copy, HostBuffer
from hf_actswap.engine.stats import PendingTime
from tests.engine.recording_transfer import RecordingTransfer

Direction = Literal["out", "in"]
NAN_BYTE = 0xFF


class Machine:
    """Compute's clock, and what the copies do at their time.

    Args:
        compute_ms: how long each beat of compute takes, round and round.

    Attributes:
        now_ms: compute's time.
        violations: what was freed too early, in words.
    """

    def __init__(self, compute_ms: Sequence[int]) -> None:
        self.now_ms = 0
        self.violations: list[str] = []
        self._compute_ms = cycle(compute_ms)
        self._ends: list[tuple[int, int, DisorderlyCopy]] = []
        self._count = 0

    def beat(self, *_: object) -> None:
        """Compute does something."""
        self.advance(self.now_ms + next(self._compute_ms))

    def advance(self, to_ms: int) -> None:
        """Compute goes on to a time, and the copies that end by then end in order."""
        while self._ends and self._ends[0][0] <= to_ms:
            heapq.heappop(self._ends)[2].end()
        self.now_ms = max(self.now_ms, to_ms)

    def run(self, copy: DisorderlyCopy) -> None:
        """Let a copy end at its time."""
        heapq.heappush(self._ends, (copy.finish_ms, self._count, copy))
        self._count += 1

    def finish(self) -> None:
        """Let everything end."""
        while self._ends:
            self.advance(self._ends[0][0])


class DisorderlyCopy:
    """A copy between a host block and device memory that somebody else must keep alive.

    Args:
        machine: whose clock it follows.
        direction: out to the host, or in.
        device: uint8, shape (bytes,); its storage is not held.
        host: the block; held, as the pool does.
        finish_ms: when it ends.
        waits: whether compute waits for it; a mutation where not.
    """

    def __init__(
        self,
        machine: Machine,
        direction: Direction,
        device: torch.Tensor,
        host: HostBuffer,
        finish_ms: int,
        waits: bool,
    ) -> None:
        self._machine, self._direction, self._waits = machine, direction, waits
        self._storage = StorageWeakRef(device.untyped_storage())
        self._first, self._size_bytes = int(device.storage_offset()) * device.element_size(), device.nbytes
        self._host, self.finish_ms = host, finish_ms
        self.complete = False
        machine.run(self)

    def end(self) -> None:
        """The bytes arrive."""
        self.complete = True
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            what = "source released" if self._direction == "out" else "block dropped"
            self._machine.violations.append(f"{what} before its copy {self._direction} was complete")
            return
        device = torch.empty(0, dtype=torch.uint8)
        device.set_(storage, self._first, (self._size_bytes,), (1,))
        for piece, part in self._host.pairs(device.view(self._host.dtype).view(self._host.shape)):
            target, source = (piece, part) if self._direction == "out" else (part, piece)
            target.data.copy_(source)  # as a copy engine does: no new version

    def synchronize(self) -> None:
        """The host waits."""
        self._machine.advance(self.finish_ms)

    def wait(self) -> PendingTime | None:
        """See `hf_actswap.engine.transfer.Copy`."""
        if self._waits:
            self.synchronize()
        return None


class DisorderlyTransfer(RecordingTransfer):
    """A `Transfer` on a `Machine`. Host blocks are ordered as `StreamTransfer` orders them.

    Args:
        machine: the clock.
        out_ms, in_ms: durations of the copies of each direction, round and round.
        never_waits: the direction in which `wait` returns at once, which a correct engine cannot survive.
        hold: keep the sources, for `poison_sources`; they are then never let go too early.

    Attributes:
        copies: of either direction, so far.
    """

    def __init__(
        self,
        machine: Machine,
        out_ms: Sequence[int],
        in_ms: Sequence[int],
        never_waits: Direction | None = None,
        hold: bool = False,
    ) -> None:
        super().__init__()
        self._machine, self._never_waits, self._hold = machine, never_waits, hold
        self._durations_ms: dict[Direction, Any] = {"out": cycle(out_ms), "in": cycle(in_ms)}
        self._lane_end_ms: dict[Direction, int] = {"out": 0, "in": 0}
        self._held: list[torch.Tensor] = []
        self.copies = 0

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """See `Transfer`: after the last reload that reads the block, which may still be on its way."""
        after, host.last_use = host.last_use, None
        if self._hold:
            self._held.append(source)
        return self._copy("out", source, host, after)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """See `Transfer`."""
        block = torch.full((host.size_bytes,), NAN_BYTE, dtype=torch.uint8).view(host.dtype).view(host.shape)
        copy = self._copy("in", block, host, after if isinstance(after, DisorderlyCopy) else None)
        host.last_use = copy
        return block, copy

    def host_reader_done(self, host: HostBuffer) -> None:
        """The block's ``last_use`` orders the next writer."""

    def poison_sources(self) -> None:
        """Fill what was swapped with NaN, unseen by autograd; once a forward has ended, all is released."""
        for source in self._held:
            source.data.fill_(NAN_BYTE)
        self._held.clear()

    def _copy(
        self, direction: Direction, device: torch.Tensor, host: HostBuffer, after: DisorderlyCopy | None
    ) -> DisorderlyCopy:
        start_ms = max(self._machine.now_ms, self._lane_end_ms[direction], after.finish_ms if after else 0)
        finish_ms = self._lane_end_ms[direction] = start_ms + next(self._durations_ms[direction])
        self.copies += 1
        return DisorderlyCopy(
            self._machine, direction, device, host, finish_ms, direction != self._never_waits
        )
