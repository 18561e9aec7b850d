"""Starts the planner for a model: checks what it cannot be combined with, and reads the plan file.

`StepOnPaper` computes the coming step from shapes (`record.shapes`): its profile, from which ``adaptive``
plans before the first step, and the least budget that would do when training runs out of memory before a step
could be measured. It does so on a thread of its own while the training waits: it is asked from within a
forward or backward, whose modes, hooks and autograd state another thread does not share. Its errors are only
logged for debugging: the training goes on without it, or another error is about to be raised.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import tee
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..config.sizes import GIB, gib_text
from ..engine.agreement import world_size
from ..engine.call_state import CallState
from ..engine.device_allocator import let_segments_expand
from ..engine.frozen_weights import weights_of
from ..engine.hook_wrappers import Hook
from ..engine.host_budget import HostMemory
from ..engine.host_pool import HostPool
from ..engine.swapped_storages import EvictableTensors
from ..engine.tiled_calls import AUTO_LEAST_TOKENS
from ..engine.transfer import Transfer, transfer_of
from ..errors import ActSwapError, PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import NOT_COMPARED, MemoryPlan, PlanRow, Windows, format_scopes
from ..plan.model_structure import OUTPUT, ModelStructure, unwrapped
from ..plan.tiles import tile_names
from ..plan.wrapper_rules import problems_of_checkpointing
from ..plan.wrappers import is_checkpointed
from ..releases import checkpointing_argument
from .budget import limits_of
from .meter import AllocatorMeter, CountingMeter, Meter, baseline_tensors, device_name
from .oom_guard import OomGuard
from .phases import Planner
from .plan_file import FilePlan, MadeFor, read_plan
from .planning import found_by_rank_0
from .profile import Profile
from .record.devices import DEVICES, device_rates, rates_name
from .record.fsdp_step import of_one_rank
from .record.shapes import profile_from_shapes, with_weights_on_host
from .run import ApplyPlan, ApplyTiles, MovableWeights, PlannedTraining, Run
from .search.find_plan import least_peak_bytes
from .states.optimizer_states import (
    OptimizerStates,
    after_steps,
    inner_optimizer,
    is_streamed,
    reject,
)
from .states.state_bytes import expected_state_bytes

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


_LESS = 0.99
"""Tiles are pointed to if they lower the least budget to less than this share."""


class StepOnPaper:
    """Computes a step of a training from the shapes of its batch, and the least budget that any plan fits.

    Args:
        training: the model and, if known, its optimizer. States not made yet are counted as Adam's would be.
        fixed: returns the fates written by hand, with the current tiles.
        states_moved: returns whether the optimizer's states wait on the host.
        ladder: plans with more and more in tiles that the planner may choose.

    Attributes:
        knows_steps: whether a step can be timed on paper: the device's rates are known, nothing is compiled.
    """

    def __init__(
        self,
        training: PlannedTraining,
        fixed: Callable[[], MemoryPlan],
        device: torch.device,
        put_tiles: ApplyTiles = lambda _: [],
        states_moved: Callable[[], bool] = lambda: False,
        ladder: Iterable[MemoryPlan] = (),
    ) -> None:
        self._put_tiles, self._states_moved, self._ladder = put_tiles, states_moved, ladder
        rates = rates_name(device)
        self._rates, self._workspaces = rates or DEVICES[0].name, device.type != "cpu"
        self._root, self._structure, self._fixed = unwrapped(training.model), training.structure, fixed
        optimizer, self._memory = training.optimizer, training.memory
        self._optimizer = None if optimizer is None else inner_optimizer(optimizer)
        self._first = next((item for item in self._root.parameters() if item.requires_grad), None)
        self._call: Mapping[str, Any] | None = None
        self._shape: tuple[int, ...] = ()
        self._gradients_exist = False
        self._known: dict[object, int | None] = {}
        self.knows_steps = self._workspaces and rates is not None and not self._structure.compiles

    def forward_starts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember a batch; a forward pre-hook of the model. Floating-point values are not kept."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not torch.is_grad_enabled() or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return
        self._call = None if args else tree_map(_without_numbers, kwargs)
        self._shape = next((tuple(leaf.shape) for leaf in leaves if leaf.dim() >= 2), ())
        self._gradients_exist = self._first is not None and self._first.grad is not None

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any], accumulates: bool) -> Profile | None:
        """Return the profile of a step's micro-batch, with the tiles that are on the model.

        ``None``: how weights are sharded is not known, or the model does not run on fake tensors.

        Args:
            args, kwargs: those of the coming forward.
            accumulates: whether its backward adds to gradients.
        """
        self.forward_starts(self._root, args, kwargs)
        return _on_own_thread(lambda: self._profile(accumulates))

    def least_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        self.forward_starts(self._root, args, kwargs)
        return self._computed(self._fixed())

    def least_in_tiles(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[int, MemoryPlan] | None:
        """Return the least peak in all tiles that the planner may choose, and the plan with these tiles.

        ``args`` and ``kwargs`` are those of the coming forward; none: the last forward's.
        """
        if args or kwargs:
            self.forward_starts(self._root, args, dict(kwargs))
        plans = [self._fixed(), self._more_tiled()]
        found = [(self._computed(plan), plan) for plan in plans if plan is not None]
        return min(
            ((least, plan) for least, plan in found if least is not None), key=itemgetter(0), default=None
        )

    def in_words(self, least_bytes: int) -> str:
        """Return a sentence that names the least budget; an empty string if it is not known.

        ``least_bytes`` of device memory are known to be needed in any case.
        """
        fixed = self._fixed()
        tiled = tile_names(fixed.tiles)
        found = self._computed(fixed)
        if found is None:
            return ""
        least_bytes = max(found, least_bytes)
        states = "" if self._state_bytes() is None else ", optimizer states included"
        states += f", with {tiled} in tiles" if tiled else ""
        return (
            f"The least budget that would do for a batch of {self._shape} is about "
            f"{gib_text(least_bytes, math.ceil)} (computed from shapes{states})."
            f"{self._with_more_tiles(least_bytes)}"
        )

    def _with_more_tiles(self, least_bytes: int) -> str:
        most = self._more_tiled()
        found = None if most is None else self._computed(most)
        if most is None or found is None or found >= _LESS * least_bytes:
            return ""
        return (
            f" With {tile_names(most.tiles)} in tiles {gib_text(found, math.ceil)} would do: write "
            "`tile_config: {loss: auto, tile: {op_name: feed_forward}}`, or let `Planner.micro_batch` run "
            "forward and backward, as the Trainer does: then the planner adds tiles when memory runs out."
        )

    def _computed(self, plan: MemoryPlan) -> int | None:
        key = self._shape, self._gradients_exist, plan.tiles
        if key not in self._known:
            self._known[key] = _on_own_thread(lambda: self._searched(plan))
        return self._known[key]

    def _more_tiled(self) -> MemoryPlan | None:
        """Return the plan with most tiles that the planner may choose; ``None``: no more than there are."""
        if prod(self._shape) <= AUTO_LEAST_TOKENS:
            return None
        most = _on_own_thread(lambda: self._most_tiled)
        return None if most is None or len(most.tiles) <= len(self._fixed().tiles) else most

    @cached_property
    def _most_tiled(self) -> MemoryPlan | None:
        *_, most = [None, *self._ladder]
        return most

    def _searched(self, plan: MemoryPlan) -> int | None:
        with ExitStack() as tiled:
            there = self._fixed().tiles
            for undo in self._put_tiles([tile for tile in plan.tiles if tile not in there]):
                tiled.callback(undo)
            profile = self._profile(self._gradients_exist)
        if profile is None:
            return None
        limits = limits_of(self._memory, profile.device_bytes, plan.min_tensor_bytes)
        return least_peak_bytes(profile, plan, limits)

    def _profile(self, gradients_exist: bool) -> Profile | None:
        if self._call is None:
            return None
        with _AutocastOnFakes():
            profile = profile_from_shapes(
                self._root,
                self._structure,
                self._call,
                self._rates,
                optimizer_state_bytes=self._state_bytes() or 0,
                gradients_exist=gradients_exist,
                with_workspaces=self._workspaces,
            )
        if self._structure.sharded:
            return of_one_rank(profile, self._root, self._structure, device_rates(self._rates).fabric)
        streamed = weights_of(self._root)
        return profile if streamed is None else with_weights_on_host(profile, streamed.sizes_bytes)

    def _state_bytes(self) -> int | None:
        """Bytes of the optimizer's states that are on the device in every step; ``None``: not known."""
        if self._states_moved():
            return 0
        return None if self._optimizer is None else expected_state_bytes(self._optimizer)


def _on_own_thread(compute: Callable[[], Value | None]) -> Value | None:
    """Return what ``compute`` returns on a thread of its own; ``None`` if it fails."""
    found: list[Value | None] = []

    def run() -> None:
        try:
            with state.autocast_restored():
                found.append(compute())
        except Exception:  # an error is on its way already, and it is the one that counts
            logger.debug("the step is not known on paper", exc_info=True)

    # Its context variables hold the tensor-parallel group.
    state = CallState(torch.accelerator.current_accelerator() or torch.device("cpu"), False, ())
    thread = threading.Thread(target=state.run, args=(run,), name="step-on-paper")
    thread.start()
    thread.join()
    return found[0] if found else None


class _AutocastOnFakes(TorchFunctionMode):
    """Turns autocast on for fake tensors, which are on the CPU, where a forward turns it on for its device.

    That is how Accelerate wraps a forward. It is done once: what the model's code then turns off for the
    device of its tensors stays off.
    """

    def __init__(self) -> None:
        super().__init__()
        accelerator = torch.accelerator.current_accelerator()
        self._kind = None if accelerator is None else accelerator.type

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._kind is not None and torch.is_autocast_enabled(self._kind):
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype(self._kind))
            torch.set_autocast_enabled("cpu", True)
            self._kind = None
        return func(*args, **(kwargs or {}))


def _without_numbers(value: Any) -> Any:
    """Return a floating-point tensor on ``meta``; ids and masks stay, as the values of a mask matter."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


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
        weights=weights_of(unwrapped(training.model)),
        movable=movable,
        ladder=tiles,
        host_bytes=host.limit_bytes,
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
