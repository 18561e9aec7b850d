"""Finds the processors next to a device, and binds threads to them.

They are read from Linux's ``/sys`` (Documentation/ABI/testing/sysfs-bus-pci, sysfs-devices-node). On other
systems, and on machines with one NUMA node, nothing is known and no thread is bound.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

SYS = Path("/sys")


def node_of(
    device: torch.device,
    sys_root: Path = SYS,
    properties: Callable[[torch.device], Any] = torch.cuda.get_device_properties,
) -> int | None:
    """Return the NUMA node to which ``device`` is connected; ``None`` if unknown or if there is only one
    node.

    Args:
        device: a device with its index. Only CUDA and ROCm devices report their PCI address.
        sys_root: where ``/sys`` is.
        properties: gives ``pci_domain_id``, ``pci_bus_id`` and ``pci_device_id`` of the device.
    """
    nodes = sys_root / "devices" / "system" / "node"
    if device.type != "cuda" or len(list(nodes.glob("node[0-9]*"))) < 2:
        return None
    found = properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int((sys_root / "bus" / "pci" / "devices" / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of(node: int, sys_root: Path = SYS) -> frozenset[int]:
    """Return the processors of a node on which this thread may run; empty if unknown or none."""
    path = sys_root / "devices" / "system" / "node" / f"node{node}" / "cpulist"
    try:
        there = parse_cpulist(path.read_text())
    except (OSError, ValueError):
        return frozenset()
    return there & usable_cpus()


def usable_cpus() -> frozenset[int]:
    """Return the processors on which this thread may run; empty if the platform does not report them."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def parse_cpulist(text: str) -> frozenset[int]:
    """Return the numbers in a list such as ``0-3,8``. Raises `ValueError` for anything else."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def bind(cpus: frozenset[int]) -> Callable[[], None]:
    """Let the calling thread run on ``cpus`` only; return a function that undoes it, from any thread.

    Does nothing if ``cpus`` is empty or the platform cannot bind. Threads that this thread starts meanwhile
    inherit the binding and keep it.
    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return _nothing
    thread, before = threading.get_native_id(), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # processors taken away since they were listed
        return _nothing

    def undo() -> None:
        try:
            os.sched_setaffinity(thread, before)
        except OSError:  # the thread has ended
            return

    return undo


@contextmanager
def bound_to(cpus: frozenset[int]) -> Iterator[None]:
    """Let the calling thread run on ``cpus`` only, within the block; anywhere if ``cpus`` is empty."""
    undo = bind(cpus)
    try:
        yield
    finally:
        undo()


def bind_rank(
    device: torch.device,
    sys_root: Path = SYS,
    properties: Callable[[torch.device], Any] = torch.cuda.get_device_properties,
) -> Callable[[], None]:
    """Bind the calling thread to the processors next to ``device``, and log it; return what undoes it.

    Does nothing if the machine has one node, the device's node is unknown, the thread can run nowhere else
    anyway, or the platform cannot bind.
    """
    node = node_of(device, sys_root, properties)
    cpus = frozenset[int]() if node is None else cpus_of(node, sys_root)
    if cpus == usable_cpus():
        return _nothing
    undo = bind(cpus)
    if undo is not _nothing:
        logger.info(
            "Bound to the %d processors of NUMA node %d, next to %s; "
            "memory: {bind_numa: false} switches it off.",
            len(cpus),
            node,
            device,
        )
    return undo


def _nothing() -> None:
    """There is nothing to undo."""
