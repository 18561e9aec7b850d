"""PyTorch's CUDA allocator while a plan is on: its segments grow, so that few bytes are fragments, and it
holds no more than a written budget.

By default each large block has a segment of its own, and what was freed serves a larger block only if the
whole segment goes back to the driver. A plan frees and takes tensors in an order of its own, between blocks
of gigabytes (logits, their copies in fp32, their gradients). Rehearsed, a training of an 8B then reserves
18 % more than it allocates, and runs out of memory that is there. With expandable segments (PyTorch's
"Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF") pages of 20 MiB go back alone, and only partly used
pages are lost.

PyTorch reads the setting at each allocation (``CUDACachingAllocator.cpp``: ``get_free_block``,
``alloc_block``), so it may change while tensors exist: those stay in their segments. All settings are set
together; those of the user are passed on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from .hook_wrappers import Undo

logger = logging.getLogger(__name__)

SETTING = "expandable_segments"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def segments_expand(device: torch.device) -> bool:
    """Return whether the allocator of ``device`` takes its memory in expandable segments now."""
    return _is_native(device) and bool(_settings()[SETTING])


def let_segments_expand(device: torch.device) -> Undo | None:
    """Let the allocator take expandable segments from now on; return what undoes it.

    ``None``: nothing was changed, because the device has no such allocator, segments expand already, the user
    has set `SETTING` in the environment, memory pools are in use that do not support it, or the driver
    refuses it, as in some virtual machines.
    """
    if not _is_native(device) or sys.platform != "linux" or _MEMORY_POOLS in sys.modules:
        return None
    before = _settings()
    if before[SETTING]:
        return None
    if set_by_user():
        logger.info(_USERS_CHOICE, SETTING)
        return None
    written = next((str(before[name]) for name in VARIABLES if before.get(name)), "")
    torch.cuda.empty_cache()  # segments of the other kind serve no later request
    _set(_joined(written, True))
    try:
        torch.empty(_PAGE_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        _set(_joined(written, False))
        logger.info("PyTorch's allocator cannot use %s here: %s", SETTING, str(error))
        return None
    logger.info(_SWITCHED, SETTING)
    return lambda: _set(_joined(written, False))


def limit_memory(device: torch.device, limit_bytes: int) -> Undo | None:
    """Let the allocator hold at most ``limit_bytes``, and give back what it caches to stay below.

    It has then less to give out: what does not fit raises ``torch.OutOfMemoryError``. Returns what undoes it;
    ``None``: the device has no such limit, or a lower one. A rank's own limit
    (``set_per_process_memory_fraction``) comes back.

    PyTorch compares what is asked for with its limit, and an expandable segment then grows by whole pages
    (``CUDACachingAllocator.cpp``: ``alloc_block``, ``try_allocate_expandable_block``): it holds up to a page
    more than its limit, which is set that much lower here.
    """
    if device.type != "cuda":
        return None
    _, total_bytes = torch.cuda.mem_get_info(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    if limit_bytes >= before * total_bytes:
        return None
    torch.cuda.set_per_process_memory_fraction(max(limit_bytes - _PAGE_BYTES, 0) / total_bytes, device)
    return lambda: torch.cuda.set_per_process_memory_fraction(before, device)


def usable_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator that are free or that this process holds, within its fraction."""
    free, total = torch.accelerator.get_memory_info(device)
    usable = int(free) + int(torch.accelerator.memory_reserved(device))
    if device.type != "cuda":
        return usable
    return min(usable, int(total * torch.cuda.get_per_process_memory_fraction(device)))


def free_bytes(device: torch.device) -> int | None:
    """Return how much the process may still allocate on an accelerator; ``None``: not known (the CPU)."""
    if device.type == "cpu":
        return None
    return usable_bytes(device) - int(torch.accelerator.memory_allocated(device))


def set_by_user(environment: Mapping[str, str] = os.environ) -> str:
    """Return what the environment says of `SETTING`, such as ``expandable_segments:True``; else ``""``."""
    parts = [part.strip() for name in VARIABLES for part in environment.get(name, "").split(",")]
    return next((part for part in parts if part.startswith(f"{SETTING}:")), "")


_PAGE_BYTES = 20 * 2**20
"""Size of the pages of large blocks (``kLargeBuffer`` in ``CUDACachingAllocator.cpp``)."""

_SWITCHED = (
    "PyTorch's allocator uses %s while the plan is on: without them it reserves up to a fifth more than a "
    "step needs."
)
_USERS_CHOICE = "%s is off in the environment: fragments may take more memory than the plan leaves for them."
_MEMORY_POOLS = "vllm.device_allocator.cumem"
"""vLLM's pools for its sleep mode. PyTorch rejects memory pools of one's own (``torch.cuda.MemPool``) beside
expandable segments (pytorch issue 147851)."""


def _is_native(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"


def _settings() -> Mapping[str, Any]:
    found: Mapping[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return found


def _joined(written: str, expand: bool) -> str:
    """Return all settings: those that are not named go back to their defaults."""
    return f"{written},{SETTING}:{expand}" if written else f"{SETTING}:{expand}"


def _set(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)
