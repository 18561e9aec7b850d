"""Counts what libraries move to the host, and what is page-locked there; frees what allocators cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
    gc.collect()
    if device.type == "cpu":
        return
    torch.accelerator.empty_cache()
    # PyTorch 2.11 has the private name only, and builds for the CPU alone may have none.
    public = getattr(torch.accelerator, "empty_host_cache", None)
    empty_host_cache = public or getattr(torch._C, "_host_emptyCache", None)
    if empty_host_cache is not None:
        empty_host_cache()
