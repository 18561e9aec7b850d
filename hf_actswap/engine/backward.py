"""The backward of one forward. Autograd asks it for each saved tensor; then it starts copies that are due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from .autograd_state import running_node_number
from .operator_clock import OperatorClock
from .schedule import PrefetchOrder
from .tickets import Ticket, restore


class Fetchable(Protocol):
    """Something on the host that backward will need on the device."""

    def fetch(self) -> None:
        """Start the copy back."""


Reference = Callable[[], Fetchable | None]
"""A weak reference: returns ``None`` when the object is gone."""


class Backward:
    """Gives autograd the saved tensors of one forward, and starts the copies back in time.

    Autograd's graph holds this object through the unpack hook. References to swapped storages are weak: only
    tickets keep them alive.
    """

    def __init__(self) -> None:
        self.clock = OperatorClock()
        self._order: PrefetchOrder[Reference] | None = None
        self._watchers: tuple[Callable[[int], object], ...] = ()
        self._idle = True

    def watch(self, watcher: Callable[[int], object]) -> None:
        """Tell ``watcher`` the operator at each hook."""
        self._watchers, self._idle = (*self._watchers, watcher), False

    def schedule(self, order: PrefetchOrder[Reference]) -> None:
        """Set what to prefetch and when, after the forward has ended."""
        self._order, self._idle = order, False

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """Return a saved tensor to a node of this graph, after starting the copies that are due by now."""
        if not self._idle:
            self._reached()
        if not isinstance(ticket, tuple):
            return ticket.restore()
        if ticket[0]._version == ticket[1]:
            return ticket[0]  # most tickets: calling `restore` would cost as much as all else here
        return restore(ticket)

    def _reached(self) -> None:
        node = running_node_number()
        if node is None:
            return
        op = self.clock.operator(node) if self.clock.jumps else node
        for watcher in self._watchers:
            watcher(op)
        if self._order is not None:
            for reference in self._order.due(op):
                waiting = reference()
                if waiting is not None:
                    waiting.fetch()
