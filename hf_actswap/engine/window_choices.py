"""What the choice of windows is made from and what it says: plain data, times in ms on one clock.

Operators are autograd nodes in order of creation (`schedule`): they rise through forward, and backward runs
them falling.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from ..plan.actions import Windows


@dataclass(frozen=True, slots=True)
class Candidate:
    """A storage that autograd saves and that may be swapped.

    Args:
        size_bytes: what would move.
        ready_op: operator that first saves it: the copy out can be enqueued there. The same operator is the
            last to read it in backward.
        consumer_op: first operator of backward that reads it, that is the highest.
        windows: numbers of the user, which are obeyed; ``None``: both are chosen.
    """

    size_bytes: int
    ready_op: int
    consumer_op: int
    windows: Windows | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """When compute reaches each hook of a step in which nothing stalls.

    Args:
        forward: (operator, ms) at each hook; the last entry is the end of forward, where everything that has
            not been released is (the *turn*). Operators rise; the last may repeat.
        backward: (operator, ms) at each hook; operators fall. The last entry ends the step.

    Raises:
        ValueError: one of them is empty or out of order.
    """

    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.forward or not self.backward:
            raise ValueError("a timeline needs hooks in forward and in backward")
        if any(after[0] <= before[0] for before, after in pairwise(self.forward[:-1])) or (
            len(self.forward) > 1 and self.forward[-1][0] < self.forward[-2][0]
        ):
            raise ValueError("operators of a forward must rise")
        if any(after[0] >= before[0] for before, after in pairwise(self.backward)):
            raise ValueError("operators of a backward must fall")
        if any(after[1] < before[1] for before, after in pairwise((*self.forward, *self.backward))):
            raise ValueError("times of a step must not fall")

    @property
    def turn_ms(self) -> float:
        """When forward ends."""
        return self.forward[-1][1]


class Hooks:
    """Answers which hook of a timeline comes first or last in time.

    Args:
        timeline: hooks of forward and backward.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._forward = timeline.forward[:-1]
        self._ops = [op for op, _ in self._forward]
        self._times_ms = [ms for _, ms in self._forward]
        self._backward = timeline.backward
        self._backward_ops = [-op for op, _ in timeline.backward]
        self._backward_ms = [ms for _, ms in timeline.backward]
        self._turn_ms = timeline.turn_ms
        self.after_forward = max(timeline.forward[-1][0], self._ops[-1] + 1 if self._ops else 0)
        """An operator that no hook of forward reaches: what is released there is released at its end."""

    def ready_ms(self, ready_op: int) -> float:
        """When a copy out that an operator asks for is enqueued: at its hook, or the first after it."""
        at = bisect_left(self._ops, ready_op)
        return self._times_ms[at] if at < len(self._ops) else self._turn_ms

    def released_ms(self, ready_op: int, release_ops: int) -> float:
        """When a release is carried out: at the first hook at or after its point, and after its own hook."""
        at = max(bisect_left(self._ops, ready_op + release_ops), bisect_left(self._ops, ready_op) + 1)
        return self._times_ms[at] if at < len(self._ops) else self._turn_ms

    def release_op(self, done_ms: float) -> int:
        """The first hook at which a copy out is complete; `after_forward` where only the end comes after."""
        at = bisect_left(self._times_ms, done_ms)
        return self._ops[at] if at < len(self._ops) else self.after_forward

    def consumed_ms(self, consumer_op: int) -> float | None:
        """When backward reads what an operator saved; ``None`` where it did not come by."""
        at = bisect_left(self._backward_ops, -consumer_op)
        found = at < len(self._backward_ops) and self._backward_ops[at] == -consumer_op
        return self._backward_ms[at] if found else None

    def prefetched_ms(self, point: int) -> float:
        """When a copy back is issued: at the last hook of backward at or before its point, else the first."""
        return self._backward_ms[max(bisect_right(self._backward_ops, -point) - 1, 0)]

    def prefetch_op(self, start_ms: float) -> int:
        """The last hook of backward at or before a time, else the first."""
        return self._backward[max(bisect_right(self._backward_ms, start_ms) - 1, 0)][0]


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a candidate.

    Args:
        swap: whether it is swapped at all.
        windows: of a swap, else ``None``.
        reason: why it is kept; empty where it is swapped.
    """

    swap: bool
    windows: Windows | None
    reason: str
