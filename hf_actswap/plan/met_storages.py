"""The storages that a recorded forward meets, whose they are, and how they are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .record import storage_key
from .saved_bytes import OpCall, SavedStorage, Use


@dataclass(slots=True)
class MetStorage:
    """A storage.

    Args:
        ref: keeps its address from being reused; ``None`` after `MetStorages.forget`.
        size_bytes: of all of it.
        producer: whose it is; ``None``: nobody's, and it never moves.
        outside: nobody's for good.
        uses: in order.
    """

    ref: StorageWeakRef | None
    size_bytes: int
    producer: OpCall | None
    outside: bool = False
    uses: list[Use] = field(default_factory=list)


class MetStorages:
    """All of them, by the address of the storage object."""

    def __init__(self) -> None:
        self._met: list[MetStorage] = []
        self._by_key: dict[int, MetStorage] = {}

    def own(self, values: Iterable[Any], producer: OpCall | None) -> None:
        """Set whose these tensors are, unless they are nobody's; with ``None`` those not met become that."""
        for tensor in values:
            if not isinstance(tensor, torch.Tensor) or (key := storage_key(tensor)) is None:
                continue
            met = self._by_key.get(key)
            if met is None:
                storage = tensor.untyped_storage()
                met = MetStorage(StorageWeakRef(storage), storage.nbytes(), producer, producer is None)
                self._by_key[key] = met
                self._met.append(met)
            elif producer is not None and not met.outside:
                met.producer = producer

    def find(self, tensor: object) -> MetStorage | None:
        """Return what is known of a tensor's storage."""
        key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
        return None if key is None else self._by_key.get(key)

    def used(self) -> tuple[SavedStorage, ...]:
        """Return those that were used, in the order in which they were met."""
        return tuple(SavedStorage(met.size_bytes, tuple(met.uses)) for met in self._met if met.uses)

    def forget(self) -> None:
        """Let go of the storages; their uses stay."""
        self._by_key.clear()
        for met in self._met:
            met.ref = None


def reach_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins, and where the last of its elements ends."""
    first, size = int(tensor.storage_offset()), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((length - 1) * step for length, step in steps) + 1 if tensor.numel() else 0
    return first * size, (first + reach) * size


def is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is one that the engine can move: elements in memory of ``device``, as they are."""
    return (
        tensor.device == device
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
