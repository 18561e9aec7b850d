"""What one forward and its backward show: who is swapped, how large, and when compute got where.

Times are marks in compute's own order of work (`Stamp`), read after the step. Two things are taken out of
them, so that they are compute's time alone: waits for copies, and the pause between forward and backward in
which host memory is prepared.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.actions import Scope, Windows
from .stats import PendingTime
from .transfer import Stamp, Transfer
from .window_choices import Candidate, Timeline

Key = tuple[Scope | None, int]
"""Where a tensor was saved (scope) and as which of the swapped ones there, in order."""


@dataclass(slots=True)
class Seen:
    """A storage that the plan swaps.

    Args:
        op_path: of the plan row.
        size_bytes: what would move.
        ready_op: operator that first saves it.
        consumer_op: operator that backward first reads it in, that is the highest that saves it.
        windows: numbers of the user; ``None``: auto.
    """

    op_path: str
    size_bytes: int
    ready_op: int
    consumer_op: int
    windows: Windows | None


@dataclass(frozen=True)
class Measured:
    """An observation as numbers, the same for all ranks once they have agreed."""

    keys: tuple[Key, ...]
    candidates: tuple[Candidate, ...]
    timeline: Timeline


class Observation:
    """One step under watch.

    Args:
        transfer: whose compute is timed.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self.seen: dict[Key, Seen] = {}
        self._start = transfer.stamp()
        self._forward: list[tuple[int, Stamp, int]] = []
        self._backward: list[tuple[int, Stamp, int]] = []
        self._waits: list[PendingTime] = []
        self._turn: tuple[Stamp, int] | None = None
        self._resumed: Stamp | None = None

    def waited(self, time: PendingTime) -> None:
        """Compute waited for a copy."""
        self._waits.append(time)

    def in_forward(self, op: int) -> None:
        """A hook of forward; operators that do not rise are the same moment."""
        if not self._forward or op > self._forward[-1][0]:
            self._forward.append((op, self._transfer.stamp(), len(self._waits)))

    def turned(self) -> None:
        """Forward has ended."""
        self._turn = self._transfer.stamp(), len(self._waits)

    def resumed(self) -> None:
        """What followed the end of forward, and is none of compute's business, has ended too."""
        self._resumed = self._transfer.stamp()

    def in_backward(self, op: int) -> None:
        """A hook of backward; operators that do not fall are the same moment."""
        if not self._backward or op < self._backward[-1][0]:
            self._backward.append((op, self._transfer.stamp(), len(self._waits)))

    def forward_ms(self) -> float:
        """Compute's time until the end of forward; the device must have got there."""
        if self._turn is None:
            return 0.0
        return self._compute_ms(*self._turn, self._waited_ms())

    def measured(self) -> Measured | None:
        """The numbers, or ``None`` if forward or backward had no hook; the device must be idle."""
        if self._turn is None or self._resumed is None or not self._forward or not self._backward:
            return None
        waited_ms = self._waited_ms()
        forward = [(op, self._compute_ms(stamp, at, waited_ms)) for op, stamp, at in self._forward]
        forward.append((forward[-1][0], self._compute_ms(*self._turn, waited_ms)))
        pause_ms = self._resumed.ms_since(self._turn[0])
        backward = [
            (op, self._compute_ms(stamp, at, waited_ms) - pause_ms) for op, stamp, at in self._backward
        ]
        entries = sorted(self.seen.items(), key=lambda item: item[1].ready_op)
        return Measured(
            tuple(key for key, _ in entries),
            tuple(
                Candidate(seen.size_bytes, seen.ready_op, seen.consumer_op, seen.windows)
                for _, seen in entries
            ),
            Timeline(*_rising(forward, backward)),
        )

    def _waited_ms(self) -> list[float]:
        """Total of the first n waits, for each n."""
        totals = [0.0]
        for wait in self._waits:
            totals.append(totals[-1] + (wait.elapsed_ms() or 0.0))
        return totals

    def _compute_ms(self, stamp: Stamp, waits: int, waited_ms: list[float]) -> float:
        return stamp.ms_since(self._start) - waited_ms[waits]


_Times = tuple[tuple[int, float], ...]


def _rising(forward: list[tuple[int, float]], backward: list[tuple[int, float]]) -> tuple[_Times, _Times]:
    """Times that never fall: a clock's resolution, or a wait counted a little too long, may make them."""
    latest = 0.0
    times: list[list[tuple[int, float]]] = [[], []]
    for part, entries in zip(times, (forward, backward), strict=True):
        for op, ms in entries:
            latest = max(latest, ms)
            part.append((op, latest))
    return tuple(times[0]), tuple(times[1])
