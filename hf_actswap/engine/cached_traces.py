"""Records what autograd saves in a call of each segment of the model; two equal records predict later calls.

Following a layer's ops costs more than many a small op itself: a function mode names them, hooks on its
modules follow the path, every storage gets an owner. But a layer does the same work at every step. So each
call is recorded, one `Step` for each tensor that autograd saves: how many operators into the call, of which
dtype, and what the plan does with it. After two equal records later calls are only compared with the record,
which says what to do with each saved tensor.

A call that does not match its cached trace (other inputs took another branch) never gives wrong results,
since swapping and keeping give the same numbers. The rest of that one layer is kept or swapped by the layer's
rule. All later layers are followed again, and so is everything until two calls are equal once more. After
``MOST_MISMATCHES`` the model is taken to change at every call, and cached traces are no longer used.

Only layers that swap or keep have cached traces: recomputation needs the op itself, not only its outcome.
What runs between the layers (rotary embedding, loss) is a segment of its own; if it does not match, the
traces of the layers are still used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..plan.actions import Scope, Windows
from .autograd_state import made_by_packing_node
from .fates import Action
from .tickets import Place, SwapGroup, SwapTicket, Ticket

logger = logging.getLogger(__name__)

MOST_MISMATCHES = 3
BETWEEN: Literal["between"] = "between"

Segment = Scope | Literal["between"]
"""A scope; or ``between``: everything that runs outside of all scopes, in order."""


@dataclass(frozen=True, slots=True)
class SavedStep:
    """One saved tensor that is swapped, or that is an output of the node that saves it.

    Args:
        offset_ops: operators since the segment began, or since it went on after a scope.
        dtype: dtype of the tensor.
        windows: windows of its swap; ``None``: it is an output of its node, and is kept, detached.
        place: its place on its storage if it was swapped, else ``None``.
        asked: the plan's action for it, even if something else was done.
    """

    offset_ops: int
    dtype: torch.dtype
    windows: Windows | None
    place: Place | None
    asked: Action


@dataclass(frozen=True, slots=True)
class SmallStep:
    """One saved tensor that the plan swaps, but that was too small.

    Args:
        offset_ops: as of a `SavedStep`.
        size_bytes: size of the tensor.
        own_output: whether it is an output of the node that saves it, so that it must be held detached.
        otherwise: the step for a tensor of another size in its place, which may be swapped.
    """

    offset_ops: int
    size_bytes: int
    own_output: bool
    otherwise: SavedStep


Step = int | SmallStep | SavedStep
"""One saved tensor. An int, its ``offset_ops``, stands for one that is kept as it is; most are such."""

CachedTrace = Sequence[Step]


def step_of(
    saved: torch.Tensor,
    asked: Action,
    action: Action,
    ticket: Ticket,
    offset_ops: int,
    too_small: bool,
) -> Step:
    """Return the record of a saved tensor, in its pack hook; ``too_small``: too small for its swap."""
    own_output = made_by_packing_node(saved)
    if action.kind != "swap":
        return SavedStep(offset_ops, saved.dtype, None, None, asked) if own_output else offset_ops
    place = Place.of(saved) if isinstance(ticket, SwapGroup | SwapTicket) else None
    step = SavedStep(offset_ops, saved.dtype, action.windows, place, asked)
    return SmallStep(offset_ops, saved.nbytes, own_output, step) if too_small else step


class CachedTraces:
    """The cached traces of one applied plan, and the records from which they are made.

    Args:
        scopes: scopes that may have a cached trace.
        between: whether the segment between the scopes may have one.
    """

    def __init__(self, scopes: frozenset[Scope], between: bool) -> None:
        self.segments: frozenset[Segment] = scopes | {BETWEEN} if between else scopes
        self._last: dict[Segment, list[Step]] = {}
        self._known: dict[Segment, CachedTrace] = {}
        self._mismatches = self._mismatches_between = 0

    def __getitem__(self, segment: Segment) -> CachedTrace | None:
        """Return the cached trace of a segment; ``None``: its ops must be followed."""
        return self._known.get(segment)

    def knows(self, segments: frozenset[Scope]) -> bool:
        """Whether all of ``segments`` have a cached trace."""
        return self._known.keys() >= segments

    def watched(self, segment: Segment, steps: list[Step]) -> None:
        """Take the record of a whole call of ``segment``; if it equals the last one, it is the trace."""
        mismatches = self._mismatches_between if segment == BETWEEN else self._mismatches
        if mismatches >= MOST_MISMATCHES or segment not in self.segments:
            return
        if self._last.get(segment) == steps:
            self._known[segment] = steps
        else:
            self._last[segment] = steps

    def mismatched(self, segment: Segment) -> None:
        """Forget the trace of ``segment``, which a call did not match; for a scope, forget all traces."""
        if segment == BETWEEN:
            self._mismatches_between += 1
            self._known.pop(BETWEEN, None)
            self._last.pop(BETWEEN, None)
            return
        self._mismatches += 1
        then = "from now on each op is followed" if self._mismatches >= MOST_MISMATCHES else "learning anew"
        logger.info("%s ran other operators than before; %s", segment, then)
        self._known.clear()
        self._last.clear()
