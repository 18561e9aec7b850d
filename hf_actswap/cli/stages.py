"""The answer of ``hf-actswap plan`` for a pipeline: time and memory of each stage.

A stage is the model with stand-ins for the modules of other stages, as in training. A micro-batch on it is
predicted as a step of any model is. Then the passes of all stages are simulated
(`planner.cost.pipeline_step`). With a memory mode, fates are searched for each stage
(`planner.search.find_plan`); else they are those that the user wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table

from ..config import ActSwapConfig
from ..config.schema import MemoryConfig, ParallelConfig
from ..errors import ActSwapError, PlanError, Problem
from ..pipeline import StagedModel, record_layer_outputs
from ..pipeline.runtime import bubble_share, order_of_passes, passes_in_flight, problem_of_schedule
from ..pipeline.stages import layout_of
from ..plan import MemoryPlan, resolve_plan
from ..plan.actions import format_scopes, whole_layers_again
from ..plan.dry_run import dry_call, exchanged, fake_batch, fake_weights
from ..plan.layout import CountTable, PipelineLayout, shown
from ..planner.budget import BudgetError, allocatable_bytes, budget_bytes, budget_for, limit_bytes, limits_of
from ..planner.cost.pipeline_step import Pipeline, PipelineStep, SimulatedStage
from ..planner.cost.simulate import Simulator
from ..planner.profile import Profile
from ..planner.search.find_plan import plan_stages
from .options import PlanRequest
from .output import busy, heading, listed, size_text, step_ms_text, table_of
from .plan_summary import HostNeed, PredictedStep, Verdict, assumptions, budget_text
from .planned import memory_in_force, paged_bytes
from .step import (
    StepShape,
    not_run,
    prediction_document,
    profile_of,
    ranks_of_a_machine,
    ranks_of_a_stage,
)
from .subject import DTYPES, AnalysedModel

_USUAL = 4
"""Default number of micro-batches in a step, for each stage."""
_TRIES = 4
"""Number of layouts that are tried for a better balance."""
_WORTH = 0.005
"""Fraction of the step's time or of the highest peak that a better layout must save."""


FateTable = Callable[[MemoryPlan, Profile], Table]


def _weights_and_gradients(profile: Profile) -> int:
    return profile.weight_bytes + (profile.gradient_bytes[-1] if profile.gradient_bytes else 0)


@dataclass(frozen=True)
class StagesAnswer:
    """The answer with all stages of a pipeline.

    Args:
        asker: what was asked for; predicts other layouts.
        pipeline: the stages without plans.
        step: prediction of a step of all micro-batches.
        searched: whether fates were searched.
        states_moved: whether the optimizer's states are on the host.
        budget_bytes: memory budget of each device; peaks above it are marked.
        paged_bytes: by stage, the optimizer's states that are in pages, which count as host memory.
    """

    asker: LayoutPredictor
    parallel: ParallelConfig
    layout: PipelineLayout
    pipeline: Pipeline
    step: PipelineStep
    searched: bool
    states_moved: bool
    budget_bytes: int
    paged_bytes: tuple[int, ...]

    @property
    def allocatable_bytes(self) -> int:
        """The most that tensors of a stage may take: the budget without fragments."""
        profile = self.pipeline.stages[0].profile
        return allocatable_bytes(profile, self.asker.memory, self.budget_bytes)

    @property
    def ok(self) -> bool:
        return max(self.step.peaks_bytes) <= self.allocatable_bytes

    @cached_property
    def verdict(self) -> Verdict:
        """What the first line says: of the stage that needs most memory, and of all stages' time."""
        layers, family = self.layout.num_layers, self.step.plans[0].family
        keep = MemoryPlan((), layers, family)
        everything = replace(keep, rows=whole_layers_again(range(layers)))
        plans, shape = self.step.plans, self.asker.shape
        profile = self.pipeline.stages[0].profile
        free, checkpointed = (_seen(self.pipeline.step(self._by_stage(one))) for one in (keep, everything))
        return Verdict(
            _seen(self.step),
            free,
            checkpointed,
            self.pipeline.count * shape.sequences * shape.tokens,
            " a pipeline" if shape.sharding is not None else "",
            f" on stage {self.step.peaks_bytes.index(max(self.step.peaks_bytes))}",
            self.allocatable_bytes,
            limit_bytes(self.asker.memory, profile.device_bytes, self.budget_bytes),
            means="with this plan" if any(plan.rows or plan.tiles for plan in plans) else "without a plan",
            compared=any(plan.rows for plan in plans),
        )

    def _by_stage(self, plan: MemoryPlan) -> list[MemoryPlan]:
        owned = (self.layout.layers_of(stage) for stage in range(self.layout.pp))
        return [
            replace(plan, rows=tuple(row for row in plan.rows if row.scope in layers)) for layers in owned
        ]

    @cached_property
    def host_need(self) -> HostNeed:
        """The host memory of a rank and of a machine; a machine has ranks of successive stages."""
        asker = self.asker
        of_a_stage = ranks_of_a_stage(asker.found, asker.shape)
        by_rank = [stage["host_bytes"] for stage in self.stages for _ in range(of_a_stage)]
        ranks = ranks_of_a_machine(asker.found, asker.shape)
        machines = [sum(by_rank[first : first + ranks]) for first in range(0, len(by_rank), ranks)]
        limit, is_written = asker.memory.host_memory_gib, asker.host_is_written
        return HostNeed(max(by_rank), ranks, max(machines), limit, is_written, asker.shape.device)

    @cached_property
    def better(self) -> StagesAnswer | None:
        """The answer with another offset that balances the stages better: as slow as a few answers."""
        return self.asker.better(self)

    @cached_property
    def stages(self) -> list[dict[str, Any]]:
        """The numbers of each stage, as JSON values."""
        return [self._stage(number) for number in range(len(self.pipeline.stages))]

    def _stage(self, number: int) -> dict[str, Any]:
        paper, plan, run = self.pipeline.stages[number], self.step.plans[number], self.step.runs[number]
        # One micro-batch on it, as if there were no others.
        alone = Simulator(paper.profile).predict(plan, optimizer_states_moved=self.states_moved, curve=False)
        states = paper.profile.optimizer_state_bytes
        here, away = (0, states) if self.states_moved else (states, 0)
        swapped_bytes = math.ceil(paper.in_flight * alone.host_bytes)
        count, end_ms = self.pipeline.count, max(run.ends_ms[-1] for run in self.step.runs)
        return {
            "layers": list(self.layout.layers_of(number)),
            "fixed_bytes": _weights_and_gradients(paper.profile) + here,
            "in_flight": float(paper.in_flight),
            "held_bytes": int(paper.in_flight * alone.kept_bytes),
            "loss_bytes": paper.loss_bytes,
            "buffer_bytes": paper.buffer_bytes,
            "host_bytes": swapped_bytes + away + self.paged_bytes[number],
            "swapped_on_device_bytes": run.swapped_bytes,
            "peak_bytes": self.step.peaks_bytes[number],
            "micro_batch_ms": run.busy_ms / count,
            "stall_ms": run.stall_ms / count,
            "micro_batch": prediction_document(alone),
            "plan": json.loads(plan.to_json()),
            "waits_share": 1 - run.busy_ms / end_ms,
        }

    @property
    def bubble(self) -> float:
        """The fraction of a step for which stages of equal size wait."""
        return bubble_share(self.pipeline.count, len(self.stages), self.parallel.pp_interleave_num)

    def document(self) -> dict[str, Any]:
        other = self.better
        better = other and {
            "offset": shown(other.layout.offset),
            "step_ms": other.step.step_ms,
            "peaks_bytes": list(other.step.peaks_bytes),
        }
        return {
            "model": self.asker.found.document(),
            "step": self.asker.shape.document(),
            "schedule": self.parallel.schedule,
            "micro_batches": self.pipeline.count,
            "bubble_share": self.bubble,
            "fits": self.ok,
            "tokens_per_s": self.verdict.tokens_per_s,
            "host_memory": self.host_need.document(),
            "assumed": list(assumptions(self.asker.found, self.asker.shape)),
            "step_ms": self.step.step_ms,
            "budget_bytes": self.budget_bytes,
            "allocatable_bytes": self.allocatable_bytes,
            "stages": self.stages,
            "better": better,
        }

    def shown(self) -> Iterator[RenderableType]:
        memory, device_bytes = self.asker.memory, self.pipeline.stages[0].profile.device_bytes
        ranks = ranks_of_a_machine(self.asker.found, self.asker.shape)
        mode = f"; mode {memory.mode}" if self.searched else ""
        yield self.verdict.line()
        yield self.host_need.line()
        yield f"Model:    {self.asker.found.described()}"
        yield f"Step:     {self.pipeline.count} micro-batches of {self.asker.shape.described()}"
        yield f"Pipeline: {len(self.stages)} stages, {self.parallel.schedule}"
        fragments = self.budget_bytes - self.allocatable_bytes
        yield f"Budget:   {budget_text(memory, self.budget_bytes, device_bytes, ranks, fragments)}{mode}"
        yield heading("Stages")
        yield self._stage_table()
        if not self.ok:
            yield "! above the budget."
        waits = f"equal stages would wait {self.bubble:.1%} of it (the bubble)"
        yield f"A step takes {step_ms_text(self.step.step_ms)}; {waits}."
        if self.better is not None:
            most = size_text(max(self.better.step.peaks_bytes))
            yield f"With other layers on the stages {step_ms_text(self.better.step.step_ms)}, peak {most}:"
            yield f"  offset: {shown(self.better.layout.offset)}"
        for number, (plan, paper) in enumerate(zip(self.step.plans, self.pipeline.stages, strict=True)):
            if plan.rows:
                yield heading(f"Stage {number}: a micro-batch")
                yield self.asker.table(plan, paper.profile)
        yield ""
        yield from listed([*_notes(self.parallel), *assumptions(self.asker.found, self.asker.shape)])
        yield self._use_line()

    def _use_line(self) -> str:
        if not self.ok:
            return "To make it fit: `memory: {mode: adaptive}` looks for a plan of each stage."
        ranks = len(self.stages) * ranks_of_a_stage(self.asker.found, self.asker.shape)
        found = ", where each stage finds its plan by measurement" if self.searched else ""
        return (
            f'To use it: actswap="{self.asker.config.source}" in ActSwapTrainingArguments, with '
            f"ActSwapTrainer on {ranks} processes{found}."
        )

    def _stage_table(self) -> Table:
        table = table_of(">Stage", "Layers", ">Fixed", ">In flight", ">Peak", ">Each", ">Waits")
        table.columns[0].no_wrap = False
        for number, stage in enumerate(self.stages):
            over = " !" if stage["peak_bytes"] > self.allocatable_bytes else ""
            table.add_row(
                str(number),
                format_scopes(stage["layers"]),
                size_text(stage["fixed_bytes"]),
                f"{stage['in_flight']:g} x {size_text(stage['micro_batch']['kept_bytes'])}",
                f"{size_text(stage['peak_bytes'])}{over}",
                step_ms_text(stage["micro_batch_ms"]),
                f"{stage['waits_share']:.0%}",
            )
        return table


def _seen(step: PipelineStep) -> PredictedStep:
    return PredictedStep(max(step.peaks_bytes), step.step_ms)


def _notes(parallel: ParallelConfig) -> Iterator[str]:
    yield (
        "Fixed: weights, gradients and the optimizer's states. In flight: what micro-batches keep. Each: a "
        "micro-batch, forward and backward, with waits for copies. Waits: the part of a step without a pass."
    )
    yield (
        "The peak contains buffers for the hidden states of all micro-batches and for their gradients, where "
        "the stage receives them."
    )
    yield "Times are computed from shapes and the device's rates; what ranks send each other is not in them."
    if parallel.schedule == "zero_bubble":
        yield "zero_bubble: the bubble is at most that, and so is what is in flight."


def answer_stages(
    asked: PlanRequest, config: ActSwapConfig, found: AnalysedModel, shape: StepShape, table: FateTable
) -> StagesAnswer:
    """Return the answer of ``hf-actswap plan`` for a pipeline.

    Args:
        shape: batch, tokens and device of a micro-batch.
        table: makes the table of fates.

    Raises:
        PipelineError: the model cannot be divided into these stages.
        PlanError: an option does not work with a pipeline, or the configuration does not fit the model.
        ModelError: the model does not run on fake tensors.
    """
    parallel = config.parallel_config
    count = asked.micro_batches or _USUAL * parallel.pipeline_stage
    if problems := list(_problems(asked, config, count)):
        raise PlanError(problems, config.source)
    with busy(f"the layers of {found.described()}"):
        layout = layout_of(found.shape, parallel)
        form = StagedModel(found.model, found.shape, layout, 0, parallel.sequence_ranks)
        _learn(form, shape)
    ranks = ranks_of_a_machine(found, shape)
    memory = memory_in_force(config, asked.budget_bytes, shape, ranks, asked.host_free_bytes)
    written = asked.host_free_bytes is not None or config.memory.host_memory_gib is not None
    return LayoutPredictor(config, found, shape, count, form, memory, table, written).answer(parallel)


@dataclass(frozen=True)
class LayoutPredictor:
    """Predicts different layouts of one model.

    Args:
        count: number of micro-batches of a step.
        form: the model in stages, after `record_layer_outputs`.
        memory: the ``memory`` section in force.
        host_is_written: whether its limit of host memory is the user's.
    """

    config: ActSwapConfig
    found: AnalysedModel
    shape: StepShape
    count: int
    form: StagedModel
    memory: MemoryConfig
    table: FateTable
    host_is_written: bool

    def answer(self, parallel: ParallelConfig, budget: int | None = None) -> StagesAnswer:
        """Predict the stages of a layout; search their fates if the configuration has a memory mode.

        Args:
            budget: memory budget of each device, in bytes; ``None``: that of the ``memory`` section.
        """
        layout = layout_of(self.found.shape, parallel)
        plan = resolve_plan(replace(self.config, parallel_config=parallel), self.found.shape)
        stages, plans, paged = zip(
            *(self._stage(parallel, layout, number, plan) for number in range(layout.pp)), strict=True
        )
        whole = parallel.schedule != "zero_bubble"
        pipeline = Pipeline(stages, layout.vpp, crosses=whole, frees=whole)
        step = pipeline.step(plans)
        if budget is None:
            budget = budget_bytes(self.memory, stages[0].profile.device_bytes, max(step.peaks_bytes))
        searched = self.config.memory.mode != "off"
        moved = searched and self.memory.preference == "memory_saving"
        if searched:
            allocatable = allocatable_bytes(stages[0].profile, self.memory, budget)
            limits = limits_of(self.memory, allocatable, plan.min_tensor_bytes)
            if limits.host_bytes is not None:
                limits = replace(limits, host_bytes=max(limits.host_bytes - max(paged), 0))
            try:
                with busy("search"):
                    step = plan_stages(pipeline, plans, limits)
            except BudgetError as error:
                left = f"{size_text(budget - allocatable)} of the budget are left for fragments."
                error = error.with_hint(left if budget > allocatable else "")
                error.budget_bytes = budget
                error.least_bytes = budget_for(stages[0].profile, self.memory, error.least_bytes)
                raise error from None
        return StagesAnswer(self, parallel, layout, pipeline, step, searched, moved, budget, paged)

    def _stage(
        self, parallel: ParallelConfig, layout: PipelineLayout, number: int, plan: MemoryPlan
    ) -> tuple[SimulatedStage, MemoryPlan, int]:
        """Return one stage without its plan, its part of a plan of the whole model, and its paged bytes."""
        model, shape, schedule = self.found.model, self.shape, parallel.schedule
        assert schedule is not None
        staged = StagedModel(model, self.found.shape, layout, number, parallel.sequence_ranks)
        staged.relay, staged.layer_outputs = self.form.relay, self.form.layer_outputs
        own = staged.plan_of_stage(plan)
        with busy(f"stage {number} of {self.found.described()}"), staged.with_stand_ins():
            alone = replace(self.found, profiles={})  # those of the model are not those of a stage
            profile = profile_of(
                alone, shape, own.tiles, staged.is_last, gradients_exist=True, workspaces=False
            )
            paged = paged_bytes(self.found, shape)
        order = order_of_passes(schedule, self.count, layout.pp, number, layout.vpp)
        passes = passes_in_flight(schedule, self.count, layout.pp, layout.vpp, number)
        fixed = _weights_and_gradients(profile) + profile.optimizer_state_bytes
        loss = max(profile.op_events[-1].forward_base_bytes - fixed, 0) if staged.is_last else 0
        buffers = _buffer_bytes(staged, shape) * self.count
        return SimulatedStage(profile, order, Fraction(passes, layout.vpp), loss, buffers), own, paged

    def better(self, answer: StagesAnswer) -> StagesAnswer | None:
        """Return an answer whose layers are balanced better, if one is found by moving layers one by one."""
        best, tried = answer, {answer.layout.counts}
        while len(tried) <= _TRIES and (counts := next(_moved_counts(best, tried), None)) is not None:
            tried.add(counts)
            try:
                parallel = replace(answer.parallel, offset=PipelineLayout(counts).offset)
                other = self.answer(parallel, answer.budget_bytes)
            except ActSwapError:  # the configuration does not fit this layout, or a stage has no layer
                continue
            if _is_better(other, best):
                best = other
        return None if best is answer else best


def _moved_counts(answer: StagesAnswer, tried: Collection[CountTable]) -> Iterator[CountTable]:
    """Yield layouts with one layer moved: from the slowest stage to the fastest, or by peak memory."""
    counts = answer.layout.counts
    times = [run.busy_ms for run in answer.step.runs]
    for values in (times, [float(size) for size in answer.step.peaks_bytes]):
        source, target = values.index(max(values)), values.index(min(values))
        table = [list(row) for row in counts]
        max(table, key=lambda row: row[source])[source] -= 1
        min(table, key=lambda row: row[target])[target] += 1
        found = tuple(map(tuple, table))
        if source != target and found not in tried:
            yield found


def _is_better(one: StagesAnswer, other: StagesAnswer) -> bool:
    """Whether ``one`` has less time or memory above the budget than ``other``, and not more of either."""
    ms, other_ms = one.step.step_ms, other.step.step_ms
    peak, other_peak = (
        max(*answer.step.peaks_bytes, answer.allocatable_bytes * answer.searched) for answer in (one, other)
    )
    less = ms < other_ms * (1 - _WORTH) or peak < other_peak * (1 - _WORTH)
    return less and ms <= other_ms and peak <= other_peak


def _learn(staged: StagedModel, shape: StepShape) -> None:
    """Record what layers return in a run on fake tensors (`record_layer_outputs`), without `check_cut`."""
    cpu, batch_shape = torch.device("cpu"), torch.Size((shape.sequences, shape.tokens))
    batch = {"input_ids": torch.empty(batch_shape, dtype=torch.long, device="meta")}
    mixed = torch.autocast("cpu", DTYPES[shape.autocast]) if shape.autocast else nullcontext()
    try:
        with mixed, dry_call(staged.model, batch) as named, torch.no_grad():
            state = fake_weights(staged.model, cpu)
            call = fake_batch(named, cpu)

            def run() -> Any:
                with exchanged(staged.model, state):
                    return staged.model(**call)

            record_layer_outputs(staged, run, batch_shape)
    except ActSwapError:
        raise
    except Exception as error:  # the model's own code runs: it may raise anything
        raise not_run("a model that runs on fake tensors", error) from error


def _buffer_bytes(staged: StagedModel, shape: StepShape) -> int:
    """Return the bytes received for a micro-batch: inputs of chunks, gradients of their outputs."""
    relay, tokens = staged.relay, -(-shape.tokens // staged.sequence_ranks)
    hidden_bytes = shape.sequences * tokens * relay.hidden_size * relay.dtype.itemsize
    return sum(hidden_bytes * ((not chunk.is_first) + (not chunk.is_last)) for chunk in staged.own_chunks)


def _problems(asked: PlanRequest, config: ActSwapConfig, count: int) -> Iterator[Problem]:
    parallel = config.parallel_config
    for name, given in (("--compare", asked.compared), ("--profile", asked.profile), ("--save", asked.save)):
        if given:
            hint = "Leave parallel_config.schedule out to plan for the whole model on one device."
            yield Problem(name, "nothing beside a pipeline", "it is given", hint)
    assert parallel.schedule is not None
    shape = parallel.pipeline_stage, parallel.pp_interleave_num, parallel.tensor_parallel_size
    if why := problem_of_schedule(parallel.schedule, count, *shape):
        hint = "Change --micro-batches or the schedule."
        yield Problem("parallel_config.schedule", "one that fits the layout and the micro-batches", why, hint)
