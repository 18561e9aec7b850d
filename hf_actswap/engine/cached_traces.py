"""What a segment of the model packs at every call: observed until two calls are equal, then predicted from
them.

Following a layer's ops costs more than many a small op: a function mode names them, hooks on its modules
follow the path, every storage gets an owner. But a layer does the same work at every step. So each call is
written down, one `Step` for each tensor that autograd saves: how many operators into the call, of which
dtype, and what the plan does with it. After two equal calls the steps are taken in this order, and only the
comparison runs.

A call that does not match its cached trace (other inputs took another branch) is never wrong, since swapping
and keeping give the same numbers: the rest of that one layer is kept or swapped by the layer's rule, all
later layers of the forward are followed again, and so is everything until two calls are alike once more.
After ``MOST_MISMATCHES`` the model is taken to change at every call, and cached traces are no longer used.

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
from .tickets import SwapGroup, SwapTicket, Ticket
from .views import View

logger = logging.getLogger(__name__)

MOST_MISMATCHES = 3
BETWEEN: Literal["between"] = "between"

Segment = Scope | Literal["between"]
"""A scope, or all that runs outside of any, in order."""


@dataclass(frozen=True, slots=True)
class SavedStep:
    """One saved tensor that is swapped, or that its own node made.

    Args:
        offset_ops: operators since the segment began, or began anew.
        dtype: of the tensor.
        windows: of its swap; ``None``: its own node made it, and it is kept, detached.
        whole: how it looks, if it is contiguous and all of its storage, and was swapped.
        asked: what the plan says of it, whatever became of it.
    """

    offset_ops: int
    dtype: torch.dtype
    windows: Windows | None
    whole: View | None
    asked: Action


@dataclass(frozen=True, slots=True)
class SmallStep:
    """One saved tensor that was to be swapped and was too small.

    Args:
        offset_ops: as of a `SavedStep`.
        size_bytes: of the tensor.
        own_output: whether its own node made it, so that a ticket must hold it detached.
        otherwise: what is done with one of another size, which may move.
    """

    offset_ops: int
    size_bytes: int
    own_output: bool
    otherwise: SavedStep


Step = int | SmallStep | SavedStep
"""An int is a tensor that is kept as it is, by its ``offset_ops``: most are such."""

CachedTrace = Sequence[Step]


def step_of(
    saved: torch.Tensor,
    asked: Action,
    action: Action,
    ticket: Ticket,
    offset_ops: int,
    too_small: bool,
) -> Step:
    """Write down what was made of ``saved``, in its pack hook; ``too_small``: to be swapped."""
    own_output = made_by_packing_node(saved)
    if action.kind != "swap":
        return SavedStep(offset_ops, saved.dtype, None, None, asked) if own_output else offset_ops
    whole = ticket.group.whole if isinstance(ticket, SwapGroup | SwapTicket) else None
    looks_whole = whole is not None and View.of(saved) == whole
    step = SavedStep(offset_ops, saved.dtype, action.windows, whole if looks_whole else None, asked)
    return SmallStep(offset_ops, saved.nbytes, own_output, step) if too_small else step


class CachedTraces:
    """Of one applied plan.

    Args:
        scopes: those that have one.
        between: whether what runs between them has one.
    """

    def __init__(self, scopes: frozenset[Scope], between: bool) -> None:
        self.segments: frozenset[Segment] = scopes | {BETWEEN} if between else scopes
        self._last: dict[Segment, list[Step]] = {}
        self._known: dict[Segment, CachedTrace] = {}
        self._mismatches = self._mismatches_between = 0

    def __getitem__(self, segment: Segment) -> CachedTrace | None:
        """The cached trace of a segment; ``None``: follow it."""
        return self._known.get(segment)

    def knows(self, segments: frozenset[Scope]) -> bool:
        """Whether all of ``segments`` have one."""
        return self._known.keys() >= segments

    def watched(self, segment: Segment, steps: list[Step]) -> None:
        """A call of ``segment`` ended that was followed from beginning to end."""
        mismatches = self._mismatches_between if segment == BETWEEN else self._mismatches
        if mismatches >= MOST_MISMATCHES or segment not in self.segments:
            return
        if self._last.get(segment) == steps:
            self._known[segment] = steps
        else:
            self._last[segment] = steps

    def mismatched(self, segment: Segment) -> None:
        """A call did not match its cached trace: forget it, and if it was a layer's, all of them."""
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
