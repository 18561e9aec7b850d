"""The lines with which the answer of ``hf-actswap plan`` begins and ends: does it fit, how fast, what to do.

They answer whether a device suffices; the tables between them say why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..config import MemoryConfig
from ..plan import MemoryPlan
from ..planner.budget import MARGIN_SHARE, limit_bytes
from ..planner.cost.exchanges import Exchanged
from ..planner.devices import device_rates
from .output import size_text, step_ms_text
from .planned import (
    EVERYTHING,
    NOTHING,
    PLANNED,
    SEVERAL_RANKS_SHARE,
    SearchResult,
    paged_bytes,
    rates_or_none,
)
from .step import StepShape, bucket_bytes, ranks_of_a_machine
from .subject import AnalysedModel

_SAME_SHARE = 0.005
"""Steps whose times differ by less than this share are called equally fast."""


@dataclass(frozen=True)
class PredictedStep:
    """Peak of the rank that needs most, and time of a step."""

    peak_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Verdict:
    """What the first line of an answer says: whether a step fits, and how fast it is beside two others.

    Args:
        free: the step without a plan, on a device of any size.
        checkpointed: the step with gradient checkpointing alone.
        tokens: of a step.
        whose: whose tokens these are, such as `` a rank``; empty if there is one rank.
        where: on which stage of a pipeline the peak is, such as `` on stage 0``.
        budget_bytes: the most that the step may allocate on a device.
        limit_bytes: the bytes that the peak is compared with: the device's, or the budget if one was named.
        means: what makes it fit, such as ``with this plan``.
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
    means: str
    compared: bool

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.step.step_ms if self.step.step_ms else 0.0

    def line(self) -> str:
        """Return it as a line of text."""
        peak = size_text(self.step.peak_bytes)
        if self.step.peak_bytes > self.budget_bytes:
            budget = size_text(self.budget_bytes)
            return f"Does not fit as written: {peak} are needed{self.where}, and the budget is {budget}."
        said = [
            f"{peak.removesuffix(' GiB')} of {size_text(self.limit_bytes)}{self.where}",
            f"{self.tokens_per_s:,.0f} tokens/s{self.whose}",
        ]
        if self.compared:
            said += [self._against_checkpointing(), _compared(self.step, self.free, "without a limit")]
        return f"Fits {self.means}: {', '.join(said)}"

    def _against_checkpointing(self) -> str:
        if self.checkpointed.peak_bytes > self.budget_bytes:
            peak = size_text(self.checkpointed.peak_bytes)
            return f"gradient checkpointing alone would not fit ({peak})"
        return _compared(self.step, self.checkpointed, "checkpointing")


def _compared(step: PredictedStep, other: PredictedStep, what: str) -> str:
    ratio = other.step_ms / step.step_ms if step.step_ms else 1.0
    if abs(ratio - 1) < _SAME_SHARE:
        return f"as fast as {what}"
    return f"{100 * abs(ratio - 1):.0f} % {'faster' if ratio > 1 else 'slower'} than {what}"


def verdict_of(found: SearchResult) -> Verdict:
    """Return what the first line says of a search for one device."""
    predicted = (found.steps[name] for name in (PLANNED, NOTHING, EVERYTHING))
    step, free, checkpointed = (PredictedStep(one.peak_bytes, one.step_ms) for one in predicted)
    several = ranks_of_a_machine(found.subject, found.step) > 1
    return Verdict(
        step,
        free,
        checkpointed,
        found.step.micro_batches * found.step.sequences * found.step.tokens,
        " a rank" if several else "",
        "",
        found.allocatable_bytes,
        limit_bytes(found.memory, found.profile.device_bytes, found.budget_bytes),
        means=_means(found),
        compared=bool(found.plan.rows) or found.chosen_tiles is not None,
    )


def _means(found: SearchResult) -> str:
    """Return what makes a step fit, the dearest means first."""
    if found.chosen_tiles is not None:
        return "in tiles"
    moved = [
        *(["frozen weights"] if found.step.weights == "host" else []),
        *(["the optimizer's states"] if found.states_moved else []),
    ]
    if moved:
        return f"with {' and '.join(moved)} on the host"
    return "with this plan" if _acts(found.plan) else "without a plan"


@dataclass(frozen=True)
class HostNeed:
    """Host memory that the ranks of a machine need."""

    rank_bytes: int  # of the rank that needs most
    machine_ranks: int
    machine_bytes: int
    limit_gib: float | None  # of a rank
    limit_is_written: bool  # else it is what is usual for the device
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
    kept_bytes, left = device_bytes - budget_bytes, "memory.margin_gib"
    if abs(kept_bytes - share * device_bytes) < 2:
        left = f"{100 * kept_bytes / device_bytes:.0f} % for {reasons}"
    return f"{text}: {size_text(device_bytes)} beside the driver's context, less {left}"


def assumptions(subject: AnalysedModel, step: StepShape) -> Iterator[str]:
    """Yield the assumptions about how the model is trained."""
    if any(getattr(subject.model.config, name, None) for name in ("vision_config", "audio_config")):
        yield "The step is of text alone: what images and sounds add to it is not counted."
    if hasattr(subject.model, "peft_config") and not (step.in_fp32 and step.in_fsdp):
        more = ", under autocast: without it (--autocast none) more is needed"
        inputs = "" if step.autocast is None else more
        yield f"Adapters are as PEFT makes them, in fp32 beside a base in half precision{inputs}."
    if subject.quantize is not None:
        bits = {
            "4bit": "NF4 with double quantisation, 4.127 bits a weight (QLoRA, section 3)",
            "4bit-single": "NF4 with an fp32 constant for each 64, 4.5 bits a weight (QLoRA, section 3)",
            "8bit": "LLM.int8(), 8 bits a weight and an fp32 constant per row",
        }[subject.quantize]
        prepare = "prepare_model_for_kbit_training"
        others = (
            f"are fp32, as {prepare} makes them."
            if subject.prepared
            else f"have the model's own type: {prepare} was not applied (--prepare-kbit)."
        )
        yield (
            f"Linear layers of the decoder are stored in {bits}. One at a time is dequantised; its memory "
            f"and time are counted. All other weights {others}"
        )
        if subject.quantize == "8bit":
            yield (
                "bitsandbytes itself holds the inputs of 8-bit layers until backward: none is swapped. "
                "Where ops are recomputed in place of whole layers, these inputs stay: more memory is needed."
            )
    if paged := paged_bytes(subject, step):
        yield (
            f"{size_text(paged)} of the optimizer's states are in pages that the driver moves to "
            "the host when memory is short: they are counted as host memory, and their time is not counted."
        )
    if step.sharding is not None:
        stage, buckets = step.sharding.stage, bucket_bytes(subject, step)
        whole = "Parts outside the layers and two layers are whole. " if stage == 3 else ""
        whole = "All weights are whole until backward has ended. " if step.sharding.stays else whole
        whole += "Gradients of two layers are whole until they are scattered. " if stage > 1 else ""
        whole += f"DDP's buckets, {size_text(buckets)}, are counted with the weights. " if buckets else ""
        kind = f"ZeRO stage {stage}" if stage else "which shard nothing"
        if step.in_fp32:
            whole += (
                "Trained weights are sharded in fp32, as Accelerate does under mixed precision. "
                if step.in_fsdp
                else "Of trained weights there are fp32 copies, as DeepSpeed keeps them, among the states. "
            )
        fabric = device_rates(step.device).fabric
        collectives = "are not in the times" if fabric is None else f"run {fabric.described()}"
        yield (
            f"The numbers are of one of {step.sharding.ranks} ranks, {kind}. {whole}"
            f"Their collectives {collectives}."
        )
    rates, ranks = rates_or_none(step.device), ranks_of_a_machine(subject, step)
    shared = None if rates is None else rates.link_of(ranks)
    if rates is not None and shared is not None and shared != rates.link:
        yield (
            f"The {ranks} ranks of a machine share the rate of its memory. If all copy at once, each has "
            f"{shared.out_beside_in_bytes_per_ms / 1e6:.0f} GB/s each way."
        )


def times_note(step: StepShape, told: Exchanged | None = None) -> str:
    """Return what the times of a step are computed from; ``told``: what its data-parallel ranks send."""
    source = "Times are computed from shapes and the device's rates"
    if step.sharding is None or device_rates(step.device).fabric is None:
        return f"{source}, without communication between ranks."
    if told is None:
        return f"{source}."
    return (
        f"{source}. A rank sends {size_text(told.sent_bytes)} to the others, in {step_ms_text(told.ms)}: "
        f"{step_ms_text(told.added_ms)} of these are not hidden by compute, and part of the step."
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
    size = found.step.sequences * found.step.label_tokens * vocabulary * weight.weight.element_size() // ranks
    yield (
        "The model's output is freed before backward, as in the Trainer. A loop that still holds it "
        f"(`outputs = model(...); outputs.loss.backward()`) needs up to {size_text(size)} more, for logits."
    )


_SHORT_US = 100.0
"""For a node of autograd. Rehearsed, the slow host of a CI machine took 125 for 8B with LoRA, and 170 for
Qwen3-30B-A3B with LoRA under gradient checkpointing."""


def host_note(found: SearchResult) -> Iterator[str]:
    """Yield a line if a step is so short for its number of operators that the host may be slower."""
    nodes = sum(op_event.num_ops for op_event in found.profile.op_events)
    each_us = 1e3 * found.prediction.step_ms / max(nodes, 1)
    if found.profile.source == "shapes" and 0 < each_us < _SHORT_US:
        yield (
            f"The host's time is not counted. Autograd records {nodes:,} operators; if the host needs more "
            f"than {each_us:.0f} us for each (forward, backward and what runs again), a step takes longer, "
            "and a larger batch costs little."
        )


def states_note(found: SearchResult) -> Iterator[str]:
    """Yield a line if the optimizer's states wait on the host, with what a step takes otherwise."""
    if not found.states_moved:
        return
    size, kept_ms, why = size_text(found.profile.optimizer_state_bytes), found.kept_states_ms, "as written"
    if kept_ms is not None:
        taken = step_ms_text(found.prediction.step_ms)
        why = f"chosen: a step takes {taken}, and {step_ms_text(kept_ms)} with them on the device"
        if math.isinf(kept_ms):
            why = "chosen: nothing fits with them on the device"
    yield f"Optimizer's states ({size}): on the host, copied once a step ({why})."


def weights_note(found: SearchResult) -> Iterator[str]:
    """Yield a line if it was chosen where the frozen weights of layers wait."""
    if found.weights_why:
        place = "on the host" if found.step.weights == "host" else "on the device"
        yield f"Frozen weights of the layers: {place} (chosen: {found.weights_why})."


def _acts(plan: MemoryPlan) -> bool:
    return bool(plan.rows or plan.tiles) or plan.weights == "host"


def use_line(found: SearchResult, saved_to: str | None) -> str:
    """Return the line that says how to train with this plan."""
    moved = found.states_moved and found.kept_states_ms is None
    if moved or found.memory.optimizer_in_backward:
        keys = [f"mode: {found.memory.mode}"]
        if moved:
            keys.append("preference: memory_saving")
        if found.memory.optimizer_in_backward:
            keys.append("optimizer_in_backward: true")
        if saved_to is not None:
            keys.append(f"plan_file: {saved_to}")
        section = ", ".join(keys)
        alone = "move the optimizer's states" if moved else "step in backward"
        return f"To use it: `memory: {{{section}}}` in the configuration. (A plan alone does not {alone}.)"
    if not _acts(found.plan) and not found.states_moved:
        return "To use it: nothing need be changed. It fits as it is."
    if saved_to is not None:
        applied = f'hf_actswap.apply(model, "{saved_to}")'
        return f'To use it: actswap="{saved_to}" in ActSwapTrainingArguments, or {applied}.'
    way = 'actswap="auto" in ActSwapTrainingArguments'
    if found.plan.weights == "host":
        way = "`memory: {mode: adaptive, weights: host}`"
    return (
        f"To use it: {way} finds a plan by measurement; or write this one with --save plan.json and pass "
        'actswap="plan.json".'
    )
