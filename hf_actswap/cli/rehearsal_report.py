"""The report of ``hf-actswap rehearse``: memory at its peak and when it ran out, steps, what is not known."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..rehearsal import Options, device_facts
from .output import folded_by_layer, heading, listed, size_text, step_ms_text
from .rehearsal_advice import Advice, advice_for

_MARKED = ("weights", "gradients", "optimizer states")
LOGITS = "logits and loss"
REST = "activations and temporaries"
_MOST_ROWS = 8
_LEAST_SHARE = 0.01
_FULL = 0.9
"""Above this share of the device's memory the report says what would take less."""
_CANNOT_KNOW = (
    "Values of large tensors were not computed: losses mean nothing, and control flow that reads them may "
    "differ on a GPU. Kernels' code (some 100 MiB) is not counted, nor are ranks that share a device."
)


@dataclass(frozen=True)
class Held:
    """Blocks of one kind in a device's memory.

    Args:
        kind: weights, gradients, optimizer states, `LOGITS` or `REST`.
        where: part of a step in which they were asked for, and op.
        size: bytes of all of them.
        count: number of blocks.
    """

    kind: str
    where: str
    size: int
    count: int


@dataclass(frozen=True)
class Process:
    """What one process of the program saw (written by ``rehearsed_program.watch``).

    Args:
        seen: the file's document.
    """

    seen: Mapping[str, Any]

    @property
    def devices(self) -> Mapping[str, Mapping[str, Any]]:
        """What it had of each device, by the device's number."""
        found: Mapping[str, Mapping[str, Any]] = self.seen["devices"]
        return found

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated on one device."""
        return max((found["peak_bytes"] for found in self.devices.values()), default=0)

    @property
    def out_of_memory(self) -> Sequence[Mapping[str, Any]]:
        """Each time that memory ran out."""
        found: Sequence[Mapping[str, Any]] = self.seen["out_of_memory"]
        return found

    def held(self, memory: Mapping[str, Any]) -> list[Held]:
        """Return what a device's memory held, largest first, by kind, part of the step and op."""
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for group in memory["held"]:
            kind = group["kind"] or (LOGITS if self._is_of_logits(group) else REST)
            where = "" if kind in _MARKED else f"{group['phase']}: {_op(group['op'])}"
            size, count = sums.get((kind, where), (0, 0))
            sums[kind, where] = (size + group["bytes"] * group["count"], count + group["count"])
        found = [Held(kind, where, size, count) for (kind, where), (size, count) in sums.items()]
        return sorted(found, key=lambda row: -row.size)

    def _is_of_logits(self, group: Mapping[str, Any]) -> bool:
        """Return whether a block has about as many elements as the batch has tokens times the vocabulary."""
        subject = self.seen["subject"]
        tokens = subject.get("batch", 0) * subject.get("tokens", 0)
        vocabulary = json.loads(subject.get("config", "{}")).get("vocab_size") or 0
        if not tokens or not vocabulary:
            return False
        elements = tokens * vocabulary
        fewest = elements - subject["batch"] * vocabulary - 512  # labels may be shifted by one
        return any(fewest * width <= group["bytes"] <= elements * width + 512 for width in (2, 4))

    def step_ms(self) -> tuple[float, float] | None:
        """Return the median time of a step, and the share of it in which the device had nothing to do."""
        times = self.seen["step_times"]
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times)]
        if not steps:
            return None
        total, worked = median(step for step, _ in steps), median(work for _, work in steps)
        return total, max(0.0, 1 - worked / total)


def read_reports(folder: Path) -> list[Process]:
    """Return what the processes wrote that used a device; ranks in their order."""
    found = [Process(json.loads(path.read_text("utf-8"))) for path in folder.glob("*.json")]
    used = [process for process in found if process.devices or process.out_of_memory]
    return sorted(used, key=lambda process: (process.seen["rank"], -process.peak_bytes))


@dataclass(frozen=True)
class Rehearsed:
    """A program's run on the device.

    Args:
        options: the device.
        processes: those of the program that used it.
        code: the program's exit code.
        asks_planner: whether the planner may be asked what fits.
    """

    options: Options
    processes: Sequence[Process]
    code: int
    asks_planner: bool = True

    @cached_property
    def advice(self) -> Advice | None:
        """The planner's answer, if memory ran out or is short; ``None``: it was not needed."""
        limit = _FULL * self.options.memory_bytes()
        short = [found for found in self.processes if found.out_of_memory or found.peak_bytes > limit]
        if not short or not self.asks_planner:
            return None
        return advice_for(short[0].seen["subject"], self.options)

    def document(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "device": device_facts(self.options.device).kind,
            "devices": self.options.devices,
            "memory_bytes": self.options.memory_bytes(),
            "exit_code": self.code,
            "fits": not any(process.out_of_memory for process in self.processes),
            "processes": [dict(process.seen) for process in self.processes],
            "advice": None if self.advice is None else self.advice.document(),
        }

    def shown(self) -> Iterable[RenderableType]:
        """Yield the text and tables to print."""
        facts = device_facts(self.options.device)
        several = f"{self.options.devices} x " if self.options.devices > 1 else ""
        yield heading(f"Rehearsed on {several}{facts.kind}, {size_text(self.options.memory_bytes())}")
        if not self.processes:
            yield self._without_device()
            return
        yield from self._shown_process(self.processes[0])
        for other in self.processes[1:]:
            times = other.step_ms()
            step = [] if times is None else [f"a step: {step_ms_text(times[0])}"]
            yield f"Rank {other.seen['rank']}: {'; '.join([*_peaks(other), *step])}"
            yield from _out_of_memory(other)
        yield from listed(self._notes())
        if self.advice is not None:
            yield from self.advice.shown()
        yield _CANNOT_KNOW

    def _without_device(self) -> str:
        """Return why no process may have used a device."""
        weights = " Where a model's weights are not there, add --no-weights." if self.code else ""
        return (
            f"No process used a device. The program ended with {self.code}.{weights} Its Python must be this "
            f"command's, with PyTorch's CUDA build: {sys.executable}"
        )

    def _shown_process(self, process: Process) -> Iterable[RenderableType]:
        yield from _out_of_memory(process)
        for peak in _peaks(process):
            yield f"Peak {peak}."
        failed = process.out_of_memory
        largest = max(process.devices.values(), key=lambda found: int(found["peak_bytes"]), default=None)
        memory = failed[-1]["memory"] if failed else largest
        if memory is not None:
            yield heading("When memory ran out" if failed else "At the peak")
            yield _table(process.held(memory))
        times = process.step_ms()
        if times is not None:
            yield f"A step: {step_ms_text(times[0])}; for {times[1]:.0%} of it the device has nothing to do."
        if process.seen["host_bytes"]:
            yield f"Host memory, page-locked: {size_text(process.seen['host_bytes'])}."

    def _notes(self) -> Iterable[str]:
        notes = {
            "Functions of CUDA that did nothing were called": "stubs",
            "Ops whose values are missing": "left_out",
            "Kernels of triton did nothing, and took no time": "triton",
            "Memory is used in no order": "races",
        }
        for what, key in notes.items():
            found = dict.fromkeys(name for process in self.processes for name in process.seen[key])
            if found:
                yield f"{what}: {', '.join(folded_by_layer(found))}"


def _peaks(process: Process) -> list[str]:
    """Return a sentence about each device that the process used."""
    return [
        f"on device {number}: {size_text(found['peak_bytes'])} allocated, "
        f"{size_text(found['reserved_peak_bytes'])} reserved, in step {found['steps_before'] + 1}, "
        f"{found['phase']}, {_op(found['op'])}"
        for number, found in process.devices.items()
    ]


def _out_of_memory(process: Process) -> Iterable[str]:
    for found in process.out_of_memory:
        after = process.seen["steps"] - found["steps_before"]
        went_on = f"the program went on for {after} steps" if after else "no step was done after it"
        yield (
            f"Out of memory on device {found['device']}: {size_text(found['asked_bytes'])} asked for by "
            f"{_op(found['op'])}, in step {found['steps_before'] + 1}, {found['phase']}; {went_on}."
        )


def _op(name: str) -> str:
    return re.sub(r"^aten::", "", name) or "(outside of any op)"


def _table(rows: Sequence[Held]) -> Table:
    """Return a table of what memory held: each kind, and under it the ops with the largest share."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Memory", overflow="fold")
    table.add_column("Bytes", justify="right", no_wrap=True)
    table.add_column("Tensors", justify="right", no_wrap=True)
    total = sum(row.size for row in rows)
    for kind in (*_MARKED, LOGITS, REST):
        of_kind = [row for row in rows if row.kind == kind]
        if not of_kind:
            continue
        table.add_row(
            kind, size_text(sum(row.size for row in of_kind)), str(sum(row.count for row in of_kind))
        )
        if kind in _MARKED:
            continue
        for row in [row for row in of_kind if row.size >= _LEAST_SHARE * total][:_MOST_ROWS]:
            table.add_row(f"  {row.where}", size_text(row.size), str(row.count), style="dim")
    return table
