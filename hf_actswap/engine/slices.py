"""Slices: each tensor-parallel rank keeps a part of a saved tensor that all ranks of the group hold alike.

MindSpore's ``recompute_slice_activation``: what a recomputed layer keeps of its input is cut along dim 0 by
the group size, and an all-gather comes before the recomputation.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class ReplicaRanks(Protocol):
    """The ranks that hold a tensor alike; `hf_actswap.parallel.Replicas` is one.

    Attributes:
        size: number of ranks.
    """

    size: int

    def own_slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice along dim 0, in a storage of its own."""
        ...

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the slices of all ranks along dim 0. Every rank must call it."""
        ...


class SliceTicket:
    """The ticket of a saved tensor of which this rank keeps a slice."""

    __slots__ = ("_part", "_replicas")

    def __init__(self, replicas: ReplicaRanks, part: torch.Tensor) -> None:
        self._replicas, self._part = replicas, part

    def restore(self) -> torch.Tensor:
        """Return the whole tensor, gathered from all ranks, contiguous. Every rank must call it."""
        return self._replicas.gathered(self._part)


class Slices:
    """Makes the tickets of the fate ``slice``.

    Args:
        replicas: the ranks of the tensor-parallel group.
    """

    def __init__(self, replicas: ReplicaRanks) -> None:
        self._replicas = replicas
        self._warned = False

    def ticket(self, tensor: torch.Tensor) -> SliceTicket | None:
        """Return the ticket of a detached tensor; ``None`` if it must stay whole.

        It must if its dim 0 does not divide by the group size (MindSpore's rule; logged once), or if it is
        not contiguous, because the gathered tensor would be.
        """
        if tensor.dim() == 0 or tensor.shape[0] % self._replicas.size:
            self._warn(tensor)
            return None
        if not tensor.is_contiguous():
            return None
        return SliceTicket(self._replicas, self._replicas.own_slice(tensor))

    def _warn(self, tensor: torch.Tensor) -> None:
        if not self._warned:
            logger.warning(
                "recompute_slice_activation: dim 0 of an input %s does not divide by %d tensor-parallel "
                "ranks; it is kept whole.",
                list(tensor.shape),
                self._replicas.size,
            )
        self._warned = True
