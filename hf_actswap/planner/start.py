"""Starts the planner for a model: checks what it cannot be combined with, and reads the plan file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import tee
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ..engine.agreement import from_one_rank, rank, world_size
from ..engine.evictable import EvictableTensors
from ..engine.hook_wrappers import Hook
from ..engine.host_budget import HostMemory
from ..engine.host_pool import HostPool
from ..engine.stats import GIB
from ..engine.transfer import Transfer, transfer_of
from ..errors import ActSwapError, PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import NOT_COMPARED, MemoryPlan, PlanRow, Scope, Tile, Windows, format_scopes
from ..plan.model_structure import OUTPUT, ModelStructure, unwrapped
from ..plan.wrapper_rules import problems_of_checkpointing
from ..plan.wrappers import checkpointing_argument, is_checkpointed
from .least_budget import LeastBudget
from .meter import AllocatorMeter, CountingMeter, Meter, baseline_tensors, device_name
from .oom_guard import OomGuard
from .phases import Planner
from .plan_file import FilePlan, MadeFor, read_plan
from .run import ApplyPlan, ApplyTiles, PlannedTraining, Run
from .states.optimizer_states import OptimizerStates
from .states.streamed_step import inner_optimizer, is_streamed, reject

logger = logging.getLogger(__name__)

COUNTING_ALLOCATORS = ("native", "cudaMallocAsync", "hipMallocAsync")
"""PyTorch's own allocators: they report how much is in use and raise ``torch.OutOfMemoryError``.

A pluggable allocator does neither (PyTorch's ``CUDAPluggableAllocator.cpp``: ``getDeviceStats`` raises, and
errors of the library behind it are passed on unchanged; pytorch issues 133280 and 133281).
"""

_NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_WRAPPED = "_checkpoint_wrapped_module"  # torch.distributed.algorithms._checkpoint.checkpoint_wrapper


def start_planner(
    training: PlannedTraining,
    put: ApplyPlan,
    put_tiles: ApplyTiles,
    host: HostMemory,
    *,
    transfer: Transfer | None = None,
    meter: Meter | None = None,
    ladder: Iterable[MemoryPlan] | None = None,
) -> Planner:
    """Put a planner on a model in training and return it; every rank must call it.

    Args:
        training: the model, its optimizer and what the user wrote for them.
        put, put_tiles: functions that put a plan, and tiles, on the model.
        host: the host memory of all plans, which the optimizer's states share (``memory_saving``).
        transfer: how bytes are copied; by default streams on an accelerator, blocking copies on the CPU.
        meter: measures device memory; by default it asks the allocator. On the CPU it counts storages, and
            rejects ops that exceed ``budget_gib`` as an accelerator would.
        ladder: plans with more and more in tiles, tried where no plan fits; ``None``: no tiles are added.

    Raises:
        PlanError: the model, its checkpointing or the allocator cannot be combined with the planner; the
            plan file is malformed; ``memory_saving`` has no optimizer, or one whose states cannot be moved.
    """
    structure, fixed, memory = training.structure, training.fixed, training.memory
    if memory.mode == "off":
        raise ValueError("memory.mode is off: there is nothing to plan")
    problems = problems_of_planner(training.model, structure, memory.mode)
    if problems:
        raise PlanError(problems)
    device = next((p.device for p in unwrapped(training.model).parameters()), torch.device("cpu"))
    transfer = transfer or transfer_of(device)
    meter = meter or _meter_of(device, training)
    pool = host.pool(device, transfer.overlaps, None)
    idle = EvictableTensors(device, pool if transfer.overlaps else None, fixed.min_tensor_bytes)
    name = device_name(device)
    tiles, known_tiles = (None, ()) if ladder is None else tee(ladder)
    least = LeastBudget(
        training, lambda: run.fixed, name, put_tiles, lambda: run.states is not None, known_tiles
    )
    guard = OomGuard(meter, idle, least.in_words)
    run = Run(
        training,
        fixed,
        meter,
        transfer,
        guard,
        idle,
        put,
        put_tiles,
        name,
        ladder=tiles,
        least_bytes=least.least_bytes,
        least_in_tiles=least.least_in_tiles,
    )
    if memory.preference == "memory_saving":
        run.states = _states_on_host(training, transfer, pool)
    elif _may_move_states(training, transfer):
        run.make_states = lambda: _states_on_host(training, transfer, pool)

    def made_for(shape: tuple[int, ...]) -> MadeFor:
        return _made_for(training, device, shape)

    known, ours = _known_plan(training, made_for(()))
    resident_bytes = None if known is None else known.numbers.get("states_resident_bytes")
    if resident_bytes is not None and run.make_states is not None:
        run.states_to_host(resident_bytes)
    with uninterrupted():
        run.tile(
            fixed if known is None else replace(fixed, tiles=_merged_tiles(known.plan.tiles, fixed.tiles))
        )
        try:
            planner = Planner(run, made_for, known, ours)
        except BaseException:
            run.close()
            raise
        _watch(planner, training, least)
    return planner


def _watch(planner: Planner, training: PlannedTraining, least: LeastBudget) -> None:
    """Hook the model, to see each batch, and the optimizer, to end steps; `Planner.remove` unhooks both."""
    model, optimizer = unwrapped(training.model), training.optimizer
    batches = model.register_forward_pre_hook(Hook(least.forward_starts), with_kwargs=True)
    planner.on_remove(batches.remove)
    if optimizer is not None and training.counts_steps:
        steps = inner_optimizer(optimizer).register_step_post_hook(lambda *_: planner.step_ended())
        planner.on_remove(steps.remove)


def _merged_tiles(found: Iterable[Tile], written: Iterable[Tile]) -> tuple[Tile, ...]:
    """Return the tiles of a plan file and those that the user wrote; for the same op the user's win."""
    return tuple({(tile.scope, tile.op_path): tile for tile in (*found, *written)}.values())


_NO_OPTIMIZER = Problem(
    "memory.preference",
    "the optimizer, whose states memory_saving moves",
    "none",
    "Pass it: hf_actswap.apply(model, config, optimizer=optimizer).",
)


def _may_move_states(training: PlannedTraining, transfer: Transfer) -> bool:
    """Return whether the planner may choose to keep the optimizer's states on the host."""
    memory, optimizer = training.memory, training.optimizer
    asked = memory.preference == "auto" and memory.mode == "adaptive"
    if not asked or optimizer is None or not transfer.overlaps or training.part:
        return False
    try:
        reject(inner_optimizer(optimizer), transfer)
    except PlanError:
        return False
    return is_streamed(inner_optimizer(optimizer))


def _states_on_host(training: PlannedTraining, transfer: Transfer, pool: HostPool) -> OptimizerStates:
    if training.optimizer is None:
        raise PlanError([_NO_OPTIMIZER])
    root = unwrapped(training.model)
    states = OptimizerStates(
        training.optimizer,
        transfer,
        pool,
        model=training.model,
        layers=[root.get_submodule(layer.module_path) for layer in training.structure.layers],
        min_tensor_bytes=training.fixed.min_tensor_bytes,
    )
    states.attach()
    return states


def _meter_of(device: torch.device, training: PlannedTraining) -> Meter:
    if device.type != "cpu":
        return AllocatorMeter(device)
    budget_gib = training.memory.budget_gib
    meter = CountingMeter(None if budget_gib is None else round(budget_gib * GIB))
    meter.own(baseline_tensors(training.model, training.optimizer))
    return meter


def _made_for(training: PlannedTraining, device: torch.device, shape: tuple[int, ...]) -> MadeFor:
    structure, fixed = training.structure, training.fixed
    parameters = list(unwrapped(training.model).parameters())
    count = sum(parameter.numel() for parameter in parameters)
    written = [
        [row.scope, row.op_path, row.fate, asdict(row.windows) if row.windows else None] for row in fixed.rows
    ]
    requested = {**asdict(replace(training.memory, plan_file=None)), "written": written}
    if fixed.tiles:
        requested["tiles"] = [asdict(tile) for tile in fixed.tiles]
    return MadeFor(
        model=f"{structure.family}, {len(structure.layers)} layers, {count:,} parameters{training.part}",
        batch_shape=shape,
        dtype=", ".join(sorted({str(parameter.dtype) for parameter in parameters})),
        device=device_name(device),
        world_size=world_size(),
        requested=json.dumps(requested, sort_keys=True, default=str),
    )


def _known_plan(training: PlannedTraining, here: MadeFor) -> tuple[FilePlan | None, bool]:
    """Return the plan of a file that fits this run, or ``None``, and whether ``plan_file`` may be written.

    The file that the user names comes first, then that of the checkpoint from which the training goes on.
    Every rank gets the same answer.
    """
    memory = training.memory
    answer: tuple[FilePlan | None, bool] = (None, True)
    problem: ActSwapError | None = None
    if memory.plan_file is None and training.earlier_plan is None:
        return answer
    if rank() == 0:
        try:
            if memory.plan_file is not None and Path(memory.plan_file).exists():
                answer = _fitting(read_plan(memory.plan_file), training, here)
        except ActSwapError as error:
            problem = error
        if answer[0] is None and problem is None and training.earlier_plan is not None:
            answer = (_of_checkpoint(training.earlier_plan, here), answer[1])
    answer, problem = from_one_rank((answer, problem))
    if problem is not None:
        raise problem
    return answer


def _of_checkpoint(path: str, here: MadeFor) -> FilePlan | None:
    if not Path(path).exists():
        return None
    try:
        found = read_plan(path)
    except ActSwapError as error:
        logger.warning("The plan of the checkpoint is not used, and one is searched: %s", error)
        return None
    differences = found.made_for.differences(here) if found.made_for is not None else {}
    if differences:
        said = "The plan of the checkpoint was made for another run (%s): one is searched."
        logger.info(said, "; ".join(differences.values()))
    return None if differences else found


def _fitting(found: FilePlan, training: PlannedTraining, here: MadeFor) -> tuple[FilePlan | None, bool]:
    structure, memory = training.structure, training.memory
    own, model = found.plan, (structure.family, len(structure.layers))
    if found.made_for is not None:
        differences = found.made_for.differences(here)
    elif (own.family or structure.family, own.num_layers) != model:
        differences = {"model": f"{own.num_layers} {own.family} layers and not {model[1]} {model[0]} layers"}
    elif own.fingerprint is None:
        logger.info("%s: %s", memory.mode, NOT_COMPARED)
        differences = {}
    else:
        others = own.fingerprint.problems_of(unwrapped(training.model))
        differences = {
            other.where: f"{other.where}: {other.found} and not {other.expected}" for other in others
        }
    ours = found.made_for is not None and differences.keys() <= {"requested"}
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


def problems_of_planner(
    model: nn.Module,
    structure: ModelStructure,
    mode: Literal["smart_swap", "adaptive"],
    *,
    allocator: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Return the reasons why the planner cannot run with ``model``; an empty list if there are none.

    Args:
        model: the model on its device, bare or in its wrappers.
        structure: its structure.
        mode: ``memory.mode``.
        allocator: name of the device's allocator; ``None``: what `allocator_name` returns.
        environment: the process's environment variables; ``None``: ``os.environ``.
    """
    root = unwrapped(model)
    layers = structure.layer_modules(root)
    device = next((weight.device for weight in root.parameters()), torch.device("cpu"))
    name = allocator_name(device) if allocator is None else allocator
    problems = [_one_process(model), _allocator(name), _compiled_whole(structure)]
    if device.type == "cuda":
        problems.append(_uncached(os.environ if environment is None else environment))
    if mode == "adaptive":
        problems.append(_checkpointed(layers))
    else:
        problems += problems_of_checkpointing(layers, _A_SWAP, structure.compiled)
    return [problem for problem in problems if problem is not None]


def allocator_name(device: torch.device) -> str:
    """Return the name of a device's allocator: one of `COUNTING_ALLOCATORS`, ``pluggable`` or another.

    Only CUDA and ROCm name their allocators. Elsewhere ``native`` means that the allocator reports how much
    is in use, ``pluggable`` that it does not. The CPU's counts as ``native``: `CountingMeter` needs nothing.
    """
    if device.type == "cuda":
        return torch.cuda.get_allocator_backend()
    if device.type == "cpu":
        return "native"
    try:
        torch.accelerator.memory_allocated(device)
    except RuntimeError:
        return "pluggable"
    return "native"


_A_SWAP = MemoryPlan((PlanRow("embedding", OUTPUT, "swap", windows=Windows.of_prefetch(1)),), num_layers=0)
"""The smallest plan that the planner may find, which checkpointing must allow: a layer's input is swapped."""


def _one_process(model: nn.Module) -> Problem | None:
    if not isinstance(model, nn.DataParallel):
        return None
    hint = "Start with `accelerate launch` or torchrun (DistributedDataParallel)."
    return Problem("model", "one process per device", "nn.DataParallel", hint)


def _compiled_whole(structure: ModelStructure) -> Problem | None:
    """Return the problem of a model compiled whole: it has one fate, and the guard could only rerun it."""
    if not structure.compiled:
        return None
    hint = (
        "Compile the layers one by one: `layer.compile()`, or regional compilation "
        "(ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1 beside torch_compile=True)."
    )
    return Problem("memory.mode", "layers with fates of their own", "a model compiled whole", hint)


def _allocator(name: str) -> Problem | None:
    if name in COUNTING_ALLOCATORS:
        return None
    expected = "an allocator of PyTorch beside the planner, which asks it how much memory is in use"
    found = f"'{name}' (torch.cuda.get_allocator_backend())"
    hint = (
        "Leave torch.cuda.memory.change_current_allocator out; inside a torch.cuda.MemPool another allocator "
        "may stay."
    )
    return Problem("memory.mode", expected, found, hint)


def _uncached(environment: Mapping[str, str]) -> Problem | None:
    written = [name for name in _NO_CACHING if environment.get(name) == "1"]
    if not written:
        return None
    expected = "an allocator that counts what is in use beside the planner"
    return Problem("memory.mode", expected, f"{written[0]}=1 in the environment", "Leave the variable out.")


def _checkpointed(layers: Mapping[Scope, nn.Module]) -> Problem | None:
    on = [scope for scope, layer in layers.items() if is_checkpointed(layer) or _WRAPPED in layer._modules]
    if not on:
        return None
    name = checkpointing_argument()
    expected = "gradient checkpointing switched off beside adaptive, which chooses every fate itself"
    hint = (
        f"Write {name}=False (or model.{name}_disable()): adaptive finds out "
        "what is worth recomputing. Beside smart_swap it may stay."
    )
    return Problem("memory.mode", expected, f"it switched on in layers {format_scopes(on)}", hint)
