"""The answer of ``hf-actswap plan``: what the planner would do, computed without GPU and weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType
from rich.table import Table

from ..config import ActSwapConfig, MemoryConfig, WeightsPlace, load_config
from ..config.sizes import GIB, gib_text
from ..errors import ActSwapError, PlanError, Problem
from ..plan import MemoryPlan, PlanRow
from ..plan.actions import Scope, fingerprint_of, folded_tiles
from ..plan.tiles import SECOND_CLASS
from ..planner.budget import BudgetError
from ..planner.cost.exchanges import Exchanged, exchanged
from ..planner.cost.tensor_axis import tensor_axis
from ..planner.devices import DEVICES, Fabric
from ..planner.profile import Prediction, Profile
from ..report.console import folded, op_and_fate
from .options import PREDICTED, AskedStep, PlanRequest
from .output import (
    Answer,
    folded_by_layer,
    heading,
    listed,
    problems_document,
    rejected,
    shown_problems,
    size_text,
    step_ms_text,
    table_of,
)
from .plan_summary import (
    assumptions,
    budget_text,
    host_need,
    host_note,
    output_note,
    states_note,
    times_note,
    use_line,
    verdict_of,
    weights_note,
)
from .planned import (
    NOTHING,
    PLANNED,
    MemoryParts,
    SearchResult,
    chooses_itself,
    costly_fates_note,
    memory_in_force,
    planned,
    with_weights_placed,
)
from .profile_file import ProfileFile, read_profile
from .stages import answer_stages
from .step import (
    StepShape,
    bytes_by_fate,
    device_name,
    exchanged_by,
    prediction_document,
    ranks_of_a_machine,
    saved_by_row,
    weights_on_host,
    with_states_of,
)
from .subject import AnalysedModel, quantised_weights, subject, with_stored_names, with_tp

_SEQ = 4096
_OPS = 6
"""The number of ops of a fate that the short table names."""


def _document(
    found: SearchResult, saved_to: str | None = None, recorded: ProfileFile | None = None
) -> dict[str, Any]:
    tiles = found.chosen_tiles
    told = exchanged_by(found.subject, found.step, found.profile)
    return {
        "model": found.subject.document(),
        "step": found.step.document(),
        "mode": found.memory.mode,
        "budget_bytes": found.budget_bytes,
        "allocatable_bytes": found.allocatable_bytes,
        "reserved_bytes": found.reserved_bytes,
        "tokens_per_s": verdict_of(found).tokens_per_s,
        "optimizer_states": {
            "place": "host" if found.states_moved else "device",
            "kept_ms": None if found.kept_states_ms in (None, math.inf) else found.kept_states_ms,
        },
        "host_memory": host_need(found).document(),
        "profile": None if recorded is None else recorded.path,
        "predicted": {name: prediction_document(step) for name, step in found.steps.items()},
        "memory": {name: parts.document() for name, parts in found.parts.items()},
        "assumed": list(assumptions(found.subject, found.step)),
        "data_parallel": None if told is None else asdict(told),
        "weights": {"place": found.step.weights, "why": found.weights_why},
        "saved_to": saved_to,
        "chosen_tiles": None if tiles is None else ActSwapConfig(tile_config=tiles).to_dict()["tile_config"],
        "plan": json.loads(found.plan.to_json()),
    }


def _shown(found: SearchResult, asked: PlanRequest, recorded: ProfileFile | None) -> Iterator[RenderableType]:
    ranks = ranks_of_a_machine(found.subject, found.step)
    fragment_bytes = found.budget_bytes - found.allocatable_bytes
    budget = budget_text(found.memory, found.budget_bytes, found.profile.device_bytes, ranks, fragment_bytes)
    yield verdict_of(found).line()
    yield host_need(found).line()
    yield f"Model:  {found.subject.described()}"
    yield f"Step:   {found.step.described()}"
    yield f"Budget: {budget}; mode {found.memory.mode}"
    yield heading("Plan")
    yield _fates_shown(asked)(found.plan, found.profile)
    yield from states_note(found)
    yield from weights_note(found)
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
    told = exchanged_by(found.subject, found.step, found.profile)
    yield times_note(found.step, told) if recorded is None else recorded.described()
    yield from listed([*assumptions(found.subject, found.step), *output_note(found), *host_note(found)])
    if asked.save is not None:
        yield f"Written to {asked.save}."
    yield use_line(found, asked.save)


def _compared(by_tp: Mapping[int, SearchResult | ActSwapError]) -> Iterable[RenderableType]:
    known = [found for found in by_tp.values() if isinstance(found, SearchResult)]
    if known:
        yield f"Step:   {known[0].step.described()}"
        yield f"Budget: {size_text(known[0].budget_bytes)} a rank; mode {known[0].memory.mode}"
    yield ""
    names = (">tp", ">Peak, nothing", ">Peak", ">Step", ">Comm.", ">Swapped", ">Recomputed")
    table = table_of(*names)
    for tp, found in by_tp.items():
        if isinstance(found, ActSwapError):
            table.add_row(str(tp), "", "no plan", "", "", "", "")
            continue
        step, told = found.prediction, _communication_of(found)
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
    yield table
    for tp, found in by_tp.items():
        if isinstance(found, ActSwapError):
            yield heading(f"tp={tp}")
            yield from listed(folded_by_layer(map(str, found.problems)))
    yield f"\n{_communication_note(_fabric_of(known[0]) if known else None)}"
    if known:
        yield from listed(assumptions(known[0].subject, known[0].step))


def _compared_document(tp: int, found: SearchResult | ActSwapError) -> dict[str, Any]:
    if isinstance(found, ActSwapError):
        return {"tp": tp, "problems": problems_document(found.problems)}
    told = _communication_of(found)
    told_document = None if told is None else {"source": "data sheet", **asdict(told)}
    return {"tp": tp, **_document(found), "communication": told_document}


def answer_plan(asked: PlanRequest) -> Answer:
    """Return the answer of ``hf-actswap plan``; an `ActSwapError` says why there is no plan."""
    written = with_tp(load_config(asked.config), asked.tp)
    if written.stream_config.tokens != "off":
        raise PlanError([_STREAMED], written.source)
    try:
        return _answer_of(asked, written)
    except BudgetError as error:
        if not error.least_bytes:
            raise
        there = f", and the budget is {size_text(error.budget_bytes)}" if error.budget_bytes else ""
        needed = f"Does not fit: at least {gib_text(error.least_bytes, math.ceil)} are needed{there}."
        return rejected(error.problems, [needed, *shown_problems(error.problems, error.subject)])


def _answer_of(asked: PlanRequest, written: ActSwapConfig) -> Answer:
    if written.parallel_config.runs_pipeline:
        with subject(asked.model, written) as seen:
            stages = answer_stages(asked, written, seen, step_shape(asked.step), _fates_shown(asked))
            return Answer(stages.document(), stages.shown(), stages.ok)

    def of(size: int | None, recorded: ProfileFile | None = None) -> SearchResult:
        wanted = with_tp(written, size)
        with subject(asked.model, wanted) as found:
            if recorded is None and wanted.memory.weights == "auto":
                return with_weights_placed(lambda place: at(found, wanted, place, None))
            if recorded is None and chooses_itself(wanted.memory):
                return with_weights_placed(lambda place: at(found, wanted, place, None), if_faster=False)
            place: WeightsPlace = "host" if wanted.memory.weights == "host" else "keep"
            return at(found, wanted, place, recorded)

    def at(
        found: AnalysedModel, wanted: ActSwapConfig, place: WeightsPlace, recorded: ProfileFile | None
    ) -> SearchResult:
        wanted = replace(wanted, memory=replace(wanted.memory, weights=place))
        step = step_shape(asked.step) if recorded is None else recorded.step(asked.step)
        step = replace(step, weights=place, micro_batches=asked.micro_batches or 1)
        step = with_states_of(step, wanted.memory)
        if step.micro_batches > 1 and step.sharding is not None and step.sharding.stage > 1:
            raise PlanError([_SHARDED_GRADIENTS])
        ranks = ranks_of_a_machine(found, step)
        memory = memory_in_force(wanted, asked.budget_bytes, step, ranks, asked.host_free_bytes)
        if recorded is not None:
            recorded.check(found)
        room = _left_to_swap(memory, found, step)
        profile = None if recorded is None else recorded.profile
        result = planned(found, step, wanted, room, profile, asked.full)
        memory = replace(memory, preference=result.memory.preference)
        said = asked.host_free_bytes is not None or wanted.memory.host_memory_gib is not None
        return replace(result, memory=memory, host_is_written=said)

    if asked.compared:
        by_tp: dict[int, SearchResult | ActSwapError] = {}
        for size in asked.compared:
            try:
                by_tp[size] = of(size)
            except ActSwapError as error:
                by_tp[size] = error
        return Answer(
            {"compare": [_compared_document(tp, found) for tp, found in by_tp.items()]},
            _compared(by_tp),
            ok=any(isinstance(found, SearchResult) for found in by_tp.values()),
        )
    recorded = None if asked.profile is None else read_profile(asked.profile)
    found = of(asked.tp, recorded)
    if asked.save is not None:
        _write(asked.save, found)
    return Answer(_document(found, asked.save, recorded), _shown(found, asked, recorded))


def _left_to_swap(memory: MemoryConfig, found: AnalysedModel, step: StepShape) -> MemoryConfig:
    """Return ``memory`` with the host memory that frozen weights leave to swapped tensors."""
    held = sum(weights_on_host(found, step).values())
    if not held or memory.host_memory_gib is None:
        return memory
    left_gib = memory.host_memory_gib - held / GIB
    if left_gib <= 0:
        limit = f"{memory.host_memory_gib:.4g} GiB a rank"
        hint = "Name a larger one (--host-memory-gib)."
        raise PlanError([Problem("memory.weights", f"{gib_text(held)} of host memory", limit, hint)])
    return replace(memory, host_memory_gib=left_gib)


_SHARDED_GRADIENTS = Problem(
    "--micro-batches",
    "1 beside --shard of gradients (zero2, zero3, fsdp)",
    "more",
    "The step of one micro-batch is planned without it.",
)
_STREAMED = Problem(
    "stream_config.tokens",
    "off: no plan is looked for inside the chunks of a streamed sequence",
    "a chunk length",
    "`plan --longest --host-memory-gib N` predicts streamed steps; without stream_config it is a whole step.",
)


def step_shape(asked: AskedStep) -> StepShape:
    """Return the step that the options describe, with defaults for options that were not given.

    Mixed precision is TRL's default (``SFTConfig.bf16``) then.
    """
    return StepShape(
        asked.sequences or 1,
        asked.tokens or _SEQ,
        device_name(asked.device),
        None if asked.autocast == "none" else asked.autocast or "bf16",
        asked.optimizer or "adamw",
        asked.gradient_dtype,
        asked.sharding,
        fused_loss=asked.fused_loss,
        target_tokens=asked.target_tokens,
    )


def _fates_shown(asked: PlanRequest) -> Callable[[MemoryPlan, Profile], Table]:
    """Return the function that makes the table of fates that the options ask for."""
    return fate_table if asked.windows else _summary_table if asked.full else _short_table


def _write(path: str, found: SearchResult) -> None:
    model = found.subject.model
    made_for = fingerprint_of(model, found.profile.batch_shape, quantised_weights(model))
    limit = found.budget_bytes if found.memory.budget_gib is not None else None
    plan = with_stored_names(found.plan, found.subject)
    plan = replace(plan, fingerprint=made_for, device_memory_bytes=limit)
    document = json.loads(plan.to_json())
    document[PREDICTED] = {
        "model": found.subject.document(),
        "step": found.step.document(),
        "budget_bytes": found.budget_bytes,
        **prediction_document(found.steps[PLANNED]),
        "without_plan_peak_bytes": found.steps[NOTHING].peak_bytes,
        "without_plan_step_ms": found.steps[NOTHING].step_ms,
        "states_resident_bytes": found.resident_state_bytes,
    }
    try:
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--save") from error


def _fabric_of(found: SearchResult) -> Fabric | None:
    """Return the interconnect between the devices of a step; ``None``: not known."""
    return next((rates.fabric for rates in DEVICES if rates.name == found.step.device), None)


def _communication_of(found: SearchResult) -> Exchanged | None:
    """Return what tensor-parallel ranks send in a step, whatever the plan; ``None``: not known."""
    fabric, ranks = _fabric_of(found), found.subject.tensor_parallel_size
    if fabric is None or (ranks > 1 and not found.subject.shape.communicates):
        return None
    return exchanged(tensor_axis(found.subject.model, found.subject.shape, found.profile), ranks, fabric)


def _communication_note(fabric: Fabric | None) -> str:
    if fabric is None:
        return "Of one rank. Times are computed from shapes, without communication between ranks."
    return (
        "Of one rank. Times are computed from shapes. Comm. is a part of the step: the time of collectives "
        f"that no product hides, {fabric.described()}."
    )


_Line = tuple[str, str, str, int]
"""A line of a table of fates: op, fate, windows, bytes that autograd saves."""


def fate_table(plan: MemoryPlan, profile: Profile | None) -> Table:
    """Return a table of the fates of all ops, with equal layers in one row; bytes if there is a profile."""
    saved_column = () if profile is None else (">Saved",)
    table = table_of("Layers", "Op", "Fate", ">Prefetch/release", *saved_column)
    table.columns[3].no_wrap = False  # its header is wide
    sizes = {} if profile is None else dict(saved_by_row(profile, plan))
    for label, lines, scopes in folded(plan, partial(_lines, plan, sizes)):
        for op, fate, windows, size in lines or ((("everything", "keep", "", 0),) if label else ()):
            saved = [size_text(size * len(scopes)) if size else ""] if profile is not None else []
            table.add_row(label, op, fate, windows, *saved)
            label = ""
    for line in folded_tiles(plan.tiles):
        table.add_row(*line)
    if plan.streamed is not None:
        table.add_row("the model", "the sequence", str(plan.streamed))
    return table


def _short_table(plan: MemoryPlan, profile: Profile) -> Table:
    """Return a table with a row for each fate: bytes, and its largest ops, each with its number of layers."""
    table = table_of("Fate", ">Saved", "Ops (layers)")
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
    table = table_of("", ">Weights", ">Gradients", ">States", ">Activations", ">Decides")
    for name, part in parts.items():
        sizes = (part.weights, part.gradients, part.states, part.activations + part.workspaces)
        table.add_row(name, *map(size_text, sizes), part.decides)
    return table


def _summary_table(plan: MemoryPlan, profile: Profile) -> Table:
    """Return the table of `fate_table` with all ops of one fate in one row, without windows."""
    table = table_of("Layers", "Fate", "Ops", ">Saved")
    table.columns[0].max_width = 18
    sizes = dict(saved_by_row(profile, plan))
    for label, lines, scopes in folded(plan, lambda scope: _by_fate(_lines(plan, sizes, scope))):
        for ops, fate, _, size in lines:
            table.add_row(label, fate, ops, size_text(size * len(scopes)))
            label = ""
    return table


def step_table(steps: Mapping[str, Prediction], budget_bytes: int | None = None) -> Table:
    """Return a table of predicted steps, one in each row; peaks above a budget are marked."""
    table = table_of("", ">Peak", ">Step", ">Kept", ">Swapped", ">Recomputed")
    for name, step in steps.items():
        over = " !" if budget_bytes is not None and step.peak_bytes > budget_bytes else ""
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
        if row.scope == scope:
            yield *op_and_fate(row), windows_text(row), sizes.get((scope, row), 0)
    rest = sizes.get((scope, None), 0)
    if rest:
        named = any(row.scope == scope for row in plan.rows)
        yield "everything else" if named else "everything", "keep", "", rest


def _by_fate(lines: Iterable[_Line]) -> Iterator[_Line]:
    found: dict[str, dict[str, int]] = {}
    for op, fate, _, size in lines:
        if size:
            sizes = found.setdefault(fate, {})
            name = op.partition(" (call")[0]
            sizes[name] = sizes.get(name, 0) + size
    for fate, sizes in found.items():
        yield ", ".join(sizes), fate, "", sum(sizes.values())
