"""What is recorded: one line of the results file, the file, and where and with what a number was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import accelerate
import torch
import transformers

from hf_actswap.engine.link import Link, measure_link
from hf_actswap.version import __version__

Status = Literal["measured", "skipped", "out of memory", "failed"]


@dataclass
class Result:
    """One method on one workload; ``None`` where there is no number.

    Args:
        method: name of the row; ours begin with ``actswap``.
        compiled: the layers are compiled.
        model, layers, seq, batch: shapes; ``seq`` in tokens.
        head: the whole model with its loss; otherwise the decoder stack.
        ms: median of the timed steps, forward and backward, device-synchronised.
        activation_bytes: most device memory above parameters, gradients and input, in the timed steps.
        peak_allocated_bytes, peak_reserved_bytes: most that the allocator gave out, and held.
        host_bytes: memory held on the host for swapped tensors.
        swapped_bytes: copied from the device to the host in one step.
        first_step_ms: of the very first step, compilation and pinning included.
        loss: of the whole model; of a stack the mean of output times the fixed gradient at the output.
        grad_norm: of all weights' gradients.
        device, torch, transformers, commit: where and with what.

        workload, dtype: the preset's name; of weights and activations.
        status, reason: whether it was measured, and why not.
        config: what was put on the model.
        step_ms: of every step in order, the warm-up's first.
        warmup_steps: how many of them are warm-up.
        first_step_compile_ms: the part of ``first_step_ms`` that ``torch.compile`` took.
        held_bytes: alive at the end of forward, above the resting state; the output included.
        resting_bytes: allocated before the method was put on.
        prefetched_bytes, stalls, stall_ms, recomputes, refused_bytes: the engine's counters of one step.
        overrides: what rules changed of the configuration, in words.
        must_be_exact: output and gradients must equal eager's bit for bit.
        exact, differing: whether they do, ``None``: not judged; and where not.
        ratios: against eager in the same run.
        budget_bytes: of the planner: the most that a step may use.
        predicted_peak_bytes, predicted_ms: of its plan, on paper: all device memory in use, and the step.
        steps_to_stable: of the planner: steps until it was stable; ``planner_step_ms``: each of them;
            ``None``: it was not, when the steps were timed.
        planning_s: the longest of its searches on paper.
        trials: plans that it tried on the machine.
        longest: of a search for the longest sequence: ``seq`` is the longest that was run.
        environment: hardware, link, allocator settings, versions.
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
    device: str = ""
    torch: str = ""
    transformers: str = ""
    commit: str | None = None

    workload: str = ""
    dtype: str = ""
    status: Status = "measured"
    reason: str = ""
    config: Any = None
    step_ms: list[float] = field(default_factory=list)
    warmup_steps: int = 0
    first_step_compile_ms: float | None = None
    held_bytes: int | None = None
    resting_bytes: int | None = None
    prefetched_bytes: float | None = None
    stalls: float | None = None
    stall_ms: float | None = None
    recomputes: float | None = None
    refused_bytes: float | None = None
    overrides: list[str] = field(default_factory=list)
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
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the run must not be trusted, or the row is broken."""
        return self.status == "failed" or (
            self.must_be_exact and self.status == "measured" and self.exact is False
        )


def fill_ratios(result: Result, eager: Result | None) -> None:
    """Set the ratios to eager's numbers, where both have them."""
    for name in ("ms", "held_bytes", "activation_bytes"):
        value, base = getattr(result, name), getattr(eager, name, None)
        if value is not None and base:
            result.ratios[name.partition("_")[0]] = value / base


def write_results(results: Iterable[Result], path: Path) -> None:
    """Write a list of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


def by_workload(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Group rows of a file by what was run, in the order of the file."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "layers", "seq", "batch", "head"))
        groups.setdefault(key, []).append(row)
    return groups


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
