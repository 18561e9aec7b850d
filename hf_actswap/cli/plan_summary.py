"""The lines with which the answer of ``hf-actswap plan`` begins and ends: does it fit, how fast, what to do.

They answer whether a device suffices; the tables between them say why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..planner.budget import MARGIN_SHARE
from ..planner.profile import Prediction
from .output import size_text
from .planned import EVERYTHING, NOTHING, SEVERAL_RANKS_SHARE, SearchResult
from .step import ranks_of_a_machine

_SAME_SHARE = 0.005
"""Steps whose times differ by less than this share are called equally fast."""


def tokens_per_s(found: SearchResult, step: Prediction) -> float:
    """Return how many tokens a rank trains in a second."""
    return 1000 * found.step.sequences * found.step.tokens / step.step_ms if step.step_ms else 0.0


def fits_line(found: SearchResult) -> str:
    """Return the line that says whether the step fits, and how fast it is."""
    step, free, device = found.prediction, found.steps[NOTHING], found.profile.device_bytes
    limit = (
        device
        if found.memory.budget_gib is None and found.memory.reduce_by_gib is None
        else found.budget_bytes
    )
    ranks = ranks_of_a_machine(found.subject, found.step)
    said = [
        f"{size_text(step.peak_bytes).removesuffix(' GiB')} of {size_text(limit)}",
        f"{tokens_per_s(found, step):,.0f} tokens/s{' a rank' if ranks > 1 else ''}",
    ]
    if found.plan.rows or found.chosen_tiles is not None:
        said += [_against_checkpointing(found), _compared(step, free, "without a limit")]
    how = "" if found.plan.rows or found.plan.tiles else " without a plan"
    return f"Fits{how}: {', '.join(said)}"


def _against_checkpointing(found: SearchResult) -> str:
    checkpointed = found.steps[EVERYTHING]
    if checkpointed.peak_bytes > found.allocatable_bytes:
        return f"gradient checkpointing alone would not fit ({size_text(checkpointed.peak_bytes)})"
    return _compared(found.prediction, checkpointed, "checkpointing")


def _compared(step: Prediction, other: Prediction, what: str) -> str:
    """Return how many more tokens a second ``step`` trains than ``other``."""
    ratio = other.step_ms / step.step_ms if step.step_ms else 1.0
    if abs(ratio - 1) < _SAME_SHARE:
        return f"as fast as {what}"
    return f"{100 * abs(ratio - 1):.0f} % {'faster' if ratio > 1 else 'slower'} than {what}"


def host_document(found: SearchResult) -> dict[str, Any]:
    """Return the need of host memory as JSON values."""
    limit, ranks = found.memory.host_memory_gib, ranks_of_a_machine(found.subject, found.step)
    return {
        "rank_bytes": found.host_bytes,
        "machine_ranks": ranks,
        "machine_bytes": ranks * found.host_bytes,
        "limit_gib": limit,
        "limit_is_written": found.host_is_written,
    }


def host_lines(found: SearchResult) -> Iterator[str]:
    """Yield a line with the host memory that the ranks need, and its limit."""
    if not found.host_bytes:
        yield "Host memory: none, nothing is swapped."
        return
    facts = host_document(found)
    limit, ranks = facts["limit_gib"], facts["machine_ranks"]
    machine = (
        f" a rank, {size_text(facts['machine_bytes'])} for {ranks} ranks of a machine" if ranks > 1 else ""
    )
    text = f"Host memory: {size_text(found.host_bytes)}{machine}"
    if limit is not None:
        whose = (
            "as written"
            if found.host_is_written
            else f"usual for {found.step.device}; yours: --host-memory-gib N"
        )
        text += f", of at most {limit:,.0f} GiB a rank ({whose})"
    yield text


def budget_text(found: SearchResult) -> str:
    """Return the budget, and how it follows from the device."""
    memory, device = found.memory, found.profile.device_bytes
    text = size_text(found.budget_bytes)
    if memory.budget_gib is not None:
        fragments = found.budget_bytes - found.allocatable_bytes
        said = f", {size_text(fragments)} of it for fragments" if fragments else ""
        return f"{text}, as asked for, of {size_text(device)}{said}"
    if memory.reduce_by_gib is not None:
        return f"{text}, {memory.reduce_by_gib:g} GiB less than without a plan"
    ranks = ranks_of_a_machine(found.subject, found.step)
    share, reasons = (
        (MARGIN_SHARE, "fragments") if ranks == 1 else (SEVERAL_RANKS_SHARE, "fragments and NCCL")
    )
    kept = f"{(device - found.budget_bytes) / device:.0%}".replace("%", " %")
    left = (
        f"{kept} for {reasons}"
        if abs(device - found.budget_bytes - share * device) < 2
        else "memory.margin_gib"
    )
    return f"{text}: {size_text(device)} beside the driver's context, less {left}"


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


def use_line(found: SearchResult, saved_to: str | None) -> str:
    """Return the line that says how to train with this plan."""
    if not found.plan.rows and not found.plan.tiles:
        return "To use it: nothing need be changed. It fits as it is."
    if saved_to is not None:
        applied = f'hf_actswap.apply(model, "{saved_to}")'
        return f'To use it: actswap="{saved_to}" in ActSwapTrainingArguments, or {applied}.'
    return (
        'To use it: actswap="auto" in ActSwapTrainingArguments finds a plan by measurement; or write this '
        'one with --save plan.json and pass actswap="plan.json".'
    )
