"""Where in a step the storages of a profile are made, read and let go: what does not depend on a plan.

A step is counted in **moments**: each span of the forward is one, the turn is one, and each span that
backward comes by is one, in the order of `Span.backward_place` (its number among those is its *place*).
Within a moment nothing is told apart: what a span makes or reads is on the device from its start to its end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...engine.windows import Timeline
from ...plan.actions import Scope
from ...plan.model_structure import is_below
from ...plan.saved_bytes import Use
from ..profile import Profile
from ..record.lives import Places, lives


@dataclass(frozen=True, slots=True)
class Pack:
    """Autograd saves a tensor: the engine gets control.

    Args:
        order: of the use; what is no use of the profile comes half way to the next.
        span: in which.
        op: operator of the node.
        at_end: whether the span itself makes what is saved, and so has run by then.
    """

    order: float
    span: int
    op: int
    at_end: bool


class StepOrder:
    """A profile as the simulator reads it.

    Args:
        profile: of a step.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile, self.spans = profile, profile.spans
        self.places = Places(profile.spans)
        self.scope_spans: dict[Scope, list[int]] = {}
        for number, span in enumerate(self.spans):
            if span.call[0] is not None:
                self.scope_spans.setdefault(span.call[0], []).append(number)
        self.start_ms = list(accumulate((span.forward_ms for span in self.spans), initial=0.0))
        self.lives = lives(profile.saved, self.spans, self.places)
        self._op_of_order: dict[int, int] = {}
        for pack_order, op in profile.hooks:  # a use comes ahead of what is saved behind it and is none
            self._op_of_order.setdefault(pack_order, op)
        self.packs = self._packs()
        self.ops_of_span: list[tuple[int, ...]] = [()] * len(self.spans)
        """Operators at which each span packs, falling: backward's hooks in it."""
        for pack in reversed(self.packs):
            if pack.op not in self.ops_of_span[pack.span]:
                self.ops_of_span[pack.span] += (pack.op,)
        self._pack_spans = [pack.span for pack in self.packs]
        self.born_in: list[list[int]] = [[] for _ in self.spans]
        """Saved storages by the span that makes them."""
        for number, life in enumerate(self.lives):
            if life.last_place >= 0 and life.made_in >= 0:
                self.born_in[life.made_in].append(number)
        self.functions = self._functions()
        self.temporary_bytes = self._temporary_bytes()
        self.touching: dict[Scope, list[int]] = {}
        self.scopes_of: list[tuple[Scope, ...]] = []
        for number, storage in enumerate(profile.saved.storages):
            met = {
                scope for use in storage.uses for scope in (use.at[0], use.producer[0]) if scope is not None
            }
            self.scopes_of.append(tuple(sorted(met, key=str)))
            for scope in met:
                self.touching.setdefault(scope, []).append(number)

    def use_op(self, use: Use, span: int) -> int:
        """The operator at which the engine meets a use: of a call, the one before its first node."""
        return (
            self.saved_op(use.order, span) if use.kind == "saved" else max(self.spans[span].first_op - 1, 0)
        )

    def saved_op(self, order: int, span: int) -> int:
        """The operator that saves, and so reads in backward; if it is not known, the last of its span."""
        last = self.spans[span].first_op + max(self.spans[span].num_ops - 1, 0)
        return self._op_of_order.get(order, last)

    def inside(self, scope: Scope, path: str) -> list[int]:
        """Spans at and below a path of a scope."""
        return [
            number for number in self.scope_spans.get(scope, ()) if is_below(self.spans[number].call[1], path)
        ]

    def packs_between(self, first: int, last: int) -> list[Pack]:
        """Packs in spans from ``first`` to ``last``."""
        return self.packs[bisect_left(self._pack_spans, first) : bisect_right(self._pack_spans, last)]

    def last_op(self, scope: Scope) -> int:
        """The last operator of a scope."""
        span = self.spans[self.scope_spans[scope][-1]]
        return span.first_op + max(span.num_ops - 1, 0)

    def _packs(self) -> list[Pack]:
        found, listed = [], set()
        for storage, life in zip(self.profile.saved.storages, self.lives, strict=True):
            for use, span in zip(storage.uses, life.spans, strict=True):
                if use.kind == "saved":
                    found.append(Pack(use.order, span, self.use_op(use, span), life.made_in == span))
                    listed.add((use.order, found[-1].op))
        first_ops = [span.first_op for span in self.spans]
        for order, op in self.profile.hooks:
            if (order, op) not in listed:
                span = max(bisect_right(first_ops, op) - 1, 0)
                found.append(Pack(order + 0.5, span, op, False))
        return sorted(found, key=lambda pack: (pack.order, pack.op))

    def _functions(self) -> frozenset[int]:
        """Spans that are calls of functions, and not what runs between them."""
        return frozenset(
            span
            for storage, life in zip(self.profile.saved.storages, self.lives, strict=True)
            for use, span in zip(storage.uses, life.spans, strict=True)
            if use.at == self.spans[span].call
            and (use.kind == "function" or (use.kind == "returned" and use.at[2] is not None))
        )

    def _temporary_bytes(self) -> list[int]:
        """What each span needs while it runs forward, beyond what stays: what it needs when run again."""
        stays = list(accumulate(reversed([span.forward_base_bytes for span in self.spans]), min))[::-1]
        return [span.forward_base_bytes - least for span, least in zip(self.spans, stays, strict=True)]


def timeline(
    forward: Sequence[tuple[int, float]], turn_ms: float, backward: Sequence[tuple[int, float]]
) -> Timeline:
    """Return a timeline of hooks (operator, ms); operators that do not rise, or fall, are one moment."""
    rising: list[tuple[int, float]] = []
    for op, ms in forward:
        if not rising or op > rising[-1][0]:
            rising.append((op, max(ms, rising[-1][1] if rising else 0.0)))
    falling: list[tuple[int, float]] = []
    for op, ms in backward:
        if not falling or op < falling[-1][0]:
            falling.append((op, ms))
    return Timeline((*rising, (rising[-1][0] if rising else 0, turn_ms)), tuple(falling))
