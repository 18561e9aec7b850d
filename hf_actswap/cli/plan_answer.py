"""The answer of ``hf-actswap plan``: what the planner would do, computed without a GPU and without weights.

Its tables fit into 80 columns: fates with bytes, and predicted steps one below the other.

The lines with which the answer of ``hf-actswap plan`` begins and ends: does it fit, how fast, what to do.

They answer whether a device suffices; the tables between them say why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..config import ActSwapConfig, MemoryConfig, TileConfig, load_config
from ..engine.stats import gib_text
from ..errors import ActSwapError, PlanError, Problem
from ..plan import MemoryPlan, PlanRow
from ..plan.actions import COMPILE_BUDGET, SCOPES, Scope, fingerprint_of, folded_tiles, format_scopes
from ..plan.tiles import SECOND_CLASS
from ..planner.budget import MARGIN_SHARE, BudgetError
from ..planner.cost.tensor_axis import Exchanged, exchanged, tensor_axis
from ..planner.profile import Prediction, Profile
from ..planner.record.devices import DEVICES, Fabric
from .options import PREDICTED, AskedAutocastName, AskedStep, AutocastName, PlanRequest
from .output import Rejected, folded_by_layer, heading, listed, problems_document, size_text, step_ms_text
from .planned import (
    EVERYTHING,
    NOTHING,
    PLANNED,
    SEVERAL_RANKS_SHARE,
    MemoryParts,
    SearchResult,
    costly_fates_note,
    memory_in_force,
    planned,
    rates_or_none,
)
from .profile_file import ProfileFile, read_profile
from .stages import StagesAnswer, answer_stages
from .step import (
    StepShape,
    bytes_by_fate,
    device_name,
    prediction_document,
    ranks_of_a_machine,
    saved_by_row,
    state_bytes,
)
from .subject import AnalysedModel, subject, with_tp

_SAME_SHARE = 0.005
"""Steps whose times differ by less than this share are called equally fast."""


@dataclass(frozen=True)
class PredictedStep:
    """Peak in bytes, of the rank that needs most, and time in ms of a step."""

    peak_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Verdict:
    """What the first line of an answer says: whether a step fits, and how fast it is beside two others.

    Args:
        step: the step under the plan.
        free: the step without a plan, on a device of any size.
        checkpointed: the step with gradient checkpointing alone.
        tokens: tokens of a step.
        whose: whose tokens these are, such as `` a rank``; empty if there is one rank.
        where: on which stage of a pipeline the peak is, such as `` on stage 0``.
        budget_bytes: the most that the step may allocate on a device.
        limit_bytes: the bytes that the peak is compared with: the device's, or the budget if one was named.
        has_plan: whether fates or tiles are part of the step.
        compared: whether the step is compared with the other two.
    """

    step: PredictedStep
    free: PredictedStep
    checkpointed: PredictedStep
    tokens: int
    whose: str
    where: str
    budget_bytes: int
    limit_bytes: int
    has_plan: bool
    compared: bool

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.step.peak_bytes <= self.budget_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens that are trained in a second."""
        return 1000 * self.tokens / self.step.step_ms if self.step.step_ms else 0.0

    def line(self) -> str:
        """Return it as a line of text."""
        peak = size_text(self.step.peak_bytes)
        if not self.fits:
            budget = size_text(self.budget_bytes)
            return f"Does not fit as written: {peak} are needed{self.where}, and the budget is {budget}."
        said = [
            f"{peak.removesuffix(' GiB')} of {size_text(self.limit_bytes)}{self.where}",
            f"{self.tokens_per_s:,.0f} tokens/s{self.whose}",
        ]
        if self.compared:
            said += [self._against_checkpointing(), _compared(self.step, self.free, "without a limit")]
        return f"Fits{'' if self.has_plan else ' without a plan'}: {', '.join(said)}"

    def _against_checkpointing(self) -> str:
        if self.checkpointed.peak_bytes > self.budget_bytes:
            peak = size_text(self.checkpointed.peak_bytes)
            return f"gradient checkpointing alone would not fit ({peak})"
        return _compared(self.step, self.checkpointed, "checkpointing")


def _compared(step: PredictedStep, other: PredictedStep, what: str) -> str:
    """Return how many more tokens a second ``step`` trains than ``other``."""
    ratio = other.step_ms / step.step_ms if step.step_ms else 1.0
    if abs(ratio - 1) < _SAME_SHARE:
        return f"as fast as {what}"
    return f"{100 * abs(ratio - 1):.0f} % {'faster' if ratio > 1 else 'slower'} than {what}"


def limit_bytes(memory: MemoryConfig, device_bytes: int, budget_bytes: int) -> int:
    """Return what a peak is compared with: the budget if one is named, else the device's memory."""
    named = memory.budget_gib is not None or memory.reduce_by_gib is not None
    return budget_bytes if named else device_bytes


def verdict_of(found: SearchResult) -> Verdict:
    """Return what the first line says of a search for one device."""

    def step(name: str) -> PredictedStep:
        predicted = found.steps[name]
        return PredictedStep(predicted.peak_bytes, predicted.step_ms)

    several = ranks_of_a_machine(found.subject, found.step) > 1
    return Verdict(
        step(PLANNED),
        step(NOTHING),
        step(EVERYTHING),
        found.step.sequences * found.step.tokens,
        " a rank" if several else "",
        "",
        found.allocatable_bytes,
        limit_bytes(found.memory, found.profile.device_bytes, found.budget_bytes),
        has_plan=bool(found.plan.rows or found.plan.tiles),
        compared=bool(found.plan.rows) or found.chosen_tiles is not None,
    )


@dataclass(frozen=True)
class HostNeed:
    """Host memory that the ranks of a machine need.

    Args:
        rank_bytes: that of the rank that needs most.
        machine_ranks: number of ranks of a machine.
        machine_bytes: that of all ranks of a machine.
        limit_gib: the most for a rank; ``None``: no limit.
        limit_is_written: whether the limit is the user's; else it is usual for the device.
        device: name of the device.
    """

    rank_bytes: int
    machine_ranks: int
    machine_bytes: int
    limit_gib: float | None
    limit_is_written: bool
    device: str

    def document(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: value for name, value in vars(self).items() if name != "device"}

    def line(self) -> str:
        """Return it as a line of text."""
        if not self.rank_bytes:
            return "Host memory: none, nothing is swapped."
        text = f"Host memory: {size_text(self.rank_bytes)}"
        if self.machine_ranks > 1:
            ranks = f"{self.machine_ranks} ranks of a machine"
            text += f" a rank, {size_text(self.machine_bytes)} for {ranks}"
        if self.limit_gib is None:
            return text
        whose = (
            "as written" if self.limit_is_written else f"usual for {self.device}; yours: --host-memory-gib N"
        )
        return f"{text}, of at most {self.limit_gib:,.0f} GiB a rank ({whose})"


def host_need(found: SearchResult) -> HostNeed:
    """Return the need of a step that was planned for one device."""
    ranks = ranks_of_a_machine(found.subject, found.step)
    return HostNeed(
        found.host_bytes,
        ranks,
        ranks * found.host_bytes,
        found.memory.host_memory_gib,
        found.host_is_written,
        found.step.device,
    )


def budget_text(
    memory: MemoryConfig, budget_bytes: int, device_bytes: int, ranks: int, fragment_bytes: int = 0
) -> str:
    """Return the budget of a device, and how it follows from the device.

    Args:
        memory: the ``memory`` section in force.
        budget_bytes: the budget.
        device_bytes: the device's memory beside its context.
        ranks: number of ranks of a machine.
        fragment_bytes: what is left of the budget for the allocator's fragments.
    """
    text = size_text(budget_bytes)
    if memory.budget_gib is not None:
        said = f", {size_text(fragment_bytes)} of it for fragments" if fragment_bytes else ""
        return f"{text}, as asked for, of {size_text(device_bytes)}{said}"
    if memory.reduce_by_gib is not None:
        return f"{text}, {memory.reduce_by_gib:g} GiB less than without a plan"
    share, reasons = (
        (MARGIN_SHARE, "fragments") if ranks == 1 else (SEVERAL_RANKS_SHARE, "fragments and NCCL")
    )
    kept = f"{(device_bytes - budget_bytes) / device_bytes:.0%}".replace("%", " %")
    left = (
        f"{kept} for {reasons}"
        if abs(device_bytes - budget_bytes - share * device_bytes) < 2
        else "memory.margin_gib"
    )
    return f"{text}: {size_text(device_bytes)} beside the driver's context, less {left}"


def assumptions(subject: AnalysedModel, step: StepShape) -> Iterator[str]:
    """Yield the assumptions about how the model is trained."""
    if subject.trained < subject.parameters:
        yield "Adapters are as PEFT makes them, in fp32 beside a base in half precision."
    if subject.quantize is not None:
        bits = {
            "4bit": "NF4 with double quantisation, 4.127 bits a weight (QLoRA, section 3)",
            "8bit": "LLM.int8(), 8 bits a weight and an fp32 constant per row",
        }[subject.quantize]
        yield (
            f"Linear layers of the decoder are stored in {bits}. One at a time is dequantised; its memory "
            "and time are counted. All other weights have the model's own type: "
            "prepare_model_for_kbit_training was not applied."
        )
    if (paged := state_bytes(step.optimizer, subject.model)[1]) and step.optimizer is not None:
        ranks = step.sharding.ranks if step.sharding else 1
        yield (
            f"{size_text(paged // ranks)} of the optimizer's states are in pages that the driver moves to "
            "the host when memory is short: they are counted as host memory, and their time is not counted."
        )
    if step.sharding is not None:
        yield (
            f"The numbers are of one of {step.sharding.ranks} ranks, ZeRO stage {step.sharding.stage}. "
            + ("Parts outside the layers and two layers are whole. " if step.sharding.stage == 3 else "")
            + (
                "Gradients of two layers are whole until they are scattered. "
                if step.sharding.stage > 1
                else ""
            )
            + "Communication between data-parallel ranks is not in the times."
        )
    rates, ranks = rates_or_none(step.device), ranks_of_a_machine(subject, step)
    shared = None if rates is None else rates.link_of(ranks)
    if rates is not None and shared is not None and shared != rates.link:
        yield (
            f"The {ranks} ranks of a machine share the rate of its memory. If all copy at once, each has "
            f"{shared.out_beside_in_bytes_per_ms / 1e6:.0f} GB/s each way."
        )


def output_note(found: SearchResult) -> Iterator[str]:
    """Yield what a training loop needs more that keeps the model's output during backward."""
    model: Any = found.subject.model
    config = model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", 0)
    tiled = any(tile.scope == "head" for tile in found.plan.tiles)
    weight = model.get_output_embeddings() if not tiled else None
    if weight is None or not vocabulary:
        return
    ranks = found.subject.tensor_parallel_size
    size = found.step.sequences * found.step.tokens * vocabulary * weight.weight.element_size() // ranks
    yield (
        "The model's output is freed before backward, as in the Trainer. A loop that still holds it "
        f"(`outputs = model(...); outputs.loss.backward()`) needs up to {size_text(size)} more, for logits."
    )


NOTHING_TO_CHANGE = "To use it: nothing need be changed. It fits as it is."


def use_line(found: SearchResult, saved_to: str | None) -> str:
    """Return the line that says how to train with this plan."""
    if not found.plan.rows and not found.plan.tiles:
        return NOTHING_TO_CHANGE
    if saved_to is not None:
        applied = f'hf_actswap.apply(model, "{saved_to}")'
        return f'To use it: actswap="{saved_to}" in ActSwapTrainingArguments, or {applied}.'
    return (
        'To use it: actswap="auto" in ActSwapTrainingArguments finds a plan by measurement; or write this '
        'one with --save plan.json and pass actswap="plan.json".'
    )


ALONE = "Times are computed from shapes and the device's rates, without communication between ranks."
_SEQ = 4096
_OPS = 6
"""The number of ops of a fate that the short table names."""


@dataclass(frozen=True)
class PlanAnswer:
    """The answer with one plan. An `output.Answer`."""

    found: SearchResult
    saved_to: str | None
    full: bool = False
    windows: bool = False
    recorded: ProfileFile | None = None
    ok: bool = True

    def document(self) -> Mapping[str, Any]:
        """Return the fields as JSON values."""
        found = self.found
        return {
            "model": found.subject.document(),
            "step": found.step.document(),
            "mode": found.memory.mode,
            "budget_bytes": found.budget_bytes,
            "allocatable_bytes": found.allocatable_bytes,
            "tokens_per_s": verdict_of(found).tokens_per_s,
            "host_memory": host_need(found).document(),
            "profile": None if self.recorded is None else self.recorded.path,
            "predicted": {name: prediction_document(step) for name, step in found.steps.items()},
            "memory": {name: parts.document() for name, parts in found.parts.items()},
            "assumed": list(assumptions(found.subject, found.step)),
            "saved_to": self.saved_to,
            "chosen_tiles": None if found.chosen_tiles is None else _tile_document(found.chosen_tiles),
            "plan": json.loads(found.plan.to_json()),
        }

    def shown(self) -> Iterable[RenderableType]:
        """Yield the text and tables to print."""
        found = self.found
        ranks = ranks_of_a_machine(found.subject, found.step)
        fragment_bytes = found.budget_bytes - found.allocatable_bytes
        budget = budget_text(
            found.memory, found.budget_bytes, found.profile.device_bytes, ranks, fragment_bytes
        )
        yield verdict_of(found).line()
        yield host_need(found).line()
        yield f"Model:  {found.subject.described()}"
        yield f"Step:   {found.step.described()}"
        yield f"Budget: {budget}; mode {found.memory.mode}"
        yield heading("Plan")
        if self.windows:
            yield fate_table(found.plan, found.profile)
        elif self.full:
            yield summary_table(found.plan, found.profile)
        else:
            yield short_table(found.plan, found.profile)
        if found.chosen_tiles is not None:
            yield heading("Nothing else fits: in tiles")
            yield ActSwapConfig(tile_config=found.chosen_tiles).to_yaml()
            yield f"Chosen because {SECOND_CLASS}."
        yield heading("Predicted")
        yield step_table(found.steps, found.allocatable_bytes)
        if any(step.peak_bytes > found.allocatable_bytes for step in found.steps.values()):
            yield "! above the budget."
        if found.parts:
            yield heading("At the peak")
            yield memory_table(found.parts)
        yield from costly_fates_note(found.steps)
        yield ALONE if self.recorded is None else self.recorded.described()
        yield from listed([*assumptions(found.subject, found.step), *output_note(found)])
        if self.saved_to is not None:
            yield f"Written to {self.saved_to}."
        yield use_line(found, self.saved_to)


@dataclass(frozen=True)
class DoesNotFit(Rejected):
    """The answer where no plan fits. An `output.Answer`.

    Args:
        least_bytes: the least peak that any plan reaches.
        budget_bytes: the budget; ``None``: it was not computed.
    """

    least_bytes: int = 0
    budget_bytes: int | None = None

    def shown(self) -> Iterable[RenderableType]:
        """Yield the text and tables to print."""
        there = "" if self.budget_bytes is None else f", and the budget is {size_text(self.budget_bytes)}"
        yield f"Does not fit: at least {gib_text(self.least_bytes, math.ceil)} are needed{there}."
        yield from super().shown()


@dataclass(frozen=True)
class ComparedSizes:
    """For several numbers of tensor-parallel ranks, a plan or the error. An `output.Answer`."""

    by_tp: Mapping[int, SearchResult | ActSwapError]

    @property
    def ok(self) -> bool:
        """Whether there is a plan for at least one number of ranks."""
        return any(isinstance(found, SearchResult) for found in self.by_tp.values())

    def document(self) -> Mapping[str, Any]:
        """Return the fields as JSON values."""
        return {"compare": [self._entry(tp, found) for tp, found in self.by_tp.items()]}

    def shown(self) -> Iterable[RenderableType]:
        """Yield the text and tables to print."""
        known = [found for found in self.by_tp.values() if isinstance(found, SearchResult)]
        if known:
            yield f"Step:   {known[0].step.described()}"
            yield f"Budget: {size_text(known[0].budget_bytes)} a rank; mode {known[0].memory.mode}"
        yield ""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in ("tp", "Peak, nothing", "Peak", "Step", "Comm.", "Swapped", "Recomputed"):
            table.add_column(name, justify="right", no_wrap=True)
        for tp, found in self.by_tp.items():
            if isinstance(found, SearchResult):
                step, told = found.prediction, communication_of(found)
                added_ms = 0.0 if told is None else told.added_ms
                table.add_row(
                    str(tp),
                    size_text(found.steps[NOTHING].peak_bytes),
                    size_text(step.peak_bytes),
                    step_ms_text(step.step_ms + added_ms),
                    "?" if told is None else step_ms_text(added_ms),
                    size_text(step.swapped_bytes),
                    size_text(step.recomputed_bytes),
                )
            else:
                table.add_row(str(tp), "", "no plan", "", "", "", "")
        yield table
        for tp, found in self.by_tp.items():
            if isinstance(found, ActSwapError):
                yield heading(f"tp={tp}")
                yield from listed(folded_by_layer(map(str, found.problems)))
        yield f"\n{communication_note(fabric_of(known[0]) if known else None)}"
        if known:
            yield from listed(assumptions(known[0].subject, known[0].step))

    @staticmethod
    def _entry(tp: int, found: SearchResult | ActSwapError) -> dict[str, Any]:
        if isinstance(found, ActSwapError):
            return {"tp": tp, "problems": problems_document(found.problems)}
        told = communication_document(communication_of(found))
        return {"tp": tp, **PlanAnswer(found, None).document(), "communication": told}


def answer_plan(asked: PlanRequest) -> PlanAnswer | DoesNotFit | ComparedSizes | StagesAnswer:
    """Return the answer of ``hf-actswap plan``.

    Raises:
        ActSwapError: there is no plan; the error says why.
    """
    written = with_tp(load_config(asked.config), asked.tp)
    if written.stream_config.tokens != "off":
        raise PlanError([_STREAMED], written.source)
    try:
        return _answer_of(asked, written)
    except BudgetError as error:
        if not error.least_bytes:
            raise
        return DoesNotFit(
            error.problems,
            error.subject,
            least_bytes=error.least_bytes,
            budget_bytes=error.budget_bytes or None,
        )


def _answer_of(asked: PlanRequest, written: ActSwapConfig) -> PlanAnswer | ComparedSizes | StagesAnswer:
    """Return the answer for a configuration in which ``--tp`` stands; raises `BudgetError` if none fits."""
    if written.parallel_config.runs_pipeline:
        table = fate_table if asked.windows else summary_table if asked.full else short_table
        with subject(asked.model, written) as seen:
            return answer_stages(asked, written, seen, step_shape(asked.step), table)
    if asked.micro_batches is not None:
        raise PlanError([_NO_PIPELINE], written.source)

    def of(size: int | None, recorded: ProfileFile | None = None) -> SearchResult:
        wanted = with_tp(written, size)
        step = step_shape(asked.step) if recorded is None else recorded.step(asked.step)
        with subject(asked.model, wanted) as found:
            ranks = ranks_of_a_machine(found, step)
            memory = memory_in_force(wanted, asked.budget_bytes, step, ranks, asked.host_bytes)
            if recorded is not None:
                recorded.check(found)
            result = planned(
                found, step, wanted, memory, None if recorded is None else recorded.profile, asked.full
            )
        said = asked.host_bytes is not None or wanted.memory.host_memory_gib is not None
        return replace(result, host_is_written=said)

    if asked.compared:
        return ComparedSizes({size: _or_why_not(of, size) for size in asked.compared})
    recorded = None if asked.profile is None else read_profile(asked.profile)
    found = of(asked.tp, recorded)
    if asked.save is not None:
        _write(asked.save, found)
    return PlanAnswer(found, asked.save, asked.full, asked.windows, recorded)


_NO_PIPELINE = Problem(
    "--micro-batches",
    "a configuration with parallel_config.pipeline_stage and parallel_config.schedule",
    "none",
    "The step of one micro-batch is planned without it.",
)
_STREAMED = Problem(
    "stream_config.tokens",
    "off: no plan is looked for inside the chunks of a streamed sequence",
    "a chunk length",
    "`plan --longest --host-memory-gib N` predicts streamed steps; without stream_config it is a whole step.",
)


def step_shape(asked: AskedStep) -> StepShape:
    """Return the step that the options describe, with defaults for options that were not given."""
    return StepShape(
        asked.sequences or 1,
        asked.tokens or _SEQ,
        device_name(asked.device),
        autocast_of(asked.autocast),
        asked.optimizer or "adamw",
        asked.gradient_dtype,
        asked.sharding,
    )


def autocast_of(asked: AskedAutocastName | None) -> AutocastName | None:
    """Return the type of mixed precision; not asked for it is TRL's default (``SFTConfig.bf16``)."""
    return None if asked == "none" else asked or "bf16"


def _tile_document(tiles: TileConfig) -> dict[str, Any]:
    document: dict[str, Any] = ActSwapConfig(tile_config=tiles).to_dict()["tile_config"]
    return document


def _or_why_not(of: Any, size: int) -> SearchResult | ActSwapError:
    try:
        found: SearchResult = of(size)
    except ActSwapError as error:
        return error
    return found


def _write(path: str, found: SearchResult) -> None:
    made_for = fingerprint_of(found.subject.model, (found.step.sequences, found.step.tokens))
    document = json.loads(replace(found.plan, fingerprint=made_for).to_json())
    document[PREDICTED] = {
        "model": found.subject.document(),
        "step": found.step.document(),
        "budget_bytes": found.budget_bytes,
        **prediction_document(found.steps[PLANNED]),
        "without_plan_peak_bytes": found.steps[NOTHING].peak_bytes,
        "without_plan_step_ms": found.steps[NOTHING].step_ms,
    }
    try:
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--save") from error


def fabric_of(found: SearchResult) -> Fabric | None:
    """Return the interconnect between the devices of a step; ``None``: not known."""
    return next((rates.fabric for rates in DEVICES if rates.name == found.step.device), None)


def communication_of(found: SearchResult) -> Exchanged | None:
    """Return what tensor-parallel ranks send in a step, whatever the plan; ``None``: not known."""
    fabric, ranks = fabric_of(found), found.subject.tensor_parallel_size
    if fabric is None or (ranks > 1 and not found.subject.shape.communicates):
        return None
    return exchanged(tensor_axis(found.subject.model, found.subject.shape, found.profile), ranks, fabric)


def communication_document(found: Exchanged | None) -> dict[str, Any] | None:
    """Return the exchanges of a step as JSON values."""
    if found is None:
        return None
    return {
        "source": "data sheet",
        "sent_bytes": found.sent_bytes,
        "collectives": found.collectives,
        "ms": found.ms,
        "added_ms": found.added_ms,
    }


def communication_note(fabric: Fabric | None) -> str:
    """Return the note below a table of steps with communication."""
    if fabric is None:
        return "Of one rank. Times are computed from shapes, without communication between ranks."
    rate = f"{fabric.bytes_per_ms / 1e6:.0f} GB/s and {fabric.latency_ms:g} ms each"
    return (
        "Of one rank. Times are computed from shapes. Comm. is a part of the step: the time of collectives "
        f"that no product hides, at {rate} ({fabric.name} by its data sheet; not measured), all ranks in "
        "one machine."
    )


_Line = tuple[str, str, str, int]
"""A line of a table of fates: op, fate, windows, bytes that autograd saves."""


def fate_table(plan: MemoryPlan, profile: Profile | None) -> Table:
    """Return a table of the fates of all ops, with equal layers in one row.

    Args:
        plan: the plan to show.
        profile: profile of the step, for the bytes; ``None``: no bytes are shown.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Layers", overflow="fold")
    table.add_column("Op", overflow="fold")
    table.add_column("Fate")
    table.add_column("Prefetch/release", justify="right")
    if profile is not None:
        table.add_column("Saved", justify="right", no_wrap=True)
    sizes = {} if profile is None else dict(saved_by_row(profile, plan))
    groups: dict[tuple[_Line, ...], list[Scope]] = {}
    for scope in plan.scopes:
        groups.setdefault(tuple(_lines(plan, sizes, scope)), []).append(scope)
    for lines, scopes in groups.items():
        label = _label(scopes, bool(lines))
        for op, fate, windows, size in lines or ((("everything", "keep", "", 0),) if label else ()):
            saved = [size_text(size * len(scopes)) if size else ""] if profile is not None else []
            table.add_row(label, op, fate, windows, *saved)
            label = ""
    for line in folded_tiles(plan.tiles):
        table.add_row(*line)
    if plan.streamed is not None:
        table.add_row("the model", "the sequence", str(plan.streamed))
    return table


def short_table(plan: MemoryPlan, profile: Profile) -> Table:
    """Return a table with a row for each fate: bytes, and its largest ops, each with its number of layers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Fate")
    table.add_column("Saved", justify="right", no_wrap=True)
    table.add_column("Ops (layers)", overflow="fold")
    found: dict[str, dict[str, list[int]]] = {}
    for (_, op, outcome), size in bytes_by_fate(profile, plan).items():
        if outcome != "unsaved":
            found.setdefault(outcome, {}).setdefault(op or "inputs", []).append(size)
    for fate, sizes in sorted(found.items()):
        largest = sorted(sizes, key=lambda op: -sum(sizes[op]))
        ops = ", ".join(f"{op} ({len(sizes[op])})" for op in largest[:_OPS])
        more = f", and {len(largest) - _OPS} more: --full" if len(largest) > _OPS else ""
        rest = "everything else" if len(found) > 1 else "everything"
        total = sum(map(sum, sizes.values()))
        table.add_row(fate, size_text(total), rest if fate == "keep" else f"{ops}{more}")
    return table


def memory_table(parts: Mapping[str, MemoryParts]) -> Table:
    """Return a table of what peaks consist of, with a row for each entry of ``parts``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for name in ("Weights", "Gradients", "States", "Activations", "Decides"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, part in parts.items():
        sizes = (part.weights, part.gradients, part.states, part.activations + part.workspaces)
        table.add_row(name, *map(size_text, sizes), part.decides)
    return table


def summary_table(plan: MemoryPlan, profile: Profile) -> Table:
    """Return a table of fates as `fate_table`, but with all ops of one fate in one row, without windows."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Layers", overflow="fold", max_width=18)
    table.add_column("Fate")
    table.add_column("Ops", overflow="fold")
    table.add_column("Saved", justify="right", no_wrap=True)
    sizes = dict(saved_by_row(profile, plan))
    groups: dict[tuple[_Line, ...], list[Scope]] = {}
    for scope in plan.scopes:
        groups.setdefault(tuple(_by_fate(_lines(plan, sizes, scope))), []).append(scope)
    for lines, scopes in groups.items():
        label = _label(scopes, bool(lines))
        for ops, fate, _, size in lines:
            table.add_row(label, fate, ops, size_text(size * len(scopes)))
            label = ""
    return table


def step_table(steps: Mapping[str, Prediction], device_bytes: int | None = None) -> Table:
    """Return a table of predicted steps, one in each row.

    Args:
        steps: predictions by the row's name, such as ``recompute all``.
        device_bytes: budget; peaks above it are marked. ``None``: none are marked.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for name in ("Peak", "Step", "Kept", "Swapped", "Recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, step in steps.items():
        over = " !" if device_bytes is not None and step.peak_bytes > device_bytes else ""
        table.add_row(
            name,
            f"{size_text(step.peak_bytes)}{over}",
            step_ms_text(step.step_ms),
            size_text(step.kept_bytes),
            size_text(step.swapped_bytes),
            size_text(step.recomputed_bytes),
        )
    return table


def windows_text(row: PlanRow) -> str:
    """Return a swap's windows as text: prefetch/release in operators, or ``auto`` (chosen in training)."""
    if row.fate != "swap":
        return ""
    return f"{row.windows.prefetch_ops}/{row.windows.release_ops}" if row.windows else "auto"


def _lines(
    plan: MemoryPlan, sizes: Mapping[tuple[Scope, PlanRow | None], int], scope: Scope
) -> Iterator[_Line]:
    for row in plan.rows:
        if row.scope != scope:
            continue
        op = row.op_path or "everything"
        op += "" if row.ordinal is None else f" (call {row.ordinal})"
        fate: str = row.fate
        if COMPILE_BUDGET in row.parameters:
            fate += f", budget {row.parameters[COMPILE_BUDGET]:g}"
        yield op, fate, windows_text(row), _size_of(sizes, row)
    rest = sizes.get((scope, None), 0)
    if rest:
        named = any(row.scope == scope for row in plan.rows)
        yield "everything else" if named else "everything", "keep", "", rest


def _by_fate(lines: Iterable[_Line]) -> Iterator[_Line]:
    ops: dict[str, dict[str, None]] = {}
    sizes: dict[str, int] = {}
    for op, fate, _, size in lines:
        if not size:
            continue
        ops.setdefault(fate, {})[op.partition(" (call")[0]] = None
        sizes[fate] = sizes.get(fate, 0) + size
    for fate, size in sizes.items():
        yield ", ".join(ops[fate]), fate, "", size


def _label(scopes: list[Scope], with_names: bool) -> str:
    return format_scopes(scope for scope in scopes if with_names or scope not in SCOPES)


def _size_of(sizes: Mapping[tuple[Scope, PlanRow | None], int], row: PlanRow) -> int:
    return sizes.get((row.scope, row), 0)
