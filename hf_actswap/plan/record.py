"""The record of a forward: the calls of each layer, and every use of a storage.

`forward_recorder` makes it; read from it are the structure of a model (`model_structure`), what the model
saves (`saved_bytes`, before the first step and in the planner's profile) and what it writes in place
(`settle`).

Data flow is by storage, not by tensor: views share the storage of their base, and a storage belongs to the op
that made it. Weights, buffers and the arguments of model and layers are unowned; a layer owns its output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from ..config.documents import Bytes, Count
from .actions import OpCall

OpKey = tuple[str, int]
"""Op path inside a layer, and which call of this op it is, counted from 0."""

UseKind = Literal["saved", "module", "function", "returned"]

LAYER_INPUT: OpKey = ("input", 0)
"""Stands for the hidden state that a layer receives."""

_MOST_VIEWS = 4
"""Longest chain of views that is followed: a cast weight is saved as it is, transposed or reshaped."""


@dataclass(frozen=True)
class Call:
    """One function call inside a layer: its key, and the ops whose outputs it reads."""

    key: OpKey
    inputs: tuple[OpKey, ...]


@dataclass(frozen=True)
class StaleRead:
    """A function reads a tensor that is written in place later, or by itself: the values read are lost.

    Args:
        reader: op path of the function, and the ordinal of its call; ``None``: it has no output of its own.
        producer: the op whose output is read.
        rewritten: whether the tensor had been written before the read, too. Then running ``producer`` again
            would not give the values that were read.
    """

    reader: tuple[str, int | None]
    producer: OpKey
    rewritten: bool


@dataclass
class LayerRecord:
    """One layer: its calls in order, the op that made its output, its autograd nodes, its stale reads."""

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
        at: the call. If the kind is ``saved``, only its scope has a meaning.
        producer: the call that owns the storage at this time.
        start_bytes, stop_bytes: first byte of the storage that the view can reach, and byte after the last.
        size_bytes: size of the view's elements.
        version: version counter of the tensor.
        order: number of the use in the forward, counted over all storages.
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
        return self.start_bytes, self.stop_bytes


@dataclass(frozen=True, slots=True)
class SavedStorage:
    size_bytes: Bytes
    uses: tuple[Use, ...]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage object, or ``None`` if it has none.

    It is unique while a `StorageWeakRef` of the storage is held.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter that autocast has cast, or a view of one.

    Autocast's cache holds the cast, so moving it frees nothing. It is recognised by its history: only casts
    and views, back to a parameter. (The cast of a frozen parameter has no history.)
    """
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        if node is not None and hasattr(node, "variable"):
            return isinstance(node.variable, nn.Parameter)
    return False
