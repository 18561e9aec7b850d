"""``hf-actswap env``: shows versions, devices and host memory of this machine, also for bug reports."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import RenderableType
from rich.table import Table

from ..engine.host_memory import (
    SYS,
    available_bytes,
    budget_bytes,
    locked_memory_limit,
    node_of,
    ranks_on_this_machine,
    usable_cpus,
)
from ..engine.link import Link, measure_link
from ..version import __version__
from . import options
from .output import Answer, answer, link_text, size_text

_PACKAGES = ("transformers", "accelerate", "datasets", "huggingface_hub", "scipy", "highspy", "peft", "trl")
_DRIVER = Path("/proc/driver/nvidia/version")


def _shown(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    table = Table.grid(padding=(0, 2))
    for name, version in found["versions"].items():
        table.add_row(name, version or "not installed")
    table.add_row("machine", found["machine"])
    table.add_row("driver", found["driver"] or "none")
    for index, device in enumerate(found["devices"]):
        beside = "" if device["numa_node"] is None else f", NUMA node {device['numa_node']}"
        table.add_row(f"device {index}", f"{device['name']}, {size_text(device['memory_bytes'])}{beside}")
        if device["link"] is not None:
            table.add_row("  link", link_text(Link(**device["link"])))
    if not found["devices"]:
        table.add_row("devices", "none: training would run on the CPU")
    table.add_row("processors", f"{found['cpus']}, {found['numa_nodes'] or 1} NUMA node(s)")
    host = "unknown"
    if found["host_per_rank_bytes"] is not None:
        free, share = size_text(found["host_available_bytes"]), size_text(found["host_per_rank_bytes"])
        host = f"{free} free; a rank may take {share} for swap"
    table.add_row("host memory", host)
    table.add_row("page-locked", found["locked_memory"])
    yield table


def env(
    link: Annotated[
        bool, typer.Option("--measure-link", help="Measure copies between host and each device.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    answer("env", as_json, lambda: _environment(link))


def _environment(measures_link: bool) -> Answer:
    available, ranks = available_bytes(), ranks_on_this_machine()
    document = {
        "versions": {
            "hf_actswap": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version_of(name) for name in _PACKAGES},
        },
        "machine": f"{platform.system()} {platform.machine()}",
        "driver": _driver(),
        "devices": [_facts(device, measures_link) for device in _devices()],
        "cpus": len(usable_cpus()),
        "numa_nodes": len(list((SYS / "devices" / "system" / "node").glob("node[0-9]*"))),
        "host_available_bytes": available,
        "host_per_rank_bytes": budget_bytes(None, ranks, available),
        "locked_memory": locked_memory_limit(),
    }
    return Answer(document, _shown(document))


def _version_of(package: str) -> str | None:
    try:
        return installed(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        text = _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return f"NVIDIA {found[1]}" if found else None


def _devices() -> Iterator[torch.device]:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        yield from (torch.device(kind.type, at) for at in range(torch.accelerator.device_count()))


def _facts(device: torch.device, measures_link: bool) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "name": device.type if properties is None else properties.name,
        "memory_bytes": 0 if properties is None else properties.total_memory,
        "numa_node": node_of(device),  # None: unknown, or there is only one node
        # This takes 128 MiB of page-locked memory.
        "link": asdict(measure_link(device)) if measures_link else None,
    }
