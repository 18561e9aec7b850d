"""What a layer packs at every call: watched until two calls in a row are alike, then gone by.

Following a layer's ops costs more than many a small op: a function mode names them, hooks on its modules
follow the path, every storage gets an owner. But a layer does the same work at every step. So each call is
written down, one `Step` for each tensor that autograd saves: how many operators into the call, of which
dtype, and what the plan does with it. After two equal calls the steps are read off in order, and nothing
else runs but the comparison.

A call that departs from its routine (other inputs took another branch) is never wrong, since swapping and
keeping give the same numbers: the rest of that one layer is kept or swapped by the layer's rule, all later
layers of the forward are followed again, and so is everything until two calls are alike once more. After
``MOST_DEPARTURES`` the model is taken at its word: nothing is a routine any more.

Only layers that swap or keep have routines: recomputation needs the op itself, not only its outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..plan.actions import Scope
from .fates import Action

logger = logging.getLogger(__name__)

MOST_DEPARTURES = 3


class Step(NamedTuple):
    """One saved tensor.

    Args:
        offset_ops: operators since the call began.
        dtype: of the tensor.
        own_output: whether its own node made it, so that a ticket must hold it detached.
        action: a swap; ``None``: kept.
    """

    offset_ops: int
    dtype: torch.dtype
    own_output: bool
    action: Action | None


Routine = Sequence[Step]


class Routines:
    """Of one applied plan.

    Args:
        scopes: those that have one.
    """

    def __init__(self, scopes: frozenset[Scope]) -> None:
        self.scopes = scopes
        self._last: dict[Scope, list[Step]] = {}
        self._known: dict[Scope, Routine] = {}
        self._departures = 0

    def __getitem__(self, scope: Scope) -> Routine | None:
        """The routine of a scope; ``None``: follow it."""
        return self._known.get(scope)

    def knows(self, scopes: frozenset[Scope]) -> bool:
        """Whether all of ``scopes`` have one."""
        return self._known.keys() >= scopes

    def watched(self, scope: Scope, steps: list[Step]) -> None:
        """A call of ``scope`` ended that was followed from beginning to end."""
        if self._departures >= MOST_DEPARTURES or scope not in self.scopes:
            return
        if self._last.get(scope) == steps:
            self._known[scope] = steps
        else:
            self._last[scope] = steps

    def departed(self, scope: Scope) -> None:
        """A call did not keep to its routine: forget them all."""
        self._departures += 1
        then = "from now on each op is followed" if self._departures >= MOST_DEPARTURES else "learning anew"
        logger.info("%s ran other operators than before; %s", scope, then)
        self._known.clear()
        self._last.clear()
