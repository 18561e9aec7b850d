"""A transfer whose copies complete when a test says so, and which records the order of events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hf_actswap.engine import BlockingTransfer, Copy, HostBuffer
from hf_actswap.engine.stats import PendingTime


class NoTime:
    """A wait of no length, which is measured as one."""

    def elapsed_ms(self) -> float:
        return 0.0


class _RecordedCopy:
    """Runs when the test says so, or when compute waits for it.

    Args:
        owner: in whose queue it stands.
        direction: ``out`` or ``in``.
        number: among those of its direction.
        pairs: (host, device) of each piece.
        host: the block.
    """

    __slots__ = ("_direction", "_number", "_owner", "_pairs", "_waited", "complete", "host")

    def __init__(
        self,
        owner: RecordingTransfer,
        direction: str,
        number: int,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        host: HostBuffer,
    ) -> None:
        self._owner, self._direction, self._number, self._pairs = owner, direction, number, pairs
        self.host = host
        self.complete = self._waited = False

    def run(self) -> None:
        if self.complete:
            return
        if self._direction == "out":
            for target, source in self._pairs:
                target.copy_(source)
        else:
            for source, target in self._pairs:
                target.data.copy_(source)  # a copy engine makes no version
        self._pairs = ()
        self.complete = True
        self._owner.log.append((self._direction, self._number, "done"))

    def wait(self) -> PendingTime | None:
        if not self._waited:  # later readers of the block call it too
            self._owner.log.append((self._direction, self._number, "wait"))
            self._waited = True
        if self.complete:
            return None
        queue = self._owner.queue
        if queue[0] is self:  # as ever in a step without surprises
            queue.popleft().run()
        else:
            self._owner.complete_through(self)
        return NoTime()


def _nothing(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 1


class RecordingTransfer(BlockingTransfer):
    """Copies that complete when the test calls `complete`, in the order in which they were asked for.

    New device blocks and host blocks are filled with NaN (of integers: with ones) until their copy runs, so
    that a read that comes too early gives wrong numbers and not lucky ones.

    Args:
        device: where reloaded tensors live.
        poison: whether to fill.

    Attributes:
        log: what happened, in order; `events` shows it.
        queue: copies that are not complete, oldest first.
    """

    def __init__(self, device: torch.device | None = None, poison: bool = True) -> None:
        super().__init__(device or torch.device("cpu"))
        self._poison = poison
        self.log: list[tuple[object, ...]] = []
        self.queue: deque[_RecordedCopy] = deque()
        self._outs = 0
        self._ins = 0

    @property
    def in_flight(self) -> int:
        """Copies asked for and not complete."""
        return len(self.queue)

    @property
    def events(self) -> list[str]:
        """What happened, in order: ``out 0 start``, ``out 0 done``, ``out 0 wait``, ``in 0 start``, ..."""
        return [" ".join(map(str, event)) for event in self.log]

    def note(self, event: str) -> None:
        """Something else has happened."""
        self.log.append((event,))

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """Copy ``source`` (contiguous, on the device) to ``host``, which has been told to hold it."""
        pairs = host.pairs(source)
        if self._poison:
            for target, _ in pairs:
                target.fill_(_nothing(target.dtype))
        self._outs += 1
        return self._start("out", self._outs - 1, pairs, host)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """Copy ``host`` to a new contiguous tensor on the device, once ``after`` is complete."""
        block = host.new_block(self._device)
        if self._poison:
            block.fill_(_nothing(host.dtype))
        self._ins += 1
        return block, self._start("in", self._ins - 1, host.pairs(block), host)

    def host_reader_done(self, host: HostBuffer) -> None:
        """What still reads or writes the block runs before anybody else can write it."""
        if not self.queue:
            return
        last = next((copy for copy in reversed(self.queue) if copy.host is host), None)
        if last is not None:
            self.complete_through(last)

    def complete(self, count: int | None = None) -> None:
        """Let the ``count`` oldest copies complete; ``None``: all."""
        for _ in range(len(self.queue) if count is None else min(count, len(self.queue))):
            self.queue.popleft().run()

    def complete_through(self, copy: _RecordedCopy) -> None:
        """Let every copy up to and including ``copy`` complete."""
        while not copy.complete:
            self.queue.popleft().run()

    def _start(
        self,
        direction: str,
        number: int,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        host: HostBuffer,
    ) -> _RecordedCopy:
        copy = _RecordedCopy(self, direction, number, pairs, host)
        self.log.append((direction, number, "start"))
        self.queue.append(copy)
        return copy
