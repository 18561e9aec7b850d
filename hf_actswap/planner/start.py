"""Begins a planned training: finds the device, looks for what does not go together, reads the plan file."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from ..config.schema import MemoryConfig
from ..engine.agreement import from_one_rank, rank, world_size
from ..engine.around import Hook
from ..engine.evictable import IdleTensors
from ..engine.host_budget import HostMemory
from ..engine.host_pool import HostPool
from ..engine.stats import GIB
from ..engine.transfer import Transfer
from ..engine.transfer_streams import transfer_of
from ..errors import ActSwapError, PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import MemoryPlan
from ..plan.outline import Outline, unwrapped
from .least_budget import LeastBudget
from .meter import AllocatorMeter, CountingMeter, Meter, device_name, resting_tensors
from .phases import Planner
from .plan_file import FilePlan, MadeFor, read_plan
from .refusals import problems_of_planner
from .rescue.oom_guard import OomGuard
from .run import Put, Run
from .states.optimizer_kinds import inner_optimizer
from .states.optimizer_states import OptimizerStates

logger = logging.getLogger(__name__)


def start_planner(
    model: nn.Module,
    outline: Outline,
    fixed: MemoryPlan,
    memory: MemoryConfig,
    put: Put,
    host: HostMemory,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    counts_steps: bool = True,
    transfer: Transfer | None = None,
    meter: Meter | None = None,
) -> Planner:
    """Begin to plan for a model in training; every rank must call it.

    Args:
        model: on its device, as it is called.
        outline: of the model inside its wrappers.
        fixed: the plan of what is written by hand; its rows are constraints.
        memory: the ``memory`` section; its mode is not ``off``.
        put: puts a plan on the model.
        host: the host memory of all plans, which the optimizer's states share (``memory_saving``).
        optimizer: of the model.
        counts_steps: whether its step ends a training step; else call `Planner.step_ended`.
        transfer: how bytes move; by default streams on an accelerator, blocking copies on the CPU.
        meter: of device memory; by default the allocator's own, and on the CPU a count of storages, which
            refuses what exceeds ``budget_gib`` as an accelerator would.

    Raises:
        PlanError: something is on or in use that does not go with the planner; the plan file is malformed;
            ``memory_saving`` without an optimizer, or with one that cannot be served.
    """
    if memory.mode == "off":
        raise ValueError("memory.mode is off: there is nothing to plan")
    problems = problems_of_planner(model, outline, memory.mode)
    if problems:
        raise PlanError(problems)
    device = next((p.device for p in unwrapped(model).parameters()), torch.device("cpu"))
    transfer = transfer or transfer_of(device)
    meter = meter or _meter_of(device, model, optimizer, memory)
    pool = host.pool(device, transfer.overlaps, None)
    idle = IdleTensors(device, pool if transfer.overlaps else None, fixed.min_tensor_bytes)
    least = LeastBudget(model, outline, fixed, memory, optimizer, device_name(device))
    guard = OomGuard(meter, idle, least_budget=least.in_words)
    run = Run(
        model, outline, fixed, memory, meter, transfer, guard, idle, put, device_name(device), optimizer
    )

    if memory.preference == "memory_saving":
        run.states = _states_on_host(model, outline, optimizer, transfer, pool, fixed.min_tensor_bytes)

    def made_for(shape: tuple[int, ...]) -> MadeFor:
        return _made_for(model, outline, fixed, memory, device, shape)

    known, ours = _known_plan(memory, outline, made_for(()))
    with uninterrupted():
        planner = Planner(run, made_for if ours else None, known)
        batches = unwrapped(model).register_forward_pre_hook(Hook(least.forward_starts), with_kwargs=True)
        planner.on_remove(batches.remove)
        if optimizer is not None and counts_steps:
            steps = inner_optimizer(optimizer).register_step_post_hook(lambda *_: planner.step_ended())
            planner.on_remove(steps.remove)
    return planner


_NO_OPTIMIZER = Problem(
    "memory.preference",
    "the optimizer, whose states memory_saving moves",
    "none",
    "Pass it: hf_actswap.apply(model, config, optimizer=optimizer).",
)


def _states_on_host(
    model: nn.Module,
    outline: Outline,
    optimizer: torch.optim.Optimizer | None,
    transfer: Transfer,
    pool: HostPool,
    min_tensor_bytes: int,
) -> OptimizerStates:
    if optimizer is None:
        raise PlanError([_NO_OPTIMIZER])
    root = unwrapped(model)
    layers = [root.get_submodule(layer.module_path) for layer in outline.layers]
    states = OptimizerStates(
        optimizer, transfer, pool, model=model, layers=layers, min_tensor_bytes=min_tensor_bytes
    )
    states.attach()
    return states


def _meter_of(
    device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer | None, memory: MemoryConfig
) -> Meter:
    if device.type != "cpu":
        return AllocatorMeter(device)
    limit = None if memory.budget_gib is None else round(memory.budget_gib * GIB)
    meter = CountingMeter(limit)
    meter.own(resting_tensors(model, optimizer))
    return meter


def _made_for(
    model: nn.Module,
    outline: Outline,
    fixed: MemoryPlan,
    memory: MemoryConfig,
    device: torch.device,
    shape: tuple[int, ...],
) -> MadeFor:
    parameters = list(unwrapped(model).parameters())
    count = sum(parameter.numel() for parameter in parameters)
    written = [
        [row.scope, row.op_path, row.fate, asdict(row.windows) if row.windows else None] for row in fixed.rows
    ]
    wish = {**asdict(replace(memory, plan_file=None)), "written": written}
    return MadeFor(
        model=f"{outline.family}, {len(outline.layers)} layers, {count:,} parameters",
        batch_shape=shape,
        dtype=", ".join(sorted({str(parameter.dtype) for parameter in parameters})),
        device=device_name(device),
        world_size=world_size(),
        wish=json.dumps(wish, sort_keys=True, default=str),
    )


def _known_plan(memory: MemoryConfig, outline: Outline, here: MadeFor) -> tuple[FilePlan | None, bool]:
    """Return the plan of the file, if one is there that fits the run, and whether the planner may write it.

    The same on every rank.
    """
    answer: tuple[FilePlan | None, bool] = (None, True)
    problem: ActSwapError | None = None
    if memory.plan_file is None:
        return answer
    if rank() == 0 and Path(memory.plan_file).exists():
        try:
            answer = _fitting(read_plan(memory.plan_file), outline, here, memory)
        except ActSwapError as error:
            problem = error
    answer, problem = from_one_rank((answer, problem))
    if problem is not None:
        raise problem
    return answer


def _fitting(
    found: FilePlan, outline: Outline, here: MadeFor, memory: MemoryConfig
) -> tuple[FilePlan | None, bool]:
    own, model = found.plan, (outline.family, len(outline.layers))
    if found.made_for is not None:
        differences = found.made_for.differences(here)
    elif (own.family or outline.family, own.num_layers) == model:
        differences = {}
    else:
        differences = {"model": f"{own.num_layers} {own.family} layers and not {model[1]} {model[0]} layers"}
    ours = found.made_for is not None and differences.keys() <= {"wish"}
    if not differences:
        return found, ours
    logger.log(
        logging.INFO if ours else logging.WARNING,
        "%s: %s was not made for this run (%s): planning anew, and %s",
        memory.mode,
        memory.plan_file,
        "; ".join(differences.values()),
        "it is overwritten"
        if ours
        else "it stays as it is. Another memory.plan_file would keep the new plan.",
    )
    return None, ours
