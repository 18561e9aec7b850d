"""What a rehearsed training would have to change to fit: the planner's answer for the step that was seen."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..errors import ActSwapError
from ..rehearsal import Options, device_facts
from .options import AutocastName, DtypeName, PaperOptimizerName
from .output import Answer, heading, listed, size_text, step_ms_text
from .plan_request import AskedStep, Lora, ModelRequest, PlanRequest

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
_CONTEXT_BYTES = 1 << 29
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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for name in ("Peak", "Step", "Swapped", "Recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
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
    if resident > options.memory_bytes() - _CONTEXT_BYTES:
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
    budget = options.memory_bytes() - _CONTEXT_BYTES
    step = AskedStep(
        seen.get("batch"), seen.get("tokens"), device_facts(options.device).kind, autocast, optimizer
    )
    return PlanRequest(
        model=ModelRequest(folder, _TYPES.get(seen.get("dtype") or ""), lora),
        config=str(Path(folder) / _MODE),
        step=step,
        profile=None,
        budget_bytes=budget,
        tp=None,
        compared=(),
        save=None,
        windows=False,
        full=False,
    )
