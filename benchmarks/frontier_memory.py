"""How many bytes a step holds above the resting state (weights, gradients, input).

On an accelerator the caching allocator counts. The CPU has none that counts, and resident memory says
little about tensors (freed pages stay with the process), so there a dispatch mode follows every storage
that an operator creates and asks whether it still lives. Both meters see a backward that reloads or
recomputes. Not seen on the CPU: scratch memory inside a kernel. Excluded on the CPU: the host copies of
swapped tensors, which the engine allocated in the steps before and only writes to here. On the CPU the
mode slows everything down: time a step without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatorMeter:
    """Reads the caching allocator of an accelerator, from entry to exit, relative to the state at entry."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resting_bytes = 0

    def __enter__(self) -> AllocatorMeter:
        torch.accelerator.synchronize(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._resting_bytes = torch.accelerator.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is installed."""

    def held_bytes(self) -> int:
        """Return the bytes alive now."""
        return torch.accelerator.memory_allocated(self._device) - self._resting_bytes

    def peak_bytes(self) -> int:
        """Return the most bytes alive at once."""
        return torch.accelerator.max_memory_allocated(self._device) - self._resting_bytes


class StorageMeter(TorchDispatchMode):
    """Follows the storages that operators create; views and in-place results create none.

    Counts from entry to exit: what existed before belongs to the resting state.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak_bytes = 0

    def held_bytes(self) -> int:
        """Return the bytes alive now."""
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        return sum(size for _, size in self._alive.values())

    def peak_bytes(self) -> int:
        """Return the most bytes alive at once."""
        return self._peak_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            # The weak reference keeps the address from being used again: the key stays unique.
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._peak_bytes = max(self._peak_bytes, self.held_bytes())
        return result


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


MemoryMeter = AllocatorMeter | StorageMeter


def memory_meter(device: torch.device) -> MemoryMeter:
    """Return the meter for a device."""
    return StorageMeter() if device.type == "cpu" else AllocatorMeter(device)
