"""Measures how many bytes a step holds, on the device and on the host.

On an accelerator the caching allocators count. The CPU's allocator does not, and resident memory says little
about tensors (freed pages stay with the process). So on the CPU a dispatch mode follows every storage that an
operator creates, and checks whether it is still alive. Both include a backward that reloads or recomputes. On
the CPU scratch memory inside a kernel is not seen. Host copies of swapped tensors are not counted there: the
engine allocated them in earlier steps. The mode slows everything down, so no step is timed under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """Follows the storages that operators create; views and in-place results create none.

    Counts from entry to exit: what existed before belongs to the baseline state.
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


class CopyMeter(TorchDispatchMode):
    """Counts the bytes that operators copy from a device to the host, for methods without such a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        source = next((leaf for leaf in args if isinstance(leaf, torch.Tensor)), None)
        if func is torch.ops.aten.copy_.default:
            source = args[1]
        elif func is not torch.ops.aten._to_copy.default:
            return result
        if result.device.type == "cpu" and source is not None and source.device.type != "cpu":
            self.copied_bytes += result.numel() * result.element_size()
        return result


def pinned_bytes(device: torch.device) -> int | None:
    """Return the bytes of page-locked memory that PyTorch's allocator owns; ``None``: it does not count."""
    statistics = getattr(getattr(torch, device.type, None), "host_memory_stats", None)
    if statistics is None:
        return None
    found = statistics().get("allocated_bytes.current")
    return None if found is None else int(found)


def give_back_cached_memory(device: torch.device) -> None:
    """Free unused memory of the caching allocators, on the device and page-locked on the host."""
    if device.type == "cpu":
        return
    torch.accelerator.empty_cache()
    # PyTorch 2.11 has the private name only, and builds for the CPU alone may have none.
    public = getattr(torch.accelerator, "empty_host_cache", None)
    empty_host_cache = public or getattr(torch._C, "_host_emptyCache", None)
    if empty_host_cache is not None:
        empty_host_cache()
