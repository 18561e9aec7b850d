"""Where and with what a result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from hf_actswap.version import __version__

_PIECE_BYTES = 256 * 2**20
_PIECES = 8


def versions() -> dict[str, str]:
    """Return the versions that a number depends on."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "hf_actswap": __version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit(repository: Path) -> dict[str, Any]:
    """Return the commit of the checkout and whether tracked files differ from it; ``None`` outside of git."""
    head = _git(repository, "rev-parse", "HEAD")
    changes = _git(repository, "status", "--porcelain", "--untracked-files=no")
    return {"id": head, "dirty": bool(changes) if changes is not None else None}


def _git(repository: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=repository, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the device's name and memory and, on an accelerator, its link as measured now."""
    if device.type == "cpu":
        return {
            "device": "cpu",
            "name": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }
    _, total_bytes = torch.accelerator.get_memory_info(device)
    return {
        "device": device.type,
        "name": accelerator_name(device),
        "memory_bytes": total_bytes,
        "host_name_of_processor": _processor(),
        "link_gb_per_s": link_gb_per_s(device),
    }


def available_host_bytes() -> int:
    """Return the bytes of host memory that can be had without swapping to disk."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def accelerator_name(device: torch.device) -> str:
    """Return the name of an accelerator; its type where its backend tells none."""
    backend = getattr(torch, device.type, None)
    name = getattr(backend, "get_device_name", None)
    return str(name(device)) if name else device.type


def _processor() -> str:
    """The model of the CPU: `platform` leaves it empty on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def link_gb_per_s(device: torch.device) -> dict[str, float]:
    """Measure copies between page-locked host memory and the device.

    Returns:
        GB/s (10^9 bytes) ``out`` (device to host), ``in``, and ``both``: each way while both run.
    """
    host = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    block = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    out, back = (host[0], block[0]), (block[1], host[1])  # (target, source)
    _copies_s(device, [out, back])
    moved = _PIECES * _PIECE_BYTES / 1e9
    return {
        "out": moved / _copies_s(device, [out]),
        "in": moved / _copies_s(device, [back]),
        "both": moved / _copies_s(device, [out, back]),
    }


def _copies_s(device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Seconds until each (target, source) was copied `_PIECES` times, each pair on a stream of its own."""
    torch.accelerator.synchronize(device)
    streams = [torch.Stream(device) for _ in pairs]
    start, ends = torch.Event(device, enable_timing=True), []
    start.record(torch.accelerator.current_stream(device))
    for stream, (target, source) in zip(streams, pairs, strict=True):
        stream.wait_event(start)
        with stream:
            for _ in range(_PIECES):
                target.copy_(source, non_blocking=True)
        end = torch.Event(device, enable_timing=True)
        end.record(stream)
        ends.append(end)
    torch.accelerator.synchronize(device)
    return float(max(start.elapsed_time(end) for end in ends)) / 1e3
