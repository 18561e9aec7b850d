"""The host memory of one rank: how much it may take, where it comes from, near which processors it lies."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .host_memory import available_bytes, budget_bytes, margin_bytes, ranks_on_this_machine, room_beyond
from .host_pool import HostPool
from .numa import cpus_of, node_of
from .slabs import PageableSlabs, PinnedSlabs, SlabSource

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Takes bytes ready, and bytes to be ready in all; equal at the end."""

_EXACT = 1
"""Slab size of ordinary memory: slabs are exactly as large as what is asked for, there is nothing to save."""


class HostMemory:
    """Makes the pool of one applied plan.

    The machine's free memory is read when the plan is applied, before any rank has taken its part of it; a
    rank may take its share less a margin, and no slab is allocated that would eat into the margin, whoever
    else has grown meanwhile. What does not fit stays on the device and is counted.

    Args:
        cap_bytes: the user's, per rank; ``None``: none.
    """

    def __init__(self, cap_bytes: int | None) -> None:
        available = available_bytes()
        self._budget_bytes = budget_bytes(cap_bytes, ranks_on_this_machine(), available)
        self._margin_bytes = margin_bytes(available) if available is not None else 0

    def pool(self, device: torch.device, pinned: bool, progress: Progress | None) -> HostPool:
        """Return an empty pool for swapping from ``device``."""
        room = room_beyond(self._margin_bytes)
        if not pinned:
            return HostPool(PageableSlabs(), self._budget_bytes, _EXACT, progress, room)
        node = node_of(device)
        cpus = frozenset[int]() if node is None else cpus_of(node)
        source: SlabSource = PinnedSlabs(device, cpus)
        return HostPool(source, self._budget_bytes, progress=progress, room=room)
