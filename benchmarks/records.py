"""Defines the lines of a results file, reads and writes the file, and describes machine and versions."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import accelerate
import torch
import transformers
from rich.console import Console
from rich.table import Table

from hf_actswap.engine.host_pool import PinnedSlabs
from hf_actswap.engine.link import Link, measure_link
from hf_actswap.rehearsal.launch import SETTINGS as REHEARSAL
from hf_actswap.version import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
RESULTS_VARIABLE = "HF_ACTSWAP_RESULTS"
COMMIT_VARIABLE = "HF_ACTSWAP_COMMIT"
_RATE = "_bytes_per_ms"
_GB_PER_S_IN_BYTES_PER_MS = 1e6
_PINNED_BYTES = 2**28
_WIDTH_WITHOUT_TERMINAL = 150

Status = Literal["measured", "passed", "skipped", "left out", "out of memory", "timed out", "failed"]
"""``skipped``: it cannot be measured on this machine; ``left out``: there was no time."""

Key = tuple[Any, ...]
Line = dict[str, Any]
"""A record as a JSON object of the file."""


@dataclass(kw_only=True)
class Record:
    """The fields that every line of a results file has.

    Args:
        kind: what was measured: ``frontier``, ``test``, ``out of memory`` or ``optimizer states``.
        workload: name of the preset, or of a group of tests.
        traceback: traceback of a failure; for a process that hung or died, the end of its output.
        wall_s: seconds that the row took, with everything that is not timed.
        run, measured_at: start of the command that measured it, and time at which it was recorded, in ISO
            format. Two rows of one run share machine and driver.
        environment: hardware, link, allocator settings, versions.
    """

    kind: str = "frontier"
    workload: str = ""
    status: Status = "measured"
    reason: str = ""
    traceback: str = ""
    wall_s: float | None = None
    run: str = ""
    measured_at: str = ""
    device: str = ""
    torch: str = ""
    transformers: str = ""
    commit: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether something is broken. Running out of memory is no failure but a result."""
        return self.status in ("failed", "timed out")


@dataclass
class Result(Record):
    """One method on one workload; a number that is not known is ``None``.

    Args:
        method: name of the row; ours begin with ``actswap``.
        seq: tokens of a sequence.
        head: whether this is the whole model with its loss; otherwise the decoder stack.
        ms: median of the timed steps, forward and backward, device-synchronised.
        activation_bytes: the most device memory above parameters, gradients and input, in the timed steps.
        peak_allocated_bytes, peak_reserved_bytes: the most memory that the allocator gave out, and held.
        host_bytes: memory held on the host for swapped tensors.
        swapped_bytes: bytes copied from the device to the host in one step.
        first_step_ms: time of the very first step, compilation and pinning included.
        loss: loss of the whole model; for a stack the mean of output times the fixed gradient at the output.
        grad_norm: norm of all weights' gradients.

        step_ms: time of every step in order, ``warmup_steps`` of them first.
        first_step_compile_ms: the part of ``first_step_ms`` that ``torch.compile`` took.
        first_step_pinning_ms: the part of ``first_step_ms`` in which our engine page-locked host memory;
            ``pinning_ms``: that time until the last step.
        held_bytes: bytes alive at the end of forward, above the baseline state; the output included.
        baseline_bytes: bytes allocated before the method was put on.
        prefetched_bytes, stalls, stall_ms, recomputes, rejected_bytes: the engine's counters of one step.
        adjustments: changes that rules made to the configuration, in words.
        must_be_exact: whether output and gradients must equal eager's bit for bit.
        exact, differing: whether they do (``None``: not judged), and the names of those that differ.
        ratios: ratios to eager's numbers in the same file.
        budget_bytes: the planner's budget: the most memory that a step may use.
        predicted_peak_bytes, predicted_ms: device memory in use and step time, as predicted for its plan.
        steps_to_stable: steps until the planner was stable; ``None``: it was not when steps were timed.
        planner_step_ms: time of each of these steps.
        planning_s: time of the planner's longest search.
        trials: number of plans that the planner tried on the machine.
        longest: whether the row is of a search for the longest sequence.
    """

    method: str
    compiled: bool
    model: str
    layers: int
    seq: int
    batch: int
    head: bool
    ms: float | None = None
    activation_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    host_bytes: int | None = None
    swapped_bytes: float | None = None
    first_step_ms: float | None = None
    loss: float | None = None
    grad_norm: float | None = None

    dtype: str = ""
    config: Any = None
    step_ms: list[float] = field(default_factory=list)
    warmup_steps: int = 0
    first_step_compile_ms: float | None = None
    first_step_pinning_ms: float | None = None
    pinning_ms: float | None = None
    held_bytes: int | None = None
    baseline_bytes: int | None = None
    prefetched_bytes: float | None = None
    stalls: float | None = None
    stall_ms: float | None = None
    recomputes: float | None = None
    rejected_bytes: float | None = None
    adjustments: list[str] = field(default_factory=list)
    must_be_exact: bool = False
    exact: bool | None = None
    differing: list[str] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_ms: float | None = None
    steps_to_stable: int | None = None
    planner_step_ms: list[float] = field(default_factory=list)
    planning_s: float | None = None
    trials: int | None = None
    longest: bool = False

    @property
    def failed(self) -> bool:
        """Whether the row is broken, or not exact although it must be."""
        wrong = self.must_be_exact and self.status == "measured" and self.exact is False
        return super().failed or wrong


def fill_ratios(result: Result, eager: Result | None) -> None:
    """Set the ratios to eager's numbers where both have one."""
    for name in ("ms", "held_bytes", "activation_bytes"):
        value, base = getattr(result, name), getattr(eager, name, None)
        if value is not None and base:
            result.ratios[name.partition("_")[0]] = value / base


KEY_FIELDS = (
    *("method", "kind", "workload", "model", "layers", "seq", "batch", "head", "dtype", "longest"),
    "device",
)
"""Fields that identify what is measured."""


def key_of(line: Mapping[str, Any]) -> Key:
    """Return the key of a line: two lines with the same key are two measurements of the same thing."""
    return tuple(line.get(name) or None for name in KEY_FIELDS)


class Records:
    """The lines of a results file, one for each key; every change writes the whole file.

    Args:
        path: path of the file; its lines are read at the beginning. ``None``: nothing is written.
        known: another file, perhaps of another machine, whose lines are read before those of ``path``.
    """

    def __init__(self, path: Path | None = None, known: Path | None = None) -> None:
        self.path = path
        self._lines: dict[Key, Line] = {}
        for source in (known, path):
            if source is not None and source.is_file():
                for line in json.loads(source.read_text(encoding="utf-8")):
                    self._keep(line)

    def __iter__(self) -> Iterator[Line]:
        return iter(list(self._lines.values()))

    def find(self, key: Key) -> Line | None:
        """Return the line of a key, or ``None``."""
        return self._lines.get(key)

    def put(self, record: Record) -> None:
        """Add a line, in place of an earlier one of the same key, and write the file.

        A line with the status ``left out`` does not replace another one.
        """
        self._keep(asdict(record))
        if self.path is not None:
            write_json(self.path, list(self._lines.values()))

    def _keep(self, line: Line) -> None:
        if line.get("status") != "left out" or key_of(line) not in self._lines:
            self._lines[key_of(line)] = line


def write_json(path: Path, document: Any) -> None:
    """Write a file atomically: if the process is stopped meanwhile, the old or the new file is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def results_folder() -> Path:
    """Return the folder for results: the one that ``HF_ACTSWAP_RESULTS`` names, or ``results/`` here.

    In a rehearsal ``results/rehearsed/``: its device has a real one's name, and has measured nothing.
    """
    named = os.environ.get(RESULTS_VARIABLE)
    return Path(named) if named else RESULTS / "rehearsed" if REHEARSAL in os.environ else RESULTS


def print_table(rows: Sequence[Mapping[str, object]], title: str = "", wrapped: Sequence[str] = ()) -> None:
    """Print rows whose keys are the headings: numbers at the right with two decimals, ``-`` for ``None``.

    The columns ``wrapped`` may take several lines.
    """
    console = console_of()
    table = Table(title=title or None, title_justify="left")
    for heading, value in rows[0].items() if rows else ():
        table.add_column(
            heading, justify="left" if isinstance(value, str) else "right", no_wrap=heading not in wrapped
        )
    for row in rows:
        cells = (f"{value:.2f}" if isinstance(value, float) else value for value in row.values())
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    console.print(table)


def console_of() -> Console:
    """Return a console on the standard output, wide enough for tables if it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)


def origin(device: torch.device) -> dict[str, Any]:
    """Return the fields of `Record` that are the same in every row of a run on ``device``."""
    found, machine, checkout = versions(), hardware(device), commit(REPOSITORY)
    return {
        "device": "cpu" if device.type == "cpu" else machine["name"],
        "torch": found["torch"],
        "transformers": found["transformers"],
        "commit": checkout["id"],
        "environment": {
            "hardware": machine,
            "versions": found,
            "tracked_files_changed": checkout["dirty"],
            "allocator": os.environ["PYTORCH_ALLOC_CONF"],
        },
    }


def versions() -> dict[str, str]:
    """Return the versions that a number depends on."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "hf_actswap": __version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit(repository: Path) -> dict[str, Any]:
    """Return the commit of the checkout and whether tracked files differ from it.

    Without ``.git`` the commit is that of ``HF_ACTSWAP_COMMIT``, or ``None``.
    """
    told = {"id": os.environ.get(COMMIT_VARIABLE) or None, "dirty": None}
    if not (repository / ".git").exists():  # a copy without it may lie in somebody else's checkout
        return told
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return told
    head, _, dirty = done.stdout.strip().partition("-")
    return {"id": head, "dirty": bool(dirty)}


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the device's name and memory and, on an accelerator, what is measured of it now.

    That is its link, the time in which host memory is page-locked, and whether its driver lets the
    allocator's segments grow (virtual memory management, which some virtual machines refuse).
    """
    if device.type == "cpu":
        return {
            "device": "cpu",
            "name": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return {
        "device": device.type,
        # A backend may have no name for it.
        "name": str(name(device)) if name else device.type,
        "memory_bytes": total_bytes,
        "free_bytes": free_bytes,
        "host_name_of_processor": _processor(),
        "link_gb_per_s": link_gb_per_s(measure_link(device)),
        "pinning_s_per_gib": _pinning_s_per_gib(device),
        "expandable_segments": _has_expandable_segments(device),
    }


def _pinning_s_per_gib(device: torch.device) -> float:
    slabs = PinnedSlabs(device)
    started = time.perf_counter()
    slab = slabs.allocate(_PINNED_BYTES)
    seconds = time.perf_counter() - started
    slabs.free(slab)
    return seconds * 2**30 / _PINNED_BYTES


def _has_expandable_segments(device: torch.device) -> bool | None:
    """Return whether segments of the allocator can grow; ``None``: this device's allocator does not say."""
    if device.type != "cuda":
        return None
    probe = torch.empty(2**21, device=device)
    segments = torch.cuda.memory_snapshot()
    del probe
    return any(segment.get("is_expandable", False) for segment in segments)


def device_named(name: str | None = None) -> torch.device:
    """Return a device with an index, by default the accelerator: streams and memory statistics need it."""
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = found.type if found else "cpu"
    device = torch.device(name)
    has_index = device.type == "cpu" or device.index is not None
    return device if has_index else torch.device(device.type, torch.accelerator.current_device_index())


def file_name(device_name: str) -> str:
    """Return a device's name as a part of a file's name: letters, digits, ``.``, ``_`` and ``-`` only."""
    return re.sub(r"[^a-z0-9._]+", "-", device_name.lower()).strip("-")


def _processor() -> str:
    """Return the model of the CPU, which `platform` leaves empty on Linux."""
    found = Path("/proc/cpuinfo")
    text = found.read_text(encoding="utf-8") if found.exists() else ""
    model = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def link_gb_per_s(link: Link) -> dict[str, float]:
    """Return the rates of a link in GB/s (10^9 bytes), under the names of `Link` without their unit.

    ``out`` is device to host; ``out_beside_in`` is that rate while the other direction is busy too.
    """
    rates = {name.removesuffix(_RATE): rate for name, rate in asdict(link).items() if name.endswith(_RATE)}
    return {name: rate / _GB_PER_S_IN_BYTES_PER_MS for name, rate in rates.items()}
