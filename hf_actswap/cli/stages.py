"""What ``hf-actswap plan`` answers for a pipeline: its stages side by side.

A stage is the model with stand-ins for the parts of others, as in training, and the step of one micro-batch
on it is predicted as that of any model. The schedule says how many micro-batches wait for their backwards
beside it. Nothing is searched: the fates are those that are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from rich import box
from rich.console import RenderableType
from rich.table import Table
from torch.func import functional_call

from ..config import ActSwapConfig
from ..config.schema import ParallelConfig
from ..errors import ActSwapError, PlanError, Problem
from ..pipeline import StagedModel, learn_form
from ..pipeline.runtime import bubble_share, passes_in_flight, problem_of_schedule
from ..pipeline.stages import layout_of
from ..plan import MemoryPlan, resolve_plan
from ..plan.actions import folded
from ..plan.dry_run import dry_call, fake_batch, fake_weights
from ..planner.budget import budget_bytes
from ..planner.cost.simulate import Simulator
from ..planner.profile import Prediction, Profile
from .output import busy, heading, listed, size_text, step_ms_text
from .plan_request import PlanRequest
from .planned import memory_in_force
from .step import StepShape, not_run, prediction_document, profile_of
from .subject import DTYPES, Subject

_USUAL = 4
"""Micro-batches of a step for each stage, where nothing is said."""


@dataclass(frozen=True)
class Stage:
    """One stage on paper.

    Args:
        layers: that it holds.
        plan: its rows.
        profile: of one micro-batch on it, with all gradients there.
        step: predicted from it, as if it were alone.
        in_flight: micro-batches that it has forwarded at most, and not their backwards.
        is_last: whether it computes losses.
        buffer_bytes: in which hidden states and their gradients are received, one for each micro-batch.
    """

    layers: tuple[int, ...]
    plan: MemoryPlan
    profile: Profile
    step: Prediction
    in_flight: Fraction
    is_last: bool
    buffer_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Weights, gradients and the optimizer's states."""
        gradients = self.profile.gradient_bytes[-1] if self.profile.gradient_bytes else 0
        return self.profile.weight_bytes + gradients + self.profile.optimizer_state_bytes

    @property
    def held_bytes(self) -> int:
        """Activations of all micro-batches in flight."""
        return int(self.in_flight * self.step.kept_bytes)

    @property
    def loss_bytes(self) -> int:
        """What the loss of a micro-batch holds at most: all that it takes while it runs."""
        return max(self.profile.op_events[-1].forward_base_bytes - self.fixed_bytes, 0) if self.is_last else 0

    @property
    def peak_bytes(self) -> int:
        """The most device memory: of the micro-batch that runs, and what is held of the others."""
        others = max(self.in_flight - 1, Fraction(0)) * (self.step.kept_bytes + self.loss_bytes)
        return self.step.peak_bytes + int(others) + self.buffer_bytes

    @property
    def each_ms(self) -> float:
        """Forward and backward of a micro-batch."""
        return self.step.step_ms - self.profile.outside_ms

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "layers": list(self.layers),
            "fixed_bytes": self.fixed_bytes,
            "in_flight": float(self.in_flight),
            "held_bytes": self.held_bytes,
            "loss_bytes": self.loss_bytes,
            "buffer_bytes": self.buffer_bytes,
            "peak_bytes": self.peak_bytes,
            "micro_batch_ms": self.each_ms,
            "micro_batch": prediction_document(self.step),
            "plan": json.loads(self.plan.to_json()),
        }


@dataclass(frozen=True)
class StagesAnswer:
    """Stages side by side. See `output.Answer`.

    Args:
        subject: the model.
        shape: of a micro-batch.
        parallel: the section.
        count: micro-batches of a step.
        stages: in their order.
        budget_bytes: peaks above it are marked.
        table: shows the fates of a stage.
    """

    subject: Subject
    shape: StepShape
    parallel: ParallelConfig
    count: int
    stages: tuple[Stage, ...]
    budget_bytes: int
    table: Any
    ok: bool = True

    @property
    def step_ms(self) -> float:
        """All micro-batches on the slowest stage, and one on the others while it waits."""
        times = [stage.each_ms for stage in self.stages]
        waiting = (sum(times) - max(times)) / self.parallel.pp_interleave_num
        return self.count * max(times) + waiting + max(stage.profile.outside_ms for stage in self.stages)

    @property
    def bubble(self) -> float:
        """The part of a step that equal stages wait."""
        return bubble_share(self.count, len(self.stages), self.parallel.pp_interleave_num)

    def document(self) -> Mapping[str, Any]:
        """Return it as JSON values."""
        return {
            "model": self.subject.document(),
            "step": self.shape.document(),
            "schedule": self.parallel.schedule,
            "micro_batches": self.count,
            "bubble_share": self.bubble,
            "step_ms": self.step_ms,
            "budget_bytes": self.budget_bytes,
            "stages": [stage.document() for stage in self.stages],
        }

    def shown(self) -> Iterable[RenderableType]:
        """Yield it for people."""
        yield f"Model:    {self.subject.described()}"
        yield f"Step:     {self.count} micro-batches of {self.shape.described()}"
        yield f"Pipeline: {len(self.stages)} stages, {self.parallel.schedule}"
        yield f"Budget:   {size_text(self.budget_bytes)} a rank"
        yield heading("Stages")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("Stage", justify="right")
        table.add_column("Layers", overflow="fold")
        for name in ("Fixed", "In flight", "Peak", "Each"):
            table.add_column(name, justify="right", no_wrap=True)
        for number, stage in enumerate(self.stages):
            over = " !" if stage.peak_bytes > self.budget_bytes else ""
            table.add_row(
                str(number),
                folded(stage.layers),
                size_text(stage.fixed_bytes),
                f"{float(stage.in_flight):g} x {size_text(stage.step.kept_bytes)}",
                f"{size_text(stage.peak_bytes)}{over}",
                step_ms_text(stage.each_ms),
            )
        yield table
        if any(stage.peak_bytes > self.budget_bytes for stage in self.stages):
            yield "! above the budget."
        waits = f"equal stages wait {self.bubble:.1%} of it (the bubble)"
        yield f"A step takes {step_ms_text(self.step_ms)}; {waits}."
        for number, stage in enumerate(self.stages):
            if stage.plan.rows:
                yield heading(f"Stage {number}: a micro-batch")
                yield self.table(stage.plan, stage.profile)
        yield ""
        yield from listed(_notes(self.parallel))


def _notes(parallel: ParallelConfig) -> Iterator[str]:
    yield "Fixed: weights, gradients and the optimizer's states. Each: a micro-batch, forward and backward."
    yield (
        "The peak contains buffers for the hidden states of all micro-batches and for their gradients, where "
        "the stage receives them."
    )
    yield "Times are computed from shapes and the device's rates; what ranks send each other is not in them."
    if parallel.schedule == "zero_bubble":
        yield "zero_bubble: the bubble is at most that, and so is what is in flight."


def answer_stages(
    asked: PlanRequest, config: ActSwapConfig, found: Subject, shape: StepShape, table: Any
) -> StagesAnswer:
    """Return what `plan` says of a pipeline.

    Args:
        asked: the arguments.
        config: whose ``parallel_config`` runs a pipeline.
        found: the model.
        shape: of a micro-batch.
        table: shows the fates of a plan with a profile.

    Raises:
        PipelineError: the model cannot be divided so.
        PlanError: something asked for is not built for a pipeline; the configuration does not fit the model.
        ModelError: the model does not run on fake tensors.
    """
    parallel = config.parallel_config
    assert parallel.schedule is not None
    count = asked.micro_batches or _USUAL * parallel.pipeline_stage
    if problems := list(_problems(asked, config, count)):
        raise PlanError(problems, config.source)
    layout = layout_of(found.shape, parallel)
    plan = resolve_plan(config, found.shape)
    stages: list[Stage] = []
    first = StagedModel(found.model, found.shape, layout, 0, parallel.sequence_ranks)
    with busy(f"the layers of {found.described()}"):
        _learn(first, shape)
    for number in range(layout.pp):
        staged = first.as_stage(number)
        with busy(f"stage {number} of {found.described()}"):
            own = staged.plan_of_stage(plan)
            with staged.held():
                profile = profile_of(found, shape, own.tiles, staged.is_last, gradients_exist=True)
            step = Simulator(profile).predict(own, curve=False)
        passes = passes_in_flight(parallel.schedule, count, layout.pp, layout.vpp, number)
        buffers = _buffer_bytes(staged, shape) * count
        layers, in_flight = layout.layers_of(number), Fraction(passes, layout.vpp)
        stages.append(Stage(layers, own, profile, step, in_flight, staged.is_last, buffers))
    memory = memory_in_force(config, asked.budget_bytes)
    budget = budget_bytes(memory, stages[0].profile.device_bytes, max(stage.peak_bytes for stage in stages))
    return StagesAnswer(found, shape, parallel, count, tuple(stages), budget, table)


def _learn(staged: StagedModel, shape: StepShape) -> None:
    """Note what layers return, on fake tensors: nothing is proven."""
    cpu, batch_shape = torch.device("cpu"), torch.Size((shape.sequences, shape.tokens))
    batch = {"input_ids": torch.empty(batch_shape, dtype=torch.long, device="meta")}
    mixed = torch.autocast("cpu", DTYPES[shape.autocast]) if shape.autocast else nullcontext()
    try:
        with mixed, dry_call(staged.model, batch) as named, torch.no_grad():
            state = fake_weights(staged.model, cpu)
            call = fake_batch(named, cpu)
            learn_form(staged, lambda: functional_call(staged.model, state, (), call), batch_shape)
    except ActSwapError:
        raise
    except Exception as error:  # the model's own code runs: it may raise anything
        raise not_run("a model that runs on fake tensors", error) from error


def _buffer_bytes(staged: StagedModel, shape: StepShape) -> int:
    """Of one micro-batch: hidden states that enter chunks, and gradients of those that leave them."""
    relay, tokens = staged.relay, -(-shape.tokens // staged.sequence_ranks)
    hidden_bytes = shape.sequences * tokens * relay.hidden_size * relay.dtype.itemsize
    return sum(hidden_bytes * ((not chunk.is_first) + (not chunk.is_last)) for chunk in staged.own_chunks)


def _problems(asked: PlanRequest, config: ActSwapConfig, count: int) -> Iterator[Problem]:
    parallel = config.parallel_config
    for name, given in (("--compare", asked.compared), ("--profile", asked.profile), ("--save", asked.save)):
        if given:
            hint = "Leave parallel_config.schedule out to plan for the whole model on one device."
            yield Problem(name, "nothing beside a pipeline", "it is given", hint)
    if config.memory.mode != "off":
        hint = "Planning by stage is not built."
        yield Problem("memory.mode", "off beside a pipeline", config.memory.mode, hint)
    assert parallel.schedule is not None
    shape = parallel.pipeline_stage, parallel.pp_interleave_num, parallel.tensor_parallel_size
    if why := problem_of_schedule(parallel.schedule, count, *shape):
        hint = "Change --micro-batches or the schedule."
        yield Problem("parallel_config.schedule", "one that fits the layout and the micro-batches", why, hint)
