"""``hf-actswap env``: shows versions, devices and host memory of this machine, also for bug reports."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
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
from .output import answer, link_text, size_text

_PACKAGES = ("transformers", "accelerate", "datasets", "huggingface_hub", "scipy", "peft", "trl")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Args:
        name: name of the hardware.
        memory_bytes: total memory of the device.
        numa_node: NUMA node that it is attached to; ``None``: unknown, or there is only one node.
        link: rates of the link to the host; ``None``: not measured.
    """

    name: str
    memory_bytes: int
    numa_node: int | None
    link: Link | None


@dataclass(frozen=True)
class Environment:
    """Software and hardware of this machine. An `output.Answer`."""

    versions: Mapping[str, str | None]
    machine: str
    driver: str | None
    devices: tuple[Device, ...]
    cpus: int
    numa_nodes: int
    host_available_bytes: int | None
    host_per_rank_bytes: int | None
    locked_memory: str
    ok: bool = True

    def document(self) -> Mapping[str, Any]:
        """Return the fields as JSON values."""
        return {
            "versions": dict(self.versions),
            "machine": self.machine,
            "driver": self.driver,
            "devices": [asdict(device) for device in self.devices],
            "cpus": self.cpus,
            "numa_nodes": self.numa_nodes,
            "host_available_bytes": self.host_available_bytes,
            "host_per_rank_bytes": self.host_per_rank_bytes,
            "locked_memory": self.locked_memory,
        }

    def shown(self) -> Iterable[RenderableType]:
        """Yield the text and tables to print."""
        table = Table.grid(padding=(0, 2))
        for name, version in self.versions.items():
            table.add_row(name, version or "not installed")
        table.add_row("machine", self.machine)
        table.add_row("driver", self.driver or "none")
        for index, device in enumerate(self.devices):
            beside = "" if device.numa_node is None else f", NUMA node {device.numa_node}"
            table.add_row(f"device {index}", f"{device.name}, {size_text(device.memory_bytes)}{beside}")
            if device.link is not None:
                table.add_row("  link", link_text(device.link))
        if not self.devices:
            table.add_row("devices", "none: training would run on the CPU")
        table.add_row("processors", f"{self.cpus}, {self.numa_nodes or 1} NUMA node(s)")
        table.add_row("host memory", _host_text(self.host_available_bytes, self.host_per_rank_bytes))
        table.add_row("page-locked", self.locked_memory)
        yield table


def env(
    link: Annotated[
        bool, typer.Option("--measure-link", help="Measure copies between host and each device.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show versions, devices, host memory and, if asked, the speed of the link between them."""
    answer("env", as_json, lambda: environment(link))


def environment(measures_link: bool) -> Environment:
    """Return software and hardware of this machine.

    Args:
        measures_link: whether copies to and from each accelerator are timed (128 MiB of page-locked memory).
    """
    available, ranks = available_bytes(), ranks_on_this_machine()
    return Environment(
        versions={
            "hf_actswap": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version_of(name) for name in _PACKAGES},
        },
        machine=f"{platform.system()} {platform.machine()}",
        driver=_driver(),
        devices=tuple(_device(index, measures_link) for index in range(_count())),
        cpus=len(usable_cpus()),
        numa_nodes=len(list((SYS / "devices" / "system" / "node").glob("node[0-9]*"))),
        host_available_bytes=available,
        host_per_rank_bytes=budget_bytes(None, ranks, available),
        locked_memory=locked_memory_limit(),
    )


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


def _count() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _device(index: int, measures_link: bool) -> Device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # `_count` found one
    device = torch.device(kind.type, index)
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return Device(
        name=properties.name if properties is not None else device.type,
        memory_bytes=properties.total_memory if properties is not None else 0,
        numa_node=node_of(device),
        link=measure_link(device) if measures_link else None,
    )


def _host_text(available: int | None, per_rank: int | None) -> str:
    if available is None or per_rank is None:
        return "unknown"
    return f"{size_text(available)} free; a rank may take {size_text(per_rank)} for swap"
