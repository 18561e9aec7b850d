"""Where and with what a result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from hf_actswap.engine.link import Link, measure_link
from hf_actswap.version import __version__

_RATE = "_bytes_per_ms"
_GB_PER_S_IN_BYTES_PER_MS = 1e6


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
        "link_gb_per_s": link_gb_per_s(measure_link(device)),
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


def link_gb_per_s(link: Link) -> dict[str, float]:
    """Return the rates of a link in GB/s (10^9 bytes), under the names of `Link` without their unit.

    ``out`` is device to host; ``out_beside_in`` is that rate while the other direction is busy too.
    """
    names = [item.name for item in fields(link) if item.name.endswith(_RATE)]
    return {name.removesuffix(_RATE): getattr(link, name) / _GB_PER_S_IN_BYTES_PER_MS for name in names}
