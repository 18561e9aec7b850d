"""The plan as the hooks read it: what to do with the tensors that an op produces.

Slices: each tensor-parallel rank keeps a part of a saved tensor that all ranks of the group hold alike.

MindSpore's ``recompute_slice_activation``: what a recomputed layer keeps of its input is cut along dim 0 by
the group size, and an all-gather comes before the recomputation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ..plan.actions import SCOPES, MemoryPlan, Scope, Windows
from ..plan.model_structure import ModelStructure
from ..plan.saved_bytes import RUN_AGAIN, RecomputedModules
from .tickets import RestorableTicket

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
    """Makes the tickets of the fate ``slice``; ``replicas``: the ranks of the tensor-parallel group."""

    def __init__(self, replicas: ReplicaRanks) -> None:
        self._replicas = replicas
        self._warned = False

    def ticket(self, tensor: torch.Tensor) -> SliceTicket | None:
        """Return the ticket of a detached tensor; ``None`` if it must stay whole.

        It must if its dim 0 does not divide by the group size (MindSpore's rule; logged once), or if it is
        not contiguous, because the gathered tensor would be.
        """
        if tensor.dim() == 0 or tensor.shape[0] % self._replicas.size:
            if not self._warned:
                logger.warning(
                    "recompute_slice_activation: dim 0 of an input %s does not divide by %d tensor-parallel "
                    "ranks; it is kept whole.",
                    list(tensor.shape),
                    self._replicas.size,
                )
            self._warned = True
            return None
        if not tensor.is_contiguous():
            return None
        return SliceTicket(self._replicas, self._replicas.own_slice(tensor))


Kind = Literal["keep", "swap", "recompute_inside", "recompute_function", "slice"]


@dataclass(frozen=True)
class Action:
    """What to do with a saved tensor.

    Args:
        kind: ``recompute_inside`` while a region of a module runs; ``recompute_function`` for an op that is
            a region of its own, also a communication that is done again; ``slice`` for an input of which each
            tensor-parallel rank keeps a part.
        windows: windows of a swap; ``None``: to be chosen by measurement (`auto_windows`).
        op_path: op path of the plan row that decides the fate.
        scope: scope of the op that produced the tensor.
        ticket: makes the ticket of a detached tensor, or returns ``None`` if the tensor must stay. ``None``:
            the ticket needs more than the tensor, and is made elsewhere.
    """

    kind: Kind = "keep"
    windows: Windows | None = None
    op_path: str = ""
    scope: Scope | None = None
    ticket: Callable[[torch.Tensor], RestorableTicket | None] | None = None


KEEP = Action()

_TRACED = ("keep", "swap")
"""The fates of ops that a cached trace can carry out."""


class FateTable:
    """Looks fates up once and remembers them.

    Args:
        structure: says which ops are modules and which are functions.
        slices: makes the tickets of ``slice``; ``None``: no tensor parallelism, and no row says ``slice``.

    Attributes:
        recomputed: index of the plan.
    """

    def __init__(self, plan: MemoryPlan, structure: ModelStructure, slices: Slices | None) -> None:
        self._slices = slices
        self.recomputed = RecomputedModules(plan, structure.modules)
        self._known: dict[tuple[Scope, str, int | None], Action] = {}
        compiled = {layer.index for layer in structure.all_layers if layer.compiled}
        self.checkpointed_layers = self.recomputed.whole_layers
        modules = self.recomputed.modules
        self.named_layers = self.recomputed.scopes_with_op_rows.intersection(modules) - compiled
        """Layers in which ops must be named; in compiled ones the tracer names them (`compiled_regions`)."""
        followed = {
            _next(row.scope) if row.fate == "slice" else row.scope
            for row in plan.rows
            if row.fate not in _TRACED and row.scope not in self.checkpointed_layers
        }
        self.traceable_scopes = frozenset({*modules, *SCOPES}) - (followed - compiled)
        """Scopes whose calls may run from a cached trace (`forward_pass`)."""
        self.all_traceable = not followed

    def __getitem__(self, key: tuple[Scope, str, int | None]) -> Action:
        """Return the action for (scope, op path, ordinal)."""
        action = self._known.get(key)
        if action is None:
            action = self._known[key] = self._look_up(*key)
        return action

    def use_plan(self, plan: MemoryPlan) -> None:
        """Look fates up in ``plan`` from now on, which recomputes fewer ops of the same layers."""
        self.recomputed = RecomputedModules(plan, self.recomputed.modules)
        self._known.clear()

    def _look_up(self, scope: Scope, path: str, ordinal: int | None) -> Action:
        row = self.recomputed.plan.row(scope, path, ordinal)
        if row is None or row.fate == "keep":
            return KEEP
        if row.fate == "swap":
            return Action("swap", row.windows, row.op_path, scope)
        if row.fate == "slice" and self._slices is not None:
            return Action("slice", ticket=self._slices.ticket)
        assert row.fate in RUN_AGAIN, row.fate
        is_module = self.recomputed.is_root(scope, row.op_path)
        return Action("recompute_inside" if is_module else "recompute_function")


def _next(scope: Scope) -> Scope:
    """Return the decoder layer that reads the output of ``scope``."""
    return scope + 1 if isinstance(scope, int) else 0
