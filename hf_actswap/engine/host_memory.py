"""How much host memory there is for this rank, whether a plan fits into it, and which processors are near it.

Page-locked memory cannot be swapped out, so a rank that takes too much meets the kernel's OOM killer and not
an exception. So it gets a budget before anything is allocated, and free memory is read again for each slab.

Functions that read take the paths of ``/proc`` and the cgroup tree; the rest is arithmetic. Its rules:
``MemAvailable`` is the kernel's estimate of what can be had without swapping (proc(5)); a cgroup may take
``memory.max - memory.current``, and its inactive file pages are reclaimed before it is killed
(Documentation/admin-guide/cgroup-v2; version 1: ``memory.limit_in_bytes``, ``memory.usage_in_bytes``). The
limit of every ancestor holds too.

The processors next to a device are read from Linux's ``/sys`` (Documentation/ABI/testing/sysfs-bus-pci,
sysfs-devices-node). On other systems, and on machines with one NUMA node, nothing is known and no thread is
bound.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

SYS = Path("/sys")

_GIB = 2**30
_MARGIN_SHARE = 0.1
"""Part of the available memory that is left to other processes."""
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that all ranks of this machine together can still allocate; ``None``: unknown."""
    limits = [*_machine_limit(proc), *_cgroup_limits(proc, cgroup)]
    return max(0, min(limits)) if limits else None


def ranks_on_this_machine(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes share the machine (``LOCAL_WORLD_SIZE``: torchrun, accelerate), else 1."""
    try:
        return max(1, int(environment.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def margin_bytes(available: int) -> int:
    """Return how many bytes a budget leaves to others: other processes, and what else this one allocates."""
    return int(available * _MARGIN_SHARE)


def floor_bytes(available: int | None) -> int:
    """Return how many bytes stay free whatever a budget says: half of its margin; of an unknown number none.

    The other half is for what others allocate after the budget was made (batches, the workers that load
    them): without it no plan that uses its budget would get it.
    """
    return 0 if available is None else margin_bytes(available) // 2


def budget_bytes(cap_bytes: int | None, ranks: int, available: int | None) -> int | None:
    """Return the bytes that one rank may take, ``None`` if nothing limits it.

    They are its cap, or if that is less its share of what is available without the margin.

    Args:
        cap_bytes: the user's cap for one rank; ``None``: no cap.
        available: result of `available_bytes`, read before any of the ranks has taken its part.
    """
    if available is None:
        return cap_bytes
    share = max(0, available - margin_bytes(available)) // ranks
    return share if cap_bytes is None else min(cap_bytes, share)


def room_beyond(kept_free_bytes: int, read: Callable[[], int | None] = available_bytes) -> Callable[[], int]:
    """Return a function that reads the bytes that may be allocated if ``kept_free_bytes`` are to stay free.

    Budgets keep the ranks from taking each other's part, so only other processes have to be watched. It must
    not divide by the number of ranks again: a rank that is slow to allocate would then get a fraction of its
    own part.
    """

    def room() -> int:
        available = read()
        return sys.maxsize if available is None else available - kept_free_bytes

    return room


def forecast(need_bytes: int, cap_bytes: int | None, ranks: int, available: int | None) -> tuple[bool, str]:
    """Return whether ``need_bytes`` per rank fit, and one or two sentences about it for people.

    They say what all ranks need, and what to do if it does not fit. Arguments as for `budget_bytes`.
    """
    allowed = budget_bytes(cap_bytes, ranks, available)
    fits = allowed is None or need_bytes <= allowed
    ranks_text = f"1 rank x {_gib(need_bytes)}"
    if ranks > 1:
        ranks_text = f"{ranks} ranks x {_gib(need_bytes)} = {_gib(ranks * need_bytes)}"
    free = "" if available is None else f"; the machine has {_gib(available)} free"
    if fits:
        return True, f"Swap needs {ranks_text} of host memory{free}."
    message = f"Swap needs {ranks_text} of host memory, and a rank may take {_gib(allowed or 0)}"
    if cap_bytes is not None and allowed == cap_bytes:
        message += f" (host_memory_gib{free}). Raise host_memory_gib or swap fewer layers."
    else:
        message += (
            f" ({_gib(available or 0)} free on the machine, {_MARGIN_SHARE:.0%} of it left to others). "
            "Swap fewer layers, or start fewer ranks on this machine; host_memory_gib cannot exceed this."
        )
    return False, message


def locked_memory_limit() -> str:
    """Return RLIMIT_MEMLOCK in words, for error texts: some drivers obey it, though not for root."""
    if sys.platform == "win32":
        return "no RLIMIT_MEMLOCK"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    return f"RLIMIT_MEMLOCK is {text}"


def _machine_limit(proc: Path) -> Iterator[int]:
    machine_kib = _number(proc / "meminfo", "MemAvailable")
    if machine_kib is not None:
        yield machine_kib * 1024


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterator[int]:
    """Yield the bytes that each cgroup of this process may still take."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _limits_upwards(cgroup, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _limits_upwards(cgroup / "memory", path, _VERSION_1)


def _limits_upwards(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield the free bytes of our cgroup and of all above it. In a container only the mount may exist."""
    limit_name, usage_name, reclaimable_name = names
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limit, usage = _text(group / limit_name).strip(), _text(group / usage_name).strip()
        if limit.isdecimal() and usage.isdecimal():
            yield int(limit) - int(usage) + (_number(group / "memory.stat", reclaimable_name) or 0)


def _number(path: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file of lines such as ``name: 12 kB``; ``None``: not there."""
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if words[:1] == [name]:
            return int(words[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"


def node_of(
    device: torch.device,
    sys_root: Path = SYS,
    properties: Callable[[torch.device], Any] = torch.cuda.get_device_properties,
) -> int | None:
    """Return the NUMA node to which ``device`` is connected; ``None`` if unknown or the only one.

    Args:
        device: a device with its index. Only CUDA and ROCm devices report their PCI address.
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
        return parse_cpulist(path.read_text()) & usable_cpus()
    except (OSError, ValueError):
        return frozenset()


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

    Does nothing if the device's node is unknown or the only one, or the thread can run nowhere else anyway.
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
