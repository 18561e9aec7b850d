"""Starts a program on the rehearsal's device.

The program runs unchanged in a process whose environment loads the device's libraries ahead of CUDA's, and
whose Python gives PyTorch's ops their arithmetic when it imports torch (``startup/sitecustomize.py``).
Processes that it starts are on the device too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from ..config.sizes import bytes_of
from ..planner.devices import device_rates
from ..startup import python_path
from .build import Built
from .devices import device_facts
from .errors import one_problem

SETTINGS = "HF_ACTSWAP_REHEARSAL"
"""Variable of the environment that says what the device is like; it exists in a rehearsal only."""
REPORTS = "HF_ACTSWAP_REHEARSAL_REPORTS"
"""Variable of the environment with the folder into which each process writes what it saw."""
STARTUP = Path(__file__).parent / "startup"

Order = Literal["lazy", "eager", "random"]
Arithmetic = Literal["none", "small", "all"]

LOCK_MS_PER_GIB = 760.0
"""How long page-locking takes: measured beside one H200."""

_ALL_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class Options:
    """What is rehearsed on.

    Args:
        device: usual name of the device.
        devices: how many of them.
        memory: memory of each, as people write it (``40GiB``); empty: what the device has.
        order: when copies between host and device are carried out: as late as may be, at once, or at random.
        seed: of the random order.
        arithmetic: which values are computed: none, those of small tensors (masks, positions), or all.
            In ``all``, an op that has no arithmetic raises.
        small_bytes: largest tensor of an op that ``small`` computes.
        races: whether accesses to the same bytes that nothing orders are looked for.
        clock: whether work takes the time that it would on the device; without it there is the wall clock
            only.
        no_weights: whether transformers' models are made from their configuration, without files of weights.
        host_memory: host memory that a swap may count on, as ``memory``; empty: what this machine has free.
            Without values of large tensors it takes none of this machine's.
        context_bytes: memory of each device that the driver keeps for itself once a process uses the device.
        more: further settings for the libraries, by name.
    """

    device: str = "H100"
    devices: int = 1
    memory: str = ""
    order: Order = "lazy"
    seed: int = 0
    arithmetic: Arithmetic = "small"
    small_bytes: int = 1 << 20
    races: bool = True
    clock: bool = False
    no_weights: bool = False
    host_memory: str = ""
    context_bytes: int = 1 << 29
    more: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for where, value, values in (
            ("--order", self.order, get_args(Order)),
            ("--arithmetic", self.arithmetic, get_args(Arithmetic)),
        ):
            if value not in values:
                raise one_problem(where, f"one of {', '.join(values)}", repr(value))
        if not 1 <= self.devices <= 16:
            raise one_problem("--devices", "a number from 1 to 16", str(self.devices))
        self.memory_bytes()
        self.host_memory_bytes()

    def memory_bytes(self) -> int:
        """Return the memory of one device in bytes."""
        facts = device_facts(self.device)
        if not self.memory:
            return facts.memory_bytes
        wanted = _size("--memory", self.memory)
        if wanted < 2 * self.context_bytes:
            least = f"at least {2 * self.context_bytes / 2**30:g}GiB: CUDA itself takes half of that"
            raise one_problem("--memory", least, repr(self.memory))
        return wanted

    def program_bytes(self) -> int:
        """Return the memory of one device that a program can take, in bytes."""
        return self.memory_bytes() - self.context_bytes

    def host_memory_bytes(self) -> int | None:
        """Return the host memory that a swap may count on in bytes; ``None``: what this machine has free."""
        return _size("--host-memory", self.host_memory) if self.host_memory else None


def _size(option: str, text: str) -> int:
    try:
        return bytes_of(text)
    except ValueError as error:
        raise one_problem(option, "a size such as 40GB or 24GiB", repr(text), str(error)) from None


def settings_of(options: Options, built: Built) -> dict[str, str | int]:
    """Return the settings that the libraries read."""
    facts, host_bytes = device_facts(options.device), options.host_memory_bytes()
    return {
        "name": facts.name,
        "bytes": options.memory_bytes(),
        "context_bytes": options.context_bytes,
        **({} if host_bytes is None else {"host_bytes": host_bytes}),
        "devices": options.devices,
        "major": facts.capability[0],
        "minor": facts.capability[1],
        "processors": facts.processors,
        "threads": facts.threads,
        "shared_bytes": facts.shared_bytes,
        "l2_bytes": facts.l2_mib << 20,
        "order": options.order,
        "seed": options.seed,
        "races": int(options.races),
        **(_rates(options.device) if options.clock else {}),
        **({"no_weights": 1} if options.no_weights else {}),
        "level": get_args(Arithmetic).index(options.arithmetic),
        "small_bytes": options.small_bytes,
        "real_bytes": _ALL_BYTES if options.arithmetic == "all" else options.small_bytes,
        "arithmetic": str(built.arithmetic),
        **options.more,
    }


def _rates(device: str) -> dict[str, str | int]:
    rates = device_rates(device)
    link = {field.name: getattr(rates.link, field.name) for field in fields(rates.link)} if rates.link else {}
    own = {
        name: getattr(rates, name)
        for name in (
            "half_flop_per_ms",
            "full_flop_per_ms",
            "attention_flop_per_ms",
            "bytes_per_ms",
            "launch_ms",
        )
    }
    fabric = rates.fabric.bytes_per_ms if rates.fabric else 0.0
    numbers = {**own, **link, "fabric_bytes_per_ms": fabric, "lock_ms_per_gib": LOCK_MS_PER_GIB}
    return {"clock": 1, **{name: repr(float(value)) for name, value in numbers.items()}}


def environment(options: Options, built: Built, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process on the device.

    Args:
        options: what the device is like.
        built: its libraries.
        base: the environment to start from; ``None``: this process's.
    """
    found = dict(os.environ if base is None else base)
    found[SETTINGS] = ";".join(f"{key}={value}" for key, value in settings_of(options, built).items())
    for name, value in (
        ("LD_PRELOAD", str(built.runtime)),
        ("LD_LIBRARY_PATH", str(built.folder)),
    ):
        found[name] = os.pathsep.join(filter(None, (value, found.get(name, ""))))
    found["PYTHONPATH"] = python_path(str(STARTUP), found.get("PYTHONPATH", ""))
    # What would let PyTorch look for real devices, or hide ours.
    for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        found.pop(name, None)
    return found


def replace_process(options: Options, built: Built, command: Sequence[str]) -> None:
    """Become the program ``command`` on the device; does not return.

    Raises:
        RehearsalError: there is no such program.
    """
    try:
        os.execvpe(command[0], list(command), environment(options, built))
    except FileNotFoundError:
        raise one_problem("command", "a program that exists", repr(command[0])) from None
