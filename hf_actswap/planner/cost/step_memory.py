"""The memory curve of a predicted step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ...plan.saved_bytes import OpCall
from ..profile import MemoryPoint
from .plan_program import Assembled
from .scope_fates import ScopeFate
from .step_order import StepOrder
from .step_walk import BackwardWalk, ForwardWalk


class MemoryWalk:
    """What is on the device in each moment.

    Args:
        order: of the profile.
        fates: scope by scope.
        assembled: of these.
        ahead, back: forward and backward, walked through.
        moved_state_bytes: of optimizer states that are not there.

    Attributes:
        peak_bytes: the most in use in forward and backward.
        peak_at: what ran then.
        peak_gradient_bytes: of the peak, gradients that were complete.
        kept_bytes: storages that stay until backward reads them, in all.
    """

    def __init__(
        self,
        order: StepOrder,
        fates: Sequence[ScopeFate],
        assembled: Assembled,
        ahead: ForwardWalk,
        back: BackwardWalk,
        moved_state_bytes: int,
    ) -> None:
        self._order, self._ahead, self._back = order, ahead, back
        turn = len(order.spans)
        self._ends = [0] * (order.places.last + 2)
        self._kept, self._swapped, self._dropped = ([0] * (turn + 2) for _ in range(3))
        self.kept_bytes = 0
        for fate in fates:
            for birth, place, size_bytes in fate.kept:
                self._kept[birth] += size_bytes
                self._ends[place + 1] += size_bytes
                self.kept_bytes += size_bytes
            for birth, end, size_bytes in fate.dropped:
                self._dropped[birth] += size_bytes
                self._dropped[end + 1] -= size_bytes
        self._add_moved(assembled)
        self._moved_state_bytes = moved_state_bytes
        self._base = [max(span.forward_base_bytes - moved_state_bytes, 0) for span in order.spans]
        first = order.spans[order.places.order[0]].backward_base_bytes if order.places.order else None
        last = order.spans[-1].forward_base_bytes if order.spans else 0
        self._base.append(max((last if first is None else min(last, first)) - moved_state_bytes, 0))
        self._kept, self._swapped, self._dropped = (
            list(accumulate(part))[: turn + 1] for part in (self._kept, self._swapped, self._dropped)
        )
        self._back_base = [max(size - moved_state_bytes, 0) for size in back.moments.base_bytes]
        left = self.kept_bytes
        self._back_kept = []
        self._kept_in = [left := left - end for end in self._ends]
        self._back_kept = [self._kept_in[place] for place in back.moments.places]
        self.peak_bytes, self.peak_at, place = self._peak()
        gradients, reached = order.profile.gradient_bytes, order.places.order
        self.peak_gradient_bytes = gradients[reached[place]] if gradients and reached else 0

    def points(self) -> tuple[MemoryPoint, ...]:
        """The curve: a point at each change."""
        rows = zip(
            [*self._forward_ms(), *self._back.moments.start_ms],
            [*self._base, *self._back_base],
            [*self._kept, *self._back_kept],
            [*self._swapped, *self._back.moments.swapped_bytes],
            [*self._dropped, *self._back.moments.rebuilt_bytes],
            strict=True,
        )
        found: list[MemoryPoint] = []
        last: tuple[int, ...] = ()
        for ms, *sizes in rows:
            if tuple(sizes) != last:
                last = tuple(sizes)
                found.append(MemoryPoint(ms, *sizes))
        return tuple(found)

    def _add_moved(self, assembled: Assembled) -> None:
        """Storages that move, or that a region holds; of those that nobody saves forward's part is base."""
        turn = len(self._order.spans)
        for item in assembled.moved:
            life = self._order.lives[item.storage]
            birth = life.birth if life.last_place >= 0 else life.forward_end + 1
            place = max(item.kept_place, assembled.kept_until.get(item.storage, -1))
            if place >= 0:
                self._kept[birth] += life.size_bytes
                self._ends[place + 1] += life.size_bytes
                self.kept_bytes += life.size_bytes
                continue
            moments = [self._ahead.moments.get((item.storage, copy.number), 0) for copy in item.copies]
            end = max(life.forward_end + 1, *moments, 0)
            part = self._swapped if item.copies else self._dropped
            part[min(birth, turn + 1)] += life.size_bytes
            part[min(max(end, birth), turn + 1)] -= life.size_bytes

    def _peak(self) -> tuple[int, OpCall, int]:
        """The peak, what ran then, and the place of backward: the first stands for all of forward."""
        spans, back = self._order.spans, self._back.moments
        ahead = list(map(sum, zip(self._base, self._kept, self._swapped, self._dropped, strict=True)))
        behind = list(
            map(
                sum,
                zip(self._back_base, self._back_kept, back.swapped_bytes, back.rebuilt_bytes, strict=True),
            )
        )
        if behind and max(behind) > max(ahead, default=0):
            peak = max(behind)
            moment = behind.index(peak)
            return peak, spans[back.spans[moment]].call, back.places[moment]
        peak = max(ahead, default=0)
        at = min(ahead.index(peak), len(spans) - 1) if spans else -1
        return peak, spans[at].call if spans else (None, "", None), 0

    def _forward_ms(self) -> list[float]:
        waited = [0.0] * (len(self._order.spans) + 1)
        for moment, ms in self._ahead.waits:
            waited[moment] += ms
        return [start + delay for start, delay in zip(self._order.start_ms, accumulate(waited), strict=True)]
