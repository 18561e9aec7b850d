"""What is recorded of a forward: the calls of each layer, and every use of a storage.

`forward_recorder` records it. The structure of a model (`model_structure`), what it saves (`saved_bytes`,
before the first step and in the planner's profile) and what it writes in place (`overwritten`) are read from
it.

Data flow is by storage, so views and reshapes are looked through: a storage belongs to the op that produced
it. Weights, buffers and what the model or a layer was called with are unowned; a layer owns what it outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from ..config.json_documents import Bytes, Count
from .actions import OpCall

OpKey = tuple[str, int]
"""Op path inside the layer and ordinal of the call."""

UseKind = Literal["saved", "module", "function", "returned"]

LAYER_INPUT: OpKey = ("input", 0)
"""Stands for the hidden state that a layer receives."""

_MOST_VIEWS = 4
"""A cast weight is saved as itself or as a transposed or reshaped view: a short chain."""


@dataclass(frozen=True)
class Call:
    """One function call inside a layer: what it is, and whose outputs it reads."""

    key: OpKey
    inputs: tuple[OpKey, ...]


@dataclass(frozen=True)
class StaleRead:
    """A function reads what is written in place afterwards, or by itself: the tensor that it read is no more.

    Args:
        reader: its op path, and the ordinal of its call; ``None``: it has no output of its own.
        producer: whose output it reads.
        rewritten: whether that had been written before, too, so that a new run of its producer would not give
            what was read.
    """

    reader: tuple[str, int | None]
    producer: OpKey
    rewritten: bool


@dataclass
class LayerRecord:
    """The calls of one layer in order, who produced the hidden state that it outputs, its autograd nodes."""

    calls: list[Call] = field(default_factory=list)
    output: OpKey | None = None
    nodes: int = 0
    stale: list[StaleRead] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Use:
    """Autograd saves a view of a storage, or a call receives or returns one.

    Args:
        kind: ``saved`` by autograd; received by the call of a ``module`` or ``function``; ``returned`` by a
            call.
        at: in which call. Of ``saved`` only the scope is meant.
        producer: whose the storage is at this time.
        start_bytes, stop_bytes: what the view can reach of the storage.
        size_bytes: of the view's elements.
        version: of the tensor.
        order: number of the use in the forward, whatever the storage.
    """

    kind: UseKind
    at: OpCall
    producer: OpCall
    start_bytes: Bytes
    stop_bytes: Bytes
    size_bytes: Bytes
    version: int
    order: Count = 0

    @property
    def range_bytes(self) -> tuple[int, int]:
        """First byte, and byte after the last, that the view can reach."""
        return self.start_bytes, self.stop_bytes


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """One storage and its uses in order."""

    size_bytes: Bytes
    uses: tuple[Use, ...]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage, or ``None`` if it has none.

    The number is the address of the storage object: it is unique while a `StorageWeakRef` of it is held.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter that autocast has cast, or a view of one.

    Autocast's cache holds the cast, so moving it frees nothing. It is recognised
    by its history: casts and views only, back to a parameter. (Of frozen parameters there is no history.)
    """
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        if node is not None and hasattr(node, "variable"):
            return isinstance(node.variable, nn.Parameter)
    return False
