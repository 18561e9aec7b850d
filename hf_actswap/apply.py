"""`apply`: put a configuration or a plan on a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .config import ActSwapConfig, MemoryConfig
from .config.sizes import GIB, gib_text
from .engine import AppliedPlan, Resources, Transfer, install
from .engine.frozen_weights import FrozenWeights, problems_of_weights, sizes_on_host, weights_of
from .engine.hook_wrappers import Hook
from .engine.host_budget import HostMemory, Progress
from .engine.install import put_tiles, tile_parts
from .engine.swapped_storages import PackHandler
from .errors import ActSwapError, ConfigError, PlanError, Problem, short_traceback
from .parallel import enclosing_replicas
from .parallel.block_hooks import keep_gathered_inputs
from .plan import (
    ConfigOrPlan,
    MemoryPlan,
    ModelStructure,
    load_config_or_plan,
    model_structure,
    resolve_plan,
    with_problems_of_model,
)
from .plan.actions import NOT_COMPARED, Scope, Tile, format_scopes
from .plan.dry_run import is_dry
from .plan.model_structure import unwrapped
from .plan.tiles import tile_ladder
from .plan.wrapper_rules import problems_of_checkpointing, problems_of_checkpointing_around
from .plan.wrappers import WithoutCheckpointing, without_cache
from .planner import Meter, OptimizerInBackward, PlannedTraining, Planner, start_planner
from .planner.memory_errors import name_memory_errors
from .planner.record.recorder import batch_shape
from .planner.run import MovableWeights
from .planner.states.in_backward import KEY
from .releases import checkpointing_argument, of_a_step
from .report import PinningBar, PlannerBar, console_logging, plan_summary, saving_of
from .stream import ChunkBudget, KeptLayers, problems_of_model, stream_sequences

logger = logging.getLogger(__name__)


@short_traceback
def apply(
    model: nn.Module,
    config_or_plan: ConfigOrPlan,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    transfer: Transfer | None = None,
    progress: Progress | None = None,
    meter: Meter | None = None,
) -> AppliedPlan | Planner:
    """Put a configuration or a plan on a model.

    Works before or after ``accelerator.prepare``; the model keeps its class and its state-dict names, and
    after ``AppliedPlan.remove()`` it is as before. Rank 0 logs what the plan does, and at ``remove()`` what
    it saved; a request of a configuration that a rule changes is a warning. While a plan is on,
    ``model.config.use_cache`` is false: a key-value cache would hold what swap releases, and be written
    twice by recomputation.

    If ``memory.mode`` is ``smart_swap`` or ``adaptive``, a plan is searched while the model trains, and
    changed between steps. A `Planner` is returned, with the same ``plan``, ``stats()`` and ``remove()``. The
    model must then be on its device before this call. Under ``adaptive`` gradient checkpointing is off until
    ``remove()``, because it decides what is recomputed. With ``stream_config`` an `AppliedPlan` is returned
    instead; with ``adaptive`` the first training call chooses how many layers of a chunk are kept.

    Args:
        model: a transformers model, bare or wrapped (DDP, PEFT, ``torch.compile``).
        config_or_plan: ``"auto"``, or anything else that `load_config` takes; or a plan, or a plan's file.
            With ``recompute_slice_activation``, call inside `hf_actswap.parallel.tensor_parallel_group`.
        optimizer: the model's optimizer, whose step ends a training step. The planner and
            ``memory: {optimizer_in_backward: true}`` need it.
        transfer: copies to host memory and back; by default on an accelerator's streams, on the CPU blocking.
        progress: called with (bytes ready, bytes in total) while host memory is page-locked, until the two
            are equal. By default a bar on rank 0.
        meter: measures device memory for the planner; by default the meter of the model's device.

    Raises:
        ConfigError: the configuration is malformed.
        PlanError: the configuration or plan does not fit the model, or requests something that this version
            does not support.
    """
    try:
        requested = load_config_or_plan(config_or_plan)
    except ConfigError as error:
        raise with_problems_of_model(error, model_structure(model)) from None
    resources = Resources(transfer, progress)
    with _console_on_rank_0(), ExitStack() as undo:
        checkpointing = None
        if isinstance(requested, MemoryPlan):
            structure = model_structure(model)
            say_what_to_know_of(config_or_plan, requested, structure)
            applied: AppliedPlan | Planner = apply_plan(model, requested, structure, resources)
        else:
            if requested.memory.mode == "adaptive":
                checkpointing = WithoutCheckpointing(model)
                undo.callback(checkpointing.undo)
            applied = _apply_config(model, requested, resources, optimizer, meter, checkpointing)
            optimizer_in_backward(model, requested.memory, optimizer, applied)
        applied.on_remove(undo.pop_all().close)
    if isinstance(applied, Planner) or applied.plan.does_anything:
        applied.on_remove(name_memory_errors(model, applied))
    if _is_rank_0():
        _say(applied)
    return applied


def _console_on_rank_0() -> AbstractContextManager[None]:
    return console_logging(logging.getLogger("hf_actswap")) if _is_rank_0() else nullcontext()


def _say(applied: AppliedPlan | Planner) -> None:
    """Log what is on the model, and what it saved when it is removed, as under the Trainer."""
    if isinstance(applied, Planner):
        applied.logging_context = _console_on_rank_0
    elif not applied.plan.does_anything:
        return
    with _console_on_rank_0():
        searches = isinstance(applied, Planner) and applied.phase != "stable"
        said = replace(applied.plan, adjustments=())  # each of them was logged as a warning
        for line in () if searches else plan_summary(said, applied.structure):
            logger.info("%s", line)

    def at_the_end() -> None:
        with _console_on_rank_0():
            logger.info("%s", saving_of(applied).in_words())

    applied.on_remove(at_the_end)


def _apply_config(
    model: nn.Module,
    requested: ActSwapConfig,
    resources: Resources,
    optimizer: torch.optim.Optimizer | None,
    meter: Meter | None,
    checkpointing: WithoutCheckpointing | None,
) -> AppliedPlan | Planner:
    structure = model_structure(model)
    plan = resolve_plan(requested, structure)
    for warning in plan.warnings:
        logger.log(logging.WARNING if requested.log == "reference" else logging.DEBUG, "%s", warning)
    for changed in plan.adjustments:
        logger.warning("%s", changed)
    if requested.memory.mode == "off":
        return apply_plan(model, plan, structure, resources)
    if optimizer is None:
        raise PlanError([_NO_OPTIMIZER])
    if plan.streamed is not None:
        budget = ChunkBudget(requested.memory, optimizer, meter)
        return apply_plan(model, plan, structure, resources, budget)
    training = PlannedTraining(
        model, structure, plan, requested.memory, optimizer, checkpointing=checkpointing
    )
    return plan_while_training(training, resources, meter=meter, written=requested)


def optimizer_in_backward(
    model: nn.Module,
    memory: MemoryConfig,
    optimizer: torch.optim.Optimizer | None,
    applied: AppliedPlan | Planner,
    reads_norm: bool = False,
) -> OptimizerInBackward | None:
    """Let the optimizer step in backward while a plan is applied; ``None``: ``memory`` does not say so.

    ``reads_norm`` as in `OptimizerInBackward`. An optimizer that is missing or cannot do so is a `PlanError`,
    and the plan has been removed.
    """
    if not memory.optimizer_in_backward:
        return None
    try:
        if optimizer is None:
            raise PlanError([replace(_NO_OPTIMIZER, where=KEY, expected="the optimizer, which it steps")])
        beside: dict[str, Any] = {}
        if isinstance(planner := applied, Planner):
            beside = {"states": lambda: planner.optimizer_states, "around": planner.outside_compute}
        found = OptimizerInBackward(optimizer, model, memory, **beside, reads_norm=reads_norm)
    except PlanError:
        applied.remove()
        raise
    found.attach()
    applied.on_remove(found.remove)
    return found


def say_what_to_know_of(source: ConfigOrPlan, plan: MemoryPlan, structure: ModelStructure) -> None:
    """Log what the user should know of a plan, named by ``source``, that was not resolved for this model."""
    if plan.fingerprint is None and not isinstance(source, MemoryPlan):
        logger.info("%s.", NOT_COMPARED[0].upper() + NOT_COMPARED[1:])
    made_with = plan.fingerprint.made_with if plan.fingerprint is not None else None
    if made_with not in (None, here := of_a_step()):
        said = "The plan was made with %s, and this is %s: a step may need other memory and time."
        logger.info(said, made_with, here)
    if absent := structure.without_op(plan):
        named = ", ".join(f"{path} (layers {format_scopes(scopes)})" for path, scopes in absent.items())
        if plan.fingerprint is None:
            logger.warning("The plan names what the model does not have: %s. These rows do nothing.", named)
        else:  # made for this model: such ops run with its batches, not with the few tokens of the example
            logger.debug("Not in the model's example: %s", named)


_NO_OPTIMIZER = Problem(
    "memory.mode",
    "the optimizer, whose step ends a training step",
    "none",
    "Pass it: hf_actswap.apply(model, config, optimizer=optimizer).",
)


def plan_while_training(
    training: PlannedTraining,
    resources: Resources = Resources(),
    *,
    meter: Meter | None = None,
    written: ActSwapConfig | None = None,
) -> Planner:
    """Start the planner, which searches a plan while a model trains (see `apply`).

    All plans that are tried share the same host memory.

    Args:
        training: the model, its fixed plan, the ``memory`` section and the optimizer.
        resources: given to each plan, with the tensor-parallel ranks, the shared host memory, and the pack
            handler, whose tickets can be evicted, set here.
        meter: measures device memory; by default the meter of the model's device.
        written: the user's configuration. Under ``adaptive``, if no plan fits, parts of the model run in
            tiles beyond those of this configuration. ``None``: none do.
    """
    model, whole = training.model, training.structure
    root, replicas = unwrapped(model), enclosing_replicas()
    shape = whole.planned_in(root)

    def put(plan: MemoryPlan, pack_handler: PackHandler | None) -> AppliedPlan:
        return apply_plan(model, plan, shape, replace(given, pack_handler=pack_handler))

    def tiles_on(tiles: Iterable[Tile]) -> list[Callable[[], None]]:
        return put_tiles(root, tile_parts(root, tiles, shape, replicas), shape)

    off = training.checkpointing
    for stack in whole.stacks:
        if stack not in shape.stacks and off is not None and off.not_in(root.get_submodule(stack.path)):
            logger.info("%s stays on in %s, beside the plan.", checkpointing_argument(), stack.path)
    ladder: Iterable[MemoryPlan] | None = None
    if written is not None and training.memory.mode == "adaptive":
        size = 1 if replicas is None else replicas.size
        ladder = (plan for _, plan in tile_ladder(written, root, whole, size))

    weights_back = ExitStack()
    training, movable = _with_weights(training, resources.transfer, weights_back)
    weights = weights_of(root)
    host = HostMemory(training.fixed, 0 if weights is None else weights.host_bytes)
    given = replace(resources, replicas=replicas, host=host)
    try:
        planner = start_planner(
            replace(training, structure=shape),
            put,
            tiles_on,
            host,
            transfer=resources.transfer if weights is None else weights.transfer(weights.device),
            meter=meter,
            movable=movable,
            ladder=ladder,
        )
    except BaseException:
        weights_back.close()
        raise
    planner.on_remove(weights_back.close)
    planner.on_remove(host.close)
    if _is_rank_0():
        bar = PlannerBar()
        planner.progress = bar
        planner.on_remove(bar.close)
    return planner


def _with_weights(
    training: PlannedTraining, transfer: Transfer | None, undo: ExitStack
) -> tuple[PlannedTraining, MovableWeights | None]:
    """Put frozen weights on the host for all plans of a planner, where that is written or has happened.

    Returns the training, whose plans say so, and the weights that the planner may move. ``undo`` gets what
    takes weights back.
    """
    model, structure = training.model, training.structure
    on_host = replace(training.fixed, weights="host")
    weights, owned = weights_on_host(model, training.fixed, structure, transfer)
    undo.callback(owned)
    if weights is not None:
        return replace(training, fixed=on_host), None
    memory, asked = training.memory, training.memory.weights == "auto"
    root = unwrapped(model)
    overlaps = transfer.overlaps if transfer else _is_on_accelerator(root)
    if not asked and not (memory.weights_may_move and overlaps and not training.part):
        return training, None
    try:
        sizes_bytes = movable_weights(root, structure, training.fixed)
    except PlanError as error:
        said = "memory.weights: %s: all weights stay on the device: %s"
        logger.log(logging.INFO if asked else logging.DEBUG, said, memory.weights, str(error))
        return training, None

    def to_host() -> FrozenWeights:
        weights, owned = weights_on_host(model, on_host, structure, transfer)
        undo.callback(owned)
        assert weights is not None
        return weights

    return training, MovableWeights(sizes_bytes, to_host, if_faster=asked)


def movable_weights(root: nn.Module, structure: ModelStructure, plan: MemoryPlan) -> Mapping[Scope, int]:
    """Return the bytes of each layer's frozen weights, which the planner may move to the host.

    Raises:
        PlanError: there are none, something else owns them, or the host has too little memory. (Weights of a
            model on the CPU are there already.)
    """
    sizes_bytes = sizes_on_host(root, structure)
    if problems := problems_of_weights(root, structure):
        raise PlanError(problems)
    needed_bytes, there_bytes = sum(sizes_bytes.values()), HostMemory(plan).limit_bytes
    if _is_on_accelerator(root) and there_bytes is not None and needed_bytes > there_bytes:
        expected = f"{gib_text(needed_bytes)} for frozen weights"
        raise PlanError([Problem("host memory", expected, gib_text(there_bytes), "Load them in fewer bits.")])
    return sizes_bytes


def _is_on_accelerator(root: nn.Module) -> bool:
    return any(weight.device.type != "cpu" for weight in root.parameters())


def sets_weights_aside(
    requested: ActSwapConfig | MemoryPlan,
    model: nn.Module,
    device: torch.device,
    owners: Collection[str] = (),
) -> bool:
    """Whether frozen weights go to the host before the model is moved to its device.

    They do if that is written, or if the planner may choose and the device does not hold the training at
    rest: with ``weights: auto``; else only where they can. ``owners`` place the weights in our stead (fsdp).
    """
    if isinstance(requested, MemoryPlan):
        return requested.weights == "host"
    memory = requested.memory
    if memory.weights == "host":
        return True
    if not memory.weights_may_move or rests_within(model, memory, device):
        return False
    if memory.weights == "auto":
        return True
    if device.type == "cpu" or owners:
        return False
    try:
        structure = model_structure(model)
        return bool(movable_weights(unwrapped(model), structure, resolve_plan(requested, structure)))
    except ActSwapError as error:
        logger.debug("frozen weights stay on the device: %s", str(error))
        return False


def set_weights_aside(requested: ActSwapConfig | MemoryPlan, model: nn.Module) -> Callable[[], None]:
    """Move frozen weights of the layers to the host; return what takes them back."""
    structure = model_structure(model)
    plan = requested if isinstance(requested, MemoryPlan) else resolve_plan(requested, structure)
    return weights_on_host(model, replace(plan, weights="host"), structure)[1]


def rests_within(model: nn.Module, memory: MemoryConfig, device: torch.device) -> bool:
    """Whether a device, or the budget, holds a training at rest: weights, and of the trained ones three more.

    Those are a gradient and two states of an optimizer such as Adam. What a step needs beside them is not
    known before one has run.
    """
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    held += 3 * sum(one.nbytes for one in model.parameters() if one.requires_grad)
    if memory.budget_gib is not None:
        return held <= memory.budget_gib * GIB
    return device.type == "cpu" or held <= torch.accelerator.get_memory_info(device)[1]


def apply_plan(
    model: nn.Module,
    plan: MemoryPlan,
    structure: ModelStructure,
    resources: Resources = Resources(),
    chunk_budget: ChunkBudget | None = None,
) -> AppliedPlan:
    """Put a plan on a model whose structure is known; see `apply`.

    Args:
        resources: given to the plan; by default the tensor-parallel ranks are those of the enclosing
            `hf_actswap.parallel.tensor_parallel_group`, and progress is a bar on rank 0.
        chunk_budget: for a streamed sequence: memory within which the first training call chooses how many
            layers of a chunk are kept. ``None``: the plan says it.
    """
    structure = structure.with_stacks_of(plan)
    _reject_what_cannot_be_applied(model, plan, structure)
    bar = resources.progress or (PinningBar() if _is_rank_0() else None)
    given = replace(resources, progress=bar, replicas=resources.replicas or enclosing_replicas())
    weights, owned = weights_on_host(model, plan, structure, given.transfer)
    try:
        applied = install(model, plan, structure, replace(given, weights=weights))
    except BaseException:
        owned()
        raise
    applied.on_remove(owned, last=True)
    try:
        for restore in _around_the_model(unwrapped(model), plan, structure, given, applied, chunk_budget):
            applied.on_remove(restore)
    except BaseException:
        applied.remove()
        raise
    return applied


def _around_the_model(
    root: nn.Module,
    plan: MemoryPlan,
    structure: ModelStructure,
    given: Resources,
    applied: AppliedPlan,
    chunk_budget: ChunkBudget | None,
) -> Iterator[Callable[[], None]]:
    """Do what a plan needs beside hooks on layers and ops; yield what undoes each."""
    yield from _gathering_once(root, plan, structure)
    if plan.rows or given.pack_handler is not None:
        cached = without_cache(root)
        yield from cached
        if cached and given.pack_handler is None:  # a planner puts one plan on after another
            logger.info(_CACHE_IS_OFF)
    if plan.fingerprint is not None and plan.fingerprint.batch_shape and not structure.compiled:
        yield _comparing_batches(root, plan.fingerprint.batch_shape)
    if plan.streamed is not None:
        choose = None if chunk_budget is None else KeptLayers(root, applied, chunk_budget).choose
        yield stream_sequences(root, plan.streamed, applied, given.transfer, choose)


def weights_on_host(
    model: nn.Module, plan: MemoryPlan, structure: ModelStructure, transfer: Transfer | None = None
) -> tuple[FrozenWeights | None, Callable[[], None]]:
    """Keep frozen weights of the layers on the host, if the plan says so and they are not there yet.

    DistributedDataParallel, where it is put around the model afterwards, leaves them alone: it would send
    them to the other ranks, and find parameters on two kinds of devices.

    Returns what keeps them there (``None``: they stay), and a function that undoes what this call did.
    """
    root = unwrapped(model)
    found = weights_of(root)
    if found is not None:
        found.follow_model()
    if plan.weights == "keep" or found is not None:
        return found, lambda: None
    weights = FrozenWeights(root, structure, transfer, plan.bind_numa, plan.host_memory_bytes)
    weights.attach()
    before = getattr(model, _IGNORED_BY_DDP, None)
    setattr(model, _IGNORED_BY_DDP, [*(before or ()), *weights.names_in(model)])

    def undo() -> None:
        weights.remove()
        setattr(model, _IGNORED_BY_DDP, before)
        if before is None:
            delattr(model, _IGNORED_BY_DDP)

    return weights, undo


_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute by which DistributedDataParallel is told, before it wraps a module, what it must leave alone."""


def _is_rank_0() -> bool:
    started = dist.is_available() and dist.is_initialized()
    return (dist.get_rank() if started else int(os.environ.get("RANK", "0"))) == 0


def _reject_what_cannot_be_applied(model: nn.Module, plan: MemoryPlan, structure: ModelStructure) -> None:
    problems = [
        Problem("plan", "what this version can carry out", requested, "Remove it from the configuration.")
        for requested in plan.unsupported
    ]
    root = unwrapped(model)
    if plan.rows and isinstance(model, nn.DataParallel):
        problems.append(
            Problem(
                "model",
                "one process per device",
                "nn.DataParallel, which runs copies of the model in threads",
                "Start with `accelerate launch` or torchrun (DistributedDataParallel).",
            )
        )
    if plan.streamed is not None:
        problems += problems_of_model(root, structure)
    else:
        problems += problems_of_checkpointing(structure.layer_modules(root), plan, structure.compiled)
        problems += problems_of_checkpointing_around(root, structure, plan)
    if plan.fingerprint is not None:
        problems += plan.fingerprint.problems_of(root)
    if problems:
        raise PlanError(problems)


def _comparing_batches(root: nn.Module, expected: tuple[int, ...]) -> Callable[[], None]:
    """Let the first training forward log if its batch has another shape than the plan was made for."""

    def compare(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_dry(args, kwargs) or not torch.is_grad_enabled():
            return
        found = batch_shape(args, kwargs)
        handle.remove()
        if found and found != expected:
            logger.info(
                "The plan was made for micro-batches of %s tokens, and this one has %s: what was measured or "
                "predicted for the plan does not hold here.",
                *(" x ".join(map(str, shape)) for shape in (expected, found)),
            )

    handle = root.register_forward_pre_hook(Hook(compare), with_kwargs=True)
    return handle.remove


def _gathering_once(root: nn.Module, plan: MemoryPlan, structure: ModelStructure) -> list[Callable[[], None]]:
    """Let layers save gathered inputs where they are recomputed whole or in ``plan.keeps_gathered``."""
    whole = {row.scope for row in plan.rows if row.op_path == "" and row.fate == "recompute"}
    kept = {*whole, *plan.keeps_gathered}
    return [
        keep_gathered_inputs(layer) for scope, layer in structure.layer_modules(root).items() if scope in kept
    ]


_CACHE_IS_OFF = (
    "use_cache is off while the plan is on: a cache would hold the tensors that it releases. Results are "
    "bitwise those with use_cache=False; with a cache some models (T5, GPT-J) round otherwise."
)
