"""The report of ``hf-actswap rehearse``: memory at its peak and when it ran out, steps, what is not known.

What a rehearsed training would have to change to fit: the planner's answer for the step that was seen.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ..errors import ActSwapError
from ..rehearsal import Options, device_facts
from .options import AskedStep, AutocastName, DtypeName, Lora, ModelRequest, PaperOptimizerName, PlanRequest
from .output import Answer, folded_by_layer, heading, listed, size_text, step_ms_text, table_of

_TYPES: Mapping[str, DtypeName] = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
}
_OPTIMIZERS: Mapping[str, PaperOptimizerName] = {
    "AdamW": "adamw",
    "Adam": "adamw",
    "SGD": "sgd",
    "Adafactor": "adafactor",
}
_MODE = "auto.yaml"
_ROWS = {
    "nothing": "all kept",
    "recompute all": "gradient checkpointing",
    "planned": "a mix, as hf_actswap plans it",
}
_LARGER = "Train adapters (PEFT LoRA), shard them over more devices (FSDP), or take a larger device."
_AUTO = (
    'To train so: ActSwapTrainingArguments(actswap="auto") in place of TrainingArguments, or '
    'hf_actswap.apply(model, {"memory": {"mode": "adaptive"}}, optimizer=optimizer) without the Trainer.'
)


@dataclass(frozen=True)
class Advice:
    """What the planner said.

    Args:
        plan: the plan that fits; ``None``: none was found.
        longest: the longest sequence that fits, where the whole does not; ``None``: it was not looked for.
        said: why there is no plan, or what was assumed.
    """

    plan: Answer | None = None
    longest: Answer | None = None
    said: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "plan": None if self.plan is None else self.plan.document(),
            "longest": None if self.longest is None else self.longest.document(),
            "said": self.said,
        }

    def shown(self) -> Iterable[RenderableType]:
        """Yield the text and tables to print."""
        yield heading("What to change to fit")
        yield from listed(self.said)
        if self.plan is not None:
            yield from _shown_plan(self.plan.document())
        if self.longest is not None:
            yield from _shown_longest(self.longest.document())


def _shown_plan(found: Mapping[str, Any]) -> Iterable[RenderableType]:
    step, tiles = found["step"], found["chosen_tiles"]
    yield (
        f"For {step['batch']} x {step['seq']} tokens in {size_text(found['allocatable_bytes'])}, predicted "
        f"(hf-actswap plan shows which ops):"
    )
    table = table_of("", ">Peak", ">Step", ">Swapped", ">Recomputed")
    for name, row in found["predicted"].items():
        mark = " !" if row["peak_bytes"] > found["allocatable_bytes"] else ""
        sizes = (size_text(row["swapped_bytes"]), size_text(row["recomputed_bytes"]))
        table.add_row(
            _ROWS.get(name, name), size_text(row["peak_bytes"]) + mark, step_ms_text(row["step_ms"]), *sizes
        )
    yield table
    if tiles is not None:
        yield "No mix fits alone: the planned step has LM head and loss, or more, in tiles (tile_config)."
    yield _AUTO


def _shown_longest(found: Mapping[str, Any]) -> Iterable[RenderableType]:
    lengths = {name: row["tokens"] for name, row in found["longest"].items()}
    if any(lengths.values()):
        told = ", ".join(f"{tokens:,} ({name})" for name, tokens in lengths.items() if tokens)
        yield f"The longest sequence that fits, one in a batch: {told} tokens."
    else:
        yield f"No sequence fits. {_LARGER}"


def advice_for(seen: Mapping[str, Any], options: Options) -> Advice:
    """Ask the planner about the step that was seen.

    Args:
        seen: what is trained, as ``rehearsed_program.subject`` writes it.
        options: the device.
    """
    if "config" not in seen:
        return Advice(said=["No transformers model was seen: the planner cannot be asked."])
    resident = _resident_bytes(seen)
    if resident > options.program_bytes():
        return Advice(
            said=[f"Weights, gradients and the optimizer's states take {size_text(resident)}. {_LARGER}"]
        )
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        (Path(folder) / "config.json").write_text(seen["config"], encoding="utf-8")
        (Path(folder) / _MODE).write_text("memory: {mode: adaptive}\n", encoding="utf-8")  # what `auto` is
        return _asked(seen, options, folder)


def _resident_bytes(seen: Mapping[str, Any]) -> int:
    """Return what a step needs besides activations: weights, and for trained ones gradients and states."""
    width = 4 if seen.get("dtype") == "torch.float32" else 2
    states = 0 if seen.get("optimizer") in ("SGD", "Adafactor") else 2
    return int(width * (seen.get("weights", 0) + (1 + states) * seen.get("trained", 0)))


def _asked(seen: Mapping[str, Any], options: Options, folder: str) -> Advice:
    said = []
    if "tokens" not in seen:
        said.append("Memory ran out before the first batch: this is for one sequence of 4096 tokens.")
    if seen.get("checkpointing"):
        said.append("The program has gradient checkpointing on: a plan takes its place, so turn it off.")
    optimizer = seen.get("optimizer", "AdamW")
    if optimizer not in _OPTIMIZERS:
        said.append(f"The states of {optimizer} are not known: they count as AdamW's.")
    asked = _OPTIMIZERS.get(optimizer, "adamw")
    if asked == "adamw" and seen.get("foreach"):
        asked = "adamw_torch"
        said.append(
            f"{optimizer} runs with foreach, PyTorch's default: its step takes as much again as the trained "
            "weights. fused=True does not."
        )
    request = _request(seen, options, folder, asked)
    try:
        return Advice(plan=_ask("plan_answer", "answer_plan", request), said=said)
    except ActSwapError as error:
        said += [str(problem) for problem in error.problems]
    try:
        return Advice(longest=_ask("longest", "answer_longest", request), said=said)
    except ActSwapError as error:
        return Advice(said=[*said, *(str(problem) for problem in error.problems)])


def _ask(module: str, name: str, request: PlanRequest) -> Answer:
    """Ask a command; it is imported now, because it imports torch."""
    found: Answer = getattr(import_module(f".{module}", __package__), name)(request)
    return found


def _request(
    seen: Mapping[str, Any], options: Options, folder: str, optimizer: PaperOptimizerName
) -> PlanRequest:
    autocast: AutocastName | None = None
    if _TYPES.get(seen.get("autocast", "")) in ("bf16", "fp16"):
        autocast = "bf16" if seen["autocast"] == "torch.bfloat16" else "fp16"
    adapters = seen.get("adapters")
    lora = None
    if adapters is not None and adapters["r"]:
        lora = Lora(adapters["r"], tuple(adapters["targets"]), adapters["dropout"])
    step = AskedStep(
        seen.get("batch"), seen.get("tokens"), device_facts(options.device).kind, autocast, optimizer
    )
    return PlanRequest(
        model=ModelRequest(folder, _TYPES.get(seen.get("dtype") or ""), lora),
        config=str(Path(folder) / _MODE),
        step=step,
        profile=None,
        budget_bytes=options.program_bytes(),
        tp=None,
        compared=(),
        save=None,
        windows=False,
        full=False,
    )


_MARKED = ("weights", "gradients", "optimizer states")
LOGITS = "logits and loss"
REST = "activations and temporaries"
_MOST_ROWS = 8
_LEAST_SHARE = 0.01
_FULL = 0.9
"""Above this share of the device's memory the report says what would take less."""
_CANNOT_KNOW = (
    "Values of large tensors were not computed: losses mean nothing, saved files hold no trained weights, "
    "and control flow that reads values may differ on a GPU. Kernels' code (some 100 MiB) is not counted, "
    "nor are ranks that share a device."
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
        """The last time in each step that memory ran out, and how often it did."""
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
        """The planner's answer, if memory ran out or is short; ``None``: it was not needed.

        A training under a plan of ours that came to its end needs none: it runs out of memory while it
        tries plans, and its budget is meant to be full.
        """
        limit = _FULL * self.options.memory_bytes()
        short = [
            found
            for found in self.processes
            if (found.out_of_memory or found.peak_bytes > limit) and (self.code or not found.seen["planned"])
        ]
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
        times = found["times"]
        often = "" if times == 1 else f" {times} times, the last"
        yield (
            f"Out of memory on device {found['device']}{often}: {size_text(found['asked_bytes'])} asked for "
            f"by {_op(found['op'])}, in step {found['steps_before'] + 1}, {found['phase']}; {went_on}."
        )


def _op(name: str) -> str:
    return re.sub(r"^aten::", "", name) or "(outside of any op)"


def _table(rows: Sequence[Held]) -> Table:
    """Return a table of what memory held: each kind, and under it the ops with the largest share."""
    table = table_of("Memory", ">Bytes", ">Tensors")
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
