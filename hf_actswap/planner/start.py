"""Starts the planner for a model: checks what it cannot be combined with, and reads the plan file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ..config.sizes import GIB
from ..engine.agreement import world_size
from ..engine.device_allocator import let_segments_expand
from ..engine.frozen_weights import weights_of
from ..engine.hook_wrappers import Hook
from ..engine.host_budget import HostMemory
from ..engine.host_pool import HostPool
from ..engine.swapped_storages import EvictableTensors
from ..engine.transfer import Transfer, transfer_of
from ..errors import ActSwapError, PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import NOT_COMPARED, MemoryPlan, PlanRow, Windows, format_scopes
from ..plan.model_structure import OUTPUT, ModelStructure, unwrapped
from ..plan.wrapper_rules import problems_of_checkpointing
from ..plan.wrappers import is_checkpointed
from ..releases import checkpointing_argument
from .meter import AllocatorMeter, CountingMeter, Meter, baseline_tensors, device_name
from .on_paper import StepOnPaper
from .oom_guard import OomGuard
from .phases.planner import Planner
from .plan_file import FilePlan, MadeFor, read_plan
from .planning import found_by_rank_0
from .run import ApplyPlan, ApplyTiles, MovableWeights, PlannedTraining, Run
from .states.optimizer_states import (
    OptimizerStates,
    after_steps,
    inner_optimizer,
    is_streamed,
    reject,
)
from .states.state_bytes import expected_state_bytes

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
    movable: MovableWeights | None = None,
    ladder: Iterable[MemoryPlan] | None = None,
) -> Planner:
    """Put a planner on a model in training and return it; every rank must call it.

    Args:
        put, put_tiles: functions that put a plan, and tiles, on the model.
        host: the host memory of all plans, which the optimizer's states share (``memory_saving``).
        transfer: how bytes are copied; by default streams on an accelerator, blocking copies on the CPU.
        meter: measures device memory; by default it asks the allocator. On the CPU it counts storages, and
            rejects ops that exceed ``budget_gib`` as an accelerator would.
        movable: frozen weights that the planner may move to the host; ``None``: it may not.
        ladder: plans with more and more in tiles, tried where no plan fits; ``None``: no tiles are added.

    Raises:
        PlanError: the model, its checkpointing or the allocator cannot be combined with the planner; the plan
            file is malformed; ``memory_saving`` has no optimizer, or one whose states cannot be moved.
    """
    structure, fixed, memory = training.structure, training.fixed, training.memory
    if memory.mode == "off":
        raise ValueError("memory.mode is off: there is nothing to plan")
    if problems := problems_of_planner(training.model, structure, memory.mode):
        raise PlanError(problems)
    device = next((p.device for p in unwrapped(training.model).parameters()), torch.device("cpu"))
    transfer = transfer or transfer_of(device)
    meter = meter or _meter_of(device, training)
    pool = host.pool(device, transfer.overlaps, None)
    idle = EvictableTensors(device, pool if transfer.overlaps else None, fixed.min_tensor_bytes)
    name = device_name(device)
    tiles, known_tiles = (None, ()) if ladder is None else tee(ladder)
    paper = StepOnPaper(
        training, lambda: run.fixed, device, put_tiles, lambda: run.states is not None, known_tiles
    )
    guard = OomGuard(meter, idle, paper.in_words)
    weights, host_bytes = weights_of(unwrapped(training.model)), host.limit_bytes
    if weights is not None and host_bytes is not None:
        host_bytes += weights.host_bytes  # the limit is for what waits there beside them
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
        weights=weights,
        movable=movable,
        ladder=tiles,
        host_bytes=host_bytes,
        least_bytes=paper.least_bytes,
        least_in_tiles=paper.least_in_tiles,
        profile_on_paper=paper.profile if paper.knows_steps else None,
    )
    if memory.preference == "memory_saving":
        run.states = _states_on_host(training, transfer, pool)
    elif _may_move_states(training, transfer):
        run.make_states = partial(_states_on_host, training, transfer, pool)
    made_for = partial(_made_for, training, device)
    known, ours = _known_plan(training, made_for(()))
    resident_bytes = None if known is None else known.numbers.get("states_resident_bytes")
    if resident_bytes is not None and run.make_states is not None:
        run.states_to_host(resident_bytes)
    if known is not None and known.plan.weights == "host" and movable is not None:
        run.weights_to_host()
        fixed = run.fixed
    if known is not None:
        # for the same op the user's tiles win
        tiles_by_op = {(tile.scope, tile.op_path): tile for tile in (*known.plan.tiles, *fixed.tiles)}
        fixed = replace(fixed, tiles=tuple(tiles_by_op.values()))
    with uninterrupted():
        run.tile(fixed)
        try:
            planner = Planner(run, made_for, known, ours)
        except BaseException:
            run.close()
            raise
        if (restore := let_segments_expand(device)) is not None:
            planner.on_remove(restore)
        model, optimizer = unwrapped(training.model), training.optimizer
        batches = model.register_forward_pre_hook(Hook(paper.forward_starts), with_kwargs=True)
        planner.on_remove(batches.remove)
        if optimizer is not None and training.counts_steps:
            planner.on_remove(after_steps(optimizer, planner.step_ended))
    return planner


def _may_move_states(training: PlannedTraining, transfer: Transfer) -> bool:
    memory, optimizer = training.memory, training.optimizer
    asked = memory.preference == "auto" and memory.mode == "adaptive" and not memory.optimizer_in_backward
    if not asked or optimizer is None or not transfer.overlaps or training.part:
        return False
    try:
        reject(inner_optimizer(optimizer), transfer)
    except PlanError:
        return False
    return is_streamed(inner_optimizer(optimizer))


_LEAST_SHARE_OF_STATES = 2**-15
"""Share of all states below which a tensor of them stays on the device: adapters beside those of experts have
hundreds, which hold next to nothing and cost the host as much as large ones."""


def _states_on_host(
    training: PlannedTraining, transfer: Transfer, pool: HostPool, resident_bytes: int | None = None
) -> OptimizerStates:
    if training.optimizer is None:
        expected = "the optimizer, whose states memory_saving moves"
        hint = "Pass it: hf_actswap.apply(model, config, optimizer=optimizer)."
        raise PlanError([Problem("memory.preference", expected, "none", hint)])
    root, structure = unwrapped(training.model), training.structure
    stacks = (*structure.stacks, structure)  # an encoder, or a tower, runs before the decoder
    expected_bytes = expected_state_bytes(inner_optimizer(training.optimizer)) or 0
    least_bytes = int(expected_bytes * _LEAST_SHARE_OF_STATES)
    states = OptimizerStates(
        training.optimizer,
        transfer,
        pool,
        model=training.model,
        layers=[root.get_submodule(layer.module_path) for stack in stacks for layer in stack.layers],
        resident_bytes=resident_bytes,
        expected_bytes=expected_bytes,
        min_tensor_bytes=max(training.fixed.min_tensor_bytes, least_bytes),
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
    named, earlier = training.memory.plan_file, training.earlier_plan

    def search() -> tuple[FilePlan | None, bool]:
        found: FilePlan | None = None
        ours = True
        if named is not None and Path(named).exists():
            found, ours = _fitting(read_plan(named), training, here)
        if found is None and earlier is not None:
            found = _of_checkpoint(earlier, here)
        return found, ours

    return (None, True) if named is None and earlier is None else found_by_rank_0(search)


def _of_checkpoint(path: str, here: MadeFor) -> FilePlan | None:
    if not Path(path).exists():
        return None
    try:
        found = read_plan(path)
    except ActSwapError as error:
        logger.warning("The plan of the checkpoint is not used, and one is searched: %s", str(error))
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
    model: nn.Module, structure: ModelStructure, mode: Literal["smart_swap", "adaptive"]
) -> list[Problem]:
    """Return the reasons why the planner cannot run with ``model``, bare or wrapped, on its device."""
    root = unwrapped(model)
    layers = structure.layer_modules(root)
    device = next((weight.device for weight in root.parameters()), torch.device("cpu"))
    problems = list(_problems_of_model(model, structure))
    problems += _problems_of_allocator(device)
    if mode != "adaptive":
        return problems + problems_of_checkpointing(layers, _A_SWAP, structure.compiled)
    on = [scope for scope, layer in layers.items() if is_checkpointed(layer) or _WRAPPED in layer._modules]
    if on:
        name = checkpointing_argument()
        expected = "gradient checkpointing switched off beside adaptive, which chooses every fate itself"
        hint = (
            f"Write {name}=False (or model.{name}_disable()): adaptive finds out "
            "what is worth recomputing. Beside smart_swap it may stay."
        )
        found = f"it switched on in layers {format_scopes(on)}"
        problems.append(Problem("memory.mode", expected, found, hint))
    return problems


def _problems_of_model(model: nn.Module, structure: ModelStructure) -> Iterator[Problem]:
    if isinstance(model, nn.DataParallel):
        hint = "Start with `accelerate launch` or torchrun (DistributedDataParallel)."
        yield Problem("model", "one process per device", "nn.DataParallel", hint)
    if structure.compiled:  # then it has one fate, and the guard could only rerun it
        hint = (
            "Compile the layers one by one: `layer.compile()`, or regional compilation "
            "(ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1 beside torch_compile=True)."
        )
        yield Problem("memory.mode", "layers with fates of their own", "a model compiled whole", hint)


def _problems_of_allocator(device: torch.device) -> Iterator[Problem]:
    name = allocator_name(device)
    if name not in COUNTING_ALLOCATORS:
        expected = "an allocator of PyTorch beside the planner, which asks it how much memory is in use"
        hint = (
            "Leave torch.cuda.memory.change_current_allocator out; inside a torch.cuda.MemPool another "
            "allocator may stay."
        )
        found = f"'{name}' (torch.cuda.get_allocator_backend())"
        yield Problem("memory.mode", expected, found, hint)
    written = [name for name in _NO_CACHING if device.type == "cuda" and os.environ.get(name) == "1"]
    if written:
        expected = "an allocator that counts what is in use beside the planner"
        yield Problem(
            "memory.mode", expected, f"{written[0]}=1 in the environment", "Leave the variable out."
        )


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
