"""The report of ``hf-actswap rehearse``: memory at its peak and when it ran out, steps, what is not known.

What a rehearsed training would have to change to fit: the planner's answer for the step that was seen.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ..errors import ActSwapError, Problem
from ..rehearsal import Options, device_facts
from .options import (
    AskedStep,
    AutocastName,
    DtypeName,
    Lora,
    ModelRequest,
    PaperOptimizerName,
    PlanRequest,
    QuantizeName,
    Sharding,
    computed_in,
)
from .output import Answer, folded_by_layer, heading, listed, size_text, step_ms_text, table_of

Process = Mapping[str, Any]
"""What one process of the program saw: the document that ``rehearsed_program.watch`` writes."""

_HALVES: Mapping[str, AutocastName] = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_TYPES: Mapping[str, DtypeName] = {**_HALVES, "torch.float32": "fp32"}
_OPTIMIZERS: Mapping[str, PaperOptimizerName] = {
    "AdamW": "adamw",
    "Adam": "adamw",
    "SGD": "sgd",
    "Adafactor": "adafactor",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_32bit",
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


def _advice(said: Sequence[str], plan: Answer | None = None, longest: Answer | None = None) -> Answer:
    """Return what the planner answered: a plan, or the longest sequence where the whole does not fit."""
    answers = {"plan": plan, "longest": longest}
    documents = {name: None if found is None else found.document for name, found in answers.items()}

    def shown() -> Iterator[RenderableType]:
        yield heading("What to change to fit")
        yield from listed(said)
        if plan is not None:
            yield from _shown_plan(plan.document)
        if longest is not None:
            yield _longest_line(longest.document)

    return Answer({**documents, "said": list(said)}, shown())


def _shown_plan(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    step, limit_bytes = found["step"], found["allocatable_bytes"]
    yield (
        f"For {step['batch']} x {step['seq']} tokens in {size_text(limit_bytes)}, predicted "
        "(hf-actswap plan shows which ops):"
    )
    table = table_of("", ">Peak", ">Step", ">Swapped", ">Recomputed")
    for name, row in found["predicted"].items():
        table.add_row(
            _ROWS.get(name, name),
            size_text(row["peak_bytes"]) + (" !" if row["peak_bytes"] > limit_bytes else ""),
            step_ms_text(row["step_ms"]),
            size_text(row["swapped_bytes"]),
            size_text(row["recomputed_bytes"]),
        )
    yield table
    if found["chosen_tiles"] is not None:
        yield "No mix fits alone: the planned step has LM head and loss, or more, in tiles (tile_config)."
    yield _AUTO


def _longest_line(found: Mapping[str, Any]) -> str:
    lengths = {name: row["tokens"] for name, row in found["longest"].items() if row["tokens"]}
    if not lengths:
        return f"No sequence fits. {_LARGER}"
    told = ", ".join(f"{tokens:,} ({name})" for name, tokens in lengths.items())
    return f"The longest sequence that fits, one in a batch: {told} tokens."


def _advice_for(seen: Mapping[str, Any], options: Options) -> Answer:
    """Ask the planner about what was trained, as ``rehearsed_program.subject`` writes it."""
    if "config" not in seen:
        return _advice(["No transformers model was seen: the planner cannot be asked."])
    # Without activations a step needs weights, and for trained ones gradients and states.
    states = 0 if seen.get("optimizer") in ("SGD", "Adafactor") else 2
    numbers = seen.get("weights", 0) + (1 + states) * seen.get("trained", 0)
    shards = _sharding(seen)
    resident = numbers * (4 if seen.get("dtype") == "torch.float32" else 2)
    resident //= shards.state_ranks if shards else 1
    if resident > options.program_bytes():
        return _advice(
            [f"Weights, gradients and the optimizer's states take {size_text(resident)}. {_LARGER}"]
        )
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        (Path(folder) / "config.json").write_text(seen["config"], encoding="utf-8")
        (Path(folder) / _MODE).write_text("memory: {mode: adaptive}\n", encoding="utf-8")  # what `auto` is
        return _asked(seen, options, folder)


def _asked(seen: Mapping[str, Any], options: Options, folder: str) -> Answer:
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
        plan = _ask("plan_answer", "answer_plan", request)
        if plan.ok:
            return _advice(said, plan=plan)
        said += [str(Problem(**problem)) for problem in plan.document["problems"]]
    except ActSwapError as error:
        said += map(str, error.problems)
    try:
        return _advice(said, longest=_ask("longest", "answer_longest", request))
    except ActSwapError as error:
        return _advice([*said, *map(str, error.problems)])


def _ask(module: str, name: str, request: PlanRequest) -> Answer:
    """Ask a command; it is imported now, because it imports torch."""
    found: Answer = getattr(import_module(f".{module}", __package__), name)(request)
    return found


def _request(
    seen: Mapping[str, Any], options: Options, folder: str, optimizer: PaperOptimizerName
) -> PlanRequest:
    adapters, lora = seen.get("adapters"), None
    if adapters is not None and adapters["r"]:
        lora = Lora(adapters["r"], tuple(adapters["targets"]), adapters["dropout"])
    facts = device_facts(options.device)
    autocast = _HALVES.get(seen.get("autocast") or seen.get("gathered_in") or "") or "none"
    shards = _sharding(seen)
    # What the device itself has for a process the planner knows better, to some MiB.
    is_smaller = options.memory_bytes() < facts.memory_bytes
    return PlanRequest(
        model=computed_in(_model(seen, folder, lora), shards, autocast),
        config=str(Path(folder) / _MODE),
        step=AskedStep(
            seen.get("batch"), seen.get("tokens"), facts.kind, autocast, optimizer, sharding=shards
        ),
        budget_bytes=options.program_bytes() if is_smaller else None,
    )


def _sharding(seen: Mapping[str, Any]) -> Sharding | None:
    return Sharding.read(seen["sharding"]) if seen.get("sharding") else None


def _model(seen: Mapping[str, Any], folder: str, lora: Lora | None) -> ModelRequest:
    dtype = seen.get("dtype") or ""
    stored = json.loads(seen["config"]).get("quantization_config") or {}
    if not (stored.get("load_in_4bit") or stored.get("load_in_8bit")):
        return ModelRequest(folder, _TYPES.get(dtype), lora)
    double = stored.get("bnb_4bit_use_double_quant")
    quantize: QuantizeName = "8bit" if stored.get("load_in_8bit") else "4bit" if double else "4bit-single"
    computes = f"torch.{stored.get('bnb_4bit_compute_dtype', 'float16')}"
    prepared = dtype == "torch.float32"  # the largest weight that is not quantised
    base = _TYPES.get(computes if prepared else dtype)
    return ModelRequest(folder, base, lora, quantize, prepared=prepared)


_MARKED = ("weights", "gradients", "optimizer states")
_LOGITS = "logits and loss"
_REST = "activations and temporaries"
_MOST_ROWS = 8
_LEAST_SHARE = 0.01
_FULL = 0.9
"""Above this share of the device's memory the report says what would take less."""
_CANNOT_KNOW = (
    "Values of large tensors were not computed: losses mean nothing, saved files hold no trained weights, "
    "and control flow that reads values may differ on a GPU. Kernels' code (some 100 MiB) is not counted, "
    "nor are ranks that share a device."
)
_NOTES = {
    "stubs": "Functions of CUDA that did nothing were called",
    "left_out": "Ops whose values are missing",
    "triton": "Kernels of triton did nothing, and took no time",
    "races": "Memory is used in no order",
}


def read_reports(folder: Path) -> list[Process]:
    """Return what the processes wrote that used a device; ranks in their order."""
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    used = [process for process in found if process["devices"] or process["out_of_memory"]]
    return sorted(used, key=lambda process: (process["rank"], -_peak_bytes(process)))


def rehearsed(options: Options, processes: Sequence[Process], code: int, asks_planner: bool = True) -> Answer:
    """Return the report of a program's run on the device.

    The planner is asked if memory ran out or is short. A training under a plan of ours that came to its end
    needs no advice: it runs out of memory while it tries plans, and its budget is meant to be full.

    Args:
        code: the program's exit code.
        asks_planner: whether the planner may be asked.
    """
    limit_bytes = _FULL * options.memory_bytes()
    short = [
        found
        for found in processes
        if (found["out_of_memory"] or _peak_bytes(found) > limit_bytes) and (code or not found["planned"])
    ]
    advice = _advice_for(short[0]["subject"], options) if short and asks_planner else None
    document = {
        "device": device_facts(options.device).kind,
        "devices": options.devices,
        "memory_bytes": options.memory_bytes(),
        "exit_code": code,
        "fits": not any(process["out_of_memory"] for process in processes),
        "processes": processes,
        "advice": None if advice is None else advice.document,
    }
    return Answer(document, _shown(options, processes, code, advice))


def _shown(
    options: Options, processes: Sequence[Process], code: int, advice: Answer | None
) -> Iterator[RenderableType]:
    several = f"{options.devices} x " if options.devices > 1 else ""
    kind = device_facts(options.device).kind
    yield heading(f"Rehearsed on {several}{kind}, {size_text(options.memory_bytes())}")
    if not processes:
        weights = " Where a model's weights are not there, add --no-weights." if code else ""
        yield (
            f"No process used a device. The program ended with {code}.{weights} Its Python must be this "
            f"command's, with PyTorch's CUDA build: {sys.executable}"
        )
        return
    yield from _shown_process(processes[0])
    for other in processes[1:]:
        times = _step_ms(other)
        step = [] if times is None else [f"a step: {step_ms_text(times[0])}"]
        yield f"Rank {other['rank']}: {'; '.join([*_peaks(other), *step])}"
        yield from _out_of_memory(other)
    for key, what in _NOTES.items():
        if found := dict.fromkeys(name for process in processes for name in process[key]):
            yield from listed([f"{what}: {', '.join(folded_by_layer(found))}"])
    if advice is not None:
        yield from advice.shown
    yield _CANNOT_KNOW


def _shown_process(process: Process) -> Iterator[RenderableType]:
    yield from _out_of_memory(process)
    for peak in _peaks(process):
        yield f"Peak {peak}."
    failed = process["out_of_memory"]
    if failed:
        yield heading("When memory ran out")
        yield _table(failed[-1]["memory"], process["subject"])
    elif process["devices"]:
        yield heading("At the peak")
        largest = max(process["devices"].values(), key=lambda found: int(found["peak_bytes"]))
        yield _table(largest, process["subject"])
    times = _step_ms(process)
    if times is not None:
        yield f"A step: {step_ms_text(times[0])}; for {times[1]:.0%} of it the device has nothing to do."
    if process["host_bytes"]:
        yield f"Host memory, page-locked: {size_text(process['host_bytes'])}."


def _peak_bytes(process: Process) -> int:
    return max((found["peak_bytes"] for found in process["devices"].values()), default=0)


def _step_ms(process: Process) -> tuple[float, float] | None:
    """Return the median time of a step, and the share of it in which the device had nothing to do."""
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(process["step_times"])]
    if not steps:
        return None
    total, worked = median(step for step, _ in steps), median(work for _, work in steps)
    return total, max(0.0, 1 - worked / total)


def _peaks(process: Process) -> list[str]:
    return [
        f"on device {number}: {size_text(found['peak_bytes'])} allocated, "
        f"{size_text(found['reserved_peak_bytes'])} reserved, in step {found['steps_before'] + 1}, "
        f"{found['phase']}, {_op(found['op'])}"
        for number, found in process["devices"].items()
    ]


def _out_of_memory(process: Process) -> Iterator[str]:
    for found in process["out_of_memory"]:
        after = process["steps"] - found["steps_before"]
        went_on = f"the program went on for {after} steps" if after else "no step was done after it"
        times = found["times"]
        often = "" if times == 1 else f" {times} times, the last"
        yield (
            f"Out of memory on device {found['device']}{often}: {size_text(found['asked_bytes'])} asked for "
            f"by {_op(found['op'])}, in step {found['steps_before'] + 1}, {found['phase']}; {went_on}."
        )


def _op(name: str) -> str:
    return name.removeprefix("aten::") or "(outside of any op)"


def _table(memory: Mapping[str, Any], subject: Mapping[str, Any]) -> Table:
    """Return a table of what memory held: each kind, and under it the ops with the largest share."""
    held: dict[str, dict[str, list[int]]] = {kind: {} for kind in (*_MARKED, _LOGITS, _REST)}
    for group in memory["held"]:
        kind = group["kind"] or (_LOGITS if _is_of_logits(group["bytes"], subject) else _REST)
        sums = held[kind].setdefault(f"{group['phase']}: {_op(group['op'])}", [0, 0])
        sums[0] += group["bytes"] * group["count"]
        sums[1] += group["count"]
    total = sum(size for by_op in held.values() for size, _ in by_op.values())
    table = table_of("Memory", ">Bytes", ">Tensors")
    for kind, by_op in held.items():
        if not by_op:
            continue
        sizes, counts = zip(*by_op.values(), strict=True)
        table.add_row(kind, size_text(sum(sizes)), str(sum(counts)))
        largest = [] if kind in _MARKED else sorted(by_op, key=lambda op: -by_op[op][0])
        for op in largest[:_MOST_ROWS]:
            size, count = by_op[op]
            if size >= _LEAST_SHARE * total:
                table.add_row(f"  {op}", size_text(size), str(count), style="dim")
    return table


def _is_of_logits(size_bytes: int, subject: Mapping[str, Any]) -> bool:
    """Whether a block has about as many elements as the batch has tokens times the vocabulary."""
    tokens = subject.get("batch", 0) * subject.get("tokens", 0)
    elements = tokens * (json.loads(subject.get("config", "{}")).get("vocab_size") or 0)
    if not elements:
        return False
    fewest = elements - elements // subject["tokens"] - 512  # labels may be shifted by one
    return any(fewest * width <= size_bytes <= elements * width + 512 for width in (2, 4))
