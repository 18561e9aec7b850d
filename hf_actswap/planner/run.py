"""State that the planner's phases share: the model in training, its plans, and a step's measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..config.schema import MemoryConfig
from ..config.sizes import GIB, gib_text
from ..engine.agreement import from_all_ranks
from ..engine.frozen_weights import FrozenWeights, problems_of_weights
from ..engine.hook_wrappers import Before, Undo, Wrapper, entries, replace_outermost_calls
from ..engine.install import AppliedPlan
from ..engine.stats import SwapStats
from ..engine.swapped_storages import EvictableTensors, PackHandler
from ..engine.transfer import Stamp, Transfer
from ..errors import PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import MemoryPlan, OpCall, Scope, Tile
from ..plan.dry_run import is_dry
from ..plan.model_structure import ModelStructure, unwrapped
from ..plan.settle import keep_what_differs
from ..plan.wrappers import WithoutCheckpointing
from .budget import BudgetError, impossible
from .meter import Meter
from .oom_guard import OomGuard, guard_compiled
from .plan_file import MeasuredStep
from .profile import Profile
from .states.optimizer_states import (
    OptimizerStates,
    inner_optimizer,
    state_bytes_beside_weights,
)
from .states.state_bytes import expected_state_bytes

ApplyPlan = Callable[[MemoryPlan, PackHandler | None], AppliedPlan]
"""Puts a plan on the model; the pack handler makes the tickets of tensors that stay on the device."""

ProfileOnPaper = Callable[[tuple[Any, ...], dict[str, Any], bool, int], Profile | None]
"""Returns the profile of a forward with these arguments, and its backward, which adds to gradients or not; so
many forwards run ahead of both."""

ApplyTiles = Callable[[Iterable[Tile]], list[Undo]]
"""Lets parts of the model run in tiles; returns functions that restore them."""


LeastInTiles = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[int, MemoryPlan] | None]
"""Returns the least peak of any plan for a forward with these arguments, and a plan with its tiles."""


@dataclass(frozen=True)
class PlannedTraining:
    """A model in training, and what the user wrote for it.

    Args:
        model: the model on its device, in the wrappers in which it is called.
        structure: structure of the model inside the wrappers.
        fixed: the fates that the user wrote by hand, as a plan; the planner keeps its rows.
        memory: the ``memory`` section of the configuration; its mode is not ``off``.
        optimizer: the model's optimizer; ``None``: not known.
        counts_steps: whether the optimizer's step ends a training step; if not, the training loop calls
            `Planner.step_ended`.
        in_flight: the most micro-batches whose activations a pipeline stage holds at once.
        chunks: how often a pipeline stage calls the model for one micro-batch.
        micro_batches: how many micro-batches the gradients of a step are accumulated from, as far as known:
            if there are more, the first step shows it.
        part: the layers of a pipeline stage, in words; a plan file for another part does not fit.
        earlier_plan: path of a plan file that an earlier part of this training wrote beside its checkpoint;
            it is used if it was made for the same run, and is never written. ``None``: there is none.
        checkpointing: gradient checkpointing that the user has on, and that is off in the decoder meanwhile.
    """

    model: nn.Module
    structure: ModelStructure
    fixed: MemoryPlan
    memory: MemoryConfig
    optimizer: torch.optim.Optimizer | None = None
    counts_steps: bool = True
    in_flight: float = 1
    chunks: int = 1
    micro_batches: int = 1
    part: str = ""
    earlier_plan: str | None = None
    checkpointing: WithoutCheckpointing | None = None


@dataclass(frozen=True)
class MovableWeights:
    """Frozen weights of layers on the device.

    Args:
        sizes_bytes: bytes of each layer's, in the order of forward.
        to_host: keeps them on the host from then on; raises `PlanError` if there is too little memory.
        if_faster: whether they move where a step is faster so, not only where nothing fits otherwise.
    """

    sizes_bytes: Mapping[Scope, int]
    to_host: Callable[[], FrozenWeights]
    if_faster: bool = True


class ModeLog(logging.LoggerAdapter[logging.Logger]):
    """Begins log lines with the planner's mode."""

    def __init__(self, mode: str) -> None:
        super().__init__(logging.getLogger(__package__))
        self._mode = mode

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._mode}: {msg}", kwargs


class ForwardsInFlight:
    """Counts forwards whose backward has not begun: a loss may compare the outputs of several calls.

    Losses of embedding models do: each column of the batch is a call of its own. A graph that is dropped
    without a backward is not counted.

    Attributes:
        most: how many there have been at once, at least 1.
    """

    def __init__(self) -> None:
        self.most = 1
        self._graphs: WeakSet[_Graph] = WeakSet()

    def __len__(self) -> int:
        return len(self._graphs)

    def around(self, _module: nn.Module) -> Wrapper:
        """Return what wraps the calls of a module, by which the model is entered."""

        def counted(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = inner(*args, **kwargs)
                if torch.is_grad_enabled() and not is_dry(args, kwargs):
                    self._add([leaf for leaf in tree_leaves(result) if _has_graph(leaf)])
                return result

            return call

        return counted

    def _add(self, outputs: Sequence[torch.Tensor]) -> None:
        graph = _Graph()  # lives as long as the hooks, and these as long as autograd's nodes

        def reached(_gradient: torch.Tensor, _graph: _Graph = graph) -> None:
            self._graphs.clear()

        for output in outputs:
            output.register_hook(reached)
        if outputs:
            self._graphs.add(graph)
            self.most = max(self.most, len(self._graphs))


class _Graph:
    """Stands for the graph of one forward."""


def _has_graph(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


@dataclass
class Run:
    """One training under the planner.

    Args:
        fixed: the fates that the user wrote by hand, which plans keep. Its tiles, to which the planner may
            add, are on the model under every plan.
        idle: the tensors that the guard can evict.
        least_bytes: returns the least peak of any plan in the model's tiles, given the arguments of the
            coming forward; ``None``: it is not known.
        least_in_tiles: the same in all tiles that the planner may choose, and the plan with these tiles.
        profile_on_paper: returns the profile of the coming step, computed from shapes (``None``: the model
            does not run on fake tensors); ``None``: no step of this training can be computed.
        states: the optimizer's states, if they are kept on the host between its steps.
        make_states: makes these, given the most bytes of them that stay on the device; ``None``: the planner
            may not choose to keep them there.
        weights: the frozen weights of layers, if they are on the host.
        movable: frozen weights that the planner may move there; ``None``: it may not, or has done so.
        ladder: plans that may replace ``fixed``, with more and more in tiles; ``None``: no tiles are added.
        host_bytes: host memory that this rank may take for all that waits there; ``None``: not known.

    Attributes:
        outside_ms: of the step that was measured last, the time before its first forward with gradients.
        forwards: those whose backward has not begun; of a pipeline's stage none are counted.
    """

    training: PlannedTraining
    fixed: MemoryPlan
    meter: Meter
    transfer: Transfer
    guard: OomGuard
    idle: EvictableTensors
    put: ApplyPlan
    put_tiles: ApplyTiles
    device_name: str
    least_bytes: Callable[[tuple[Any, ...], dict[str, Any]], int | None]
    least_in_tiles: LeastInTiles
    profile_on_paper: ProfileOnPaper | None
    states: OptimizerStates | None = None
    make_states: Callable[[int], OptimizerStates] | None = None
    weights: FrozenWeights | None = None
    movable: MovableWeights | None = None
    ladder: Iterator[MemoryPlan] | None = None
    host_bytes: int | None = None
    applied: AppliedPlan | None = None
    guarded: bool = False
    outside_ms: float = 0.0
    forwards: ForwardsInFlight = field(default_factory=ForwardsInFlight)
    _tiled: ExitStack = field(default_factory=ExitStack)
    _watching: list[Callable[[], list[Undo]]] = field(default_factory=list)
    _around: ExitStack = field(default_factory=ExitStack)
    _past: SwapStats = field(default_factory=SwapStats)
    _differing: tuple[OpCall, ...] = ()
    _begun: Stamp | None = None
    _start: Stamp | None = None
    _stats: SwapStats = field(default_factory=SwapStats)
    _evicted_bytes: int = 0
    _states_stall_ms: float = 0.0
    _of_weights: SwapStats = field(default_factory=SwapStats)
    _layers: Mapping[Scope, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = ModeLog(self.name)
        self._layers = self.training.structure.layer_modules(unwrapped(self.training.model))
        if self.weights is not None:
            self._of_weights = self.weights.stats()

    @property
    def limit_bytes(self) -> int:
        """The most device memory of a step: that of the device, or the budget if that is less."""
        budget_gib, there = self.training.memory.budget_gib, self.meter.limit_bytes()
        return there if budget_gib is None else min(there, round(budget_gib * GIB))

    @property
    def in_flight(self) -> float:
        """The most micro-batches whose activations are there at once, as far as known."""
        return max(self.training.in_flight, self.forwards.most)

    @property
    def name(self) -> str:
        """The planner's mode."""
        return self.training.memory.mode

    @property
    def pack_handler(self) -> PackHandler:
        return self.idle.keep

    def stats(self) -> SwapStats:
        """Return totals over all plans so far; values that are not totals are those of the current plan."""
        total = self._past
        if self.applied is not None:
            total += self.applied.stats()
        return total if self.weights is None else total.with_weights(self.weights.stats() - self._of_weights)

    def check_layers(self) -> None:
        if self.training.chunks > 1:
            return  # in the forward of a pipeline's chunk, stand-ins are in the place of other chunks' layers
        structure, root = self.training.structure, unwrapped(self.training.model)
        if problems := structure.replaced_layers(root, self._layers):
            raise PlanError(problems)

    @property
    def is_removable(self) -> bool:
        """Whether dispatch modes can be left now, or none is on.

        At the end of ``torch.inference_mode()`` PyTorch's dispatch state comes back as before the block: with
        modes that were left meanwhile, so that every ``torch.empty`` of the process would fail.
        """
        return not (self.guarded and torch.is_inference_mode_enabled())

    def check_removable(self) -> None:
        if not self.is_removable:
            hint = "Call remove() after the block."
            raise PlanError([Problem("remove", "no torch.inference_mode() around it", "one", hint)])

    def resting_bytes(self) -> int:
        """Return what is on the device between backward and the optimizer's step, whatever the plan."""
        training = self.training
        weights = unwrapped(training.model).parameters()
        found = sum(weight.nbytes * (2 if weight.requires_grad else 1) for weight in weights)
        if self.weights is not None:
            found -= self.weights.host_bytes - self.weights.window_bytes
        if self.states is None and training.optimizer is not None:
            found += expected_state_bytes(inner_optimizer(training.optimizer)) or 0
        return found

    def budget_error(
        self, needed_bytes: int, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}
    ) -> BudgetError | None:
        """Return the error of a written budget that is below ``needed_bytes``; ``None``: it is not below.

        ``args`` and ``kwargs`` are of the coming forward, for the least budget that is named; none: of the
        last one.
        """
        memory = self.training.memory
        if memory.budget_gib is None or needed_bytes <= (budget := round(memory.budget_gib * GIB)):
            return None
        least_bytes, plan = self.least_in_tiles(args, kwargs) or (needed_bytes, self.fixed)
        error = impossible(memory, budget, max(least_bytes, needed_bytes), needed_bytes, plan.tiles)
        return self.with_weights_named(error)

    def with_weights_named(self, error: BudgetError) -> BudgetError:
        """Return the error with a word about frozen weights of the layers, if they stay on the device."""
        root, structure = unwrapped(self.training.model), self.training.structure
        layers = structure.layer_modules(root).values()
        frozen = [weight for layer in layers for weight in layer.parameters() if not weight.requires_grad]
        stay = self.training.memory.weights == "keep"
        if not stay or not frozen or problems_of_weights(root, structure):
            return error
        size_bytes = sum({id(weight): weight.nbytes for weight in frozen}.values())
        moves = f"`memory.weights: auto` moves {gib_text(size_bytes)} of frozen weights to the host."
        return error.with_hint(moves)

    @uninterrupted()
    def states_to_host(self, resident_bytes: int) -> None:
        """Keep the optimizer's states on the host between its steps, as ``memory_saving`` does."""
        assert self.make_states is not None
        self.states = self.make_states(resident_bytes)
        memory = replace(self.training.memory, preference="memory_saving")
        self.training = replace(self.training, memory=memory)

    @uninterrupted()
    def weights_to_host(self) -> None:
        """Take the plan off, and keep frozen weights of layers on the host; call it between two forwards.

        Raises:
            PlanError: there is too little host memory.
        """
        assert self.movable is not None
        self.take_off()
        fixed = self.fixed
        self.tile(replace(fixed, tiles=()))  # tiles go around the calls that bring weights
        self.weights, self.movable = self.movable.to_host(), None
        self.tile(replace(fixed, weights="host"))
        self.training = replace(self.training, memory=replace(self.training.memory, weights="host"))
        self.meter.give_back()

    @uninterrupted()
    def tile(self, fixed: MemoryPlan) -> None:
        """Replace ``fixed``, and with it the tiles, between two forwards, with no plan on the model."""
        self._tiled.close()
        for undo in self.put_tiles(fixed.tiles):
            self._tiled.callback(undo)
        self.fixed = fixed

    @uninterrupted()
    def replace_plan(self, plan: MemoryPlan | None, guarded: bool) -> None:
        """Take the plan off the model, and put ``plan`` on; ``None``: nothing is swapped or recomputed.

        ``guarded``: ops survive running out of memory meanwhile, which costs host time.
        """
        self.take_off()
        self.meter.give_back()
        structure = self.training.structure
        empty = MemoryPlan((), len(structure.layers), structure.family)
        # Checksums would count in the memory and the time of a trial: `Stable` switches them on.
        put = replace(empty if plan is None else plan, tiles=self.fixed.tiles, verify="off")
        if self._differing:  # no plan is searched for with that in mind: what is kept may take too much, once
            put = keep_what_differs(put, self._differing)
        self.applied = self.put(put, self.pack_handler)
        self.wrap()
        self.set_guard(guarded)

    @uninterrupted()
    def watch(self, before: Before, wrapper: Callable[[nn.Module], Wrapper]) -> None:
        """Run code at each forward of the model, outside all other wrappers of the planner and its plans.

        Args:
            before: called ahead of each forward, before PyTorch collects hooks, so that it may change them.
            wrapper: returns what wraps the calls of a module.
        """
        self.unwrap()
        called = entries(self.training.model, self.training.structure)
        counted = () if self.training.part else (self.forwards.around,)  # of a pipeline they are known
        wrappers = (*counted, partial(ahead_of_calls, before), wrapper)
        self._watching = [partial(replace_outermost_calls, called, one) for one in wrappers]
        self.wrap()

    @uninterrupted()
    def set_guard(self, on: bool) -> None:
        """Turn the guard against running out of memory on or off, from the next forward on."""
        self._guard(on)
        if self.applied is not None:
            self.applied.set_pack_handler(self.pack_handler if on else None)

    @uninterrupted()
    def take_off(self) -> None:
        """Take the plan off, and keep what it counted."""
        self.unwrap()
        applied, self.applied = self.applied, None
        if applied is not None:
            self._past += applied.stats()
            applied.remove()
            self._differing += applied.differing

    @uninterrupted()
    def wrap(self) -> None:
        """Guard compiled modules' calls and install what `watch` was given, outside all wrappers so far."""
        for undo in guard_compiled(self.guard, list(self.training.model.modules())):
            self._around.callback(undo)
        for put in self._watching:
            for undo in put():
                self._around.callback(undo)

    @uninterrupted()
    def unwrap(self) -> None:
        """Undo `wrap`, which must happen before inner wrappers are taken off. Safe to call again."""
        self._around.close()

    def state_bytes(self) -> int:
        """Bytes of the optimizer's states that are on the device between its steps."""
        if self.states is not None:
            return self.states.device_bytes
        return 0 if self.training.optimizer is None else state_bytes_beside_weights(self.training.optimizer)

    def step_begins(self) -> None:
        """Note where a step begins, before any forward. A loop that does not say it begins with its first."""
        self._begun = self.transfer.stamp()

    def step_starts(self) -> None:
        """Begin to measure a step. Raises `PlanError` if the model has other layers than at the start."""
        self.check_layers()
        self.meter.reset_peak()
        self.guard.missing_bytes = 0
        self._stats, self._evicted_bytes = self.stats(), self.idle.evicted_bytes
        self._states_stall_ms = self._stall_ms_of_states()
        self._start = self.transfer.stamp()

    def measured(self) -> MeasuredStep:
        """Return `measured_here`, the worst of all ranks; every rank must call it."""
        return MeasuredStep.worst(from_all_ranks(self.measured_here()))

    def measured_here(self) -> MeasuredStep:
        """Return time and memory of the step that ends, of this rank. Waits for the device."""
        assert self._start is not None
        end = self.transfer.stamp()
        self.transfer.synchronize()
        self.outside_ms = 0.0 if self._begun is None else self._start.ms_since(self._begun)
        moved, step_ms = self.stats() - self._stats, end.ms_since(self._start)
        stall_ms = moved.stall_ms + self._stall_ms_of_states() - self._states_stall_ms
        return MeasuredStep(
            step_ms=step_ms,
            peak_bytes=self.meter.peak_bytes(),
            reserved_peak_bytes=self.meter.reserved_peak_bytes(),
            evicted_bytes=self.idle.evicted_bytes - self._evicted_bytes,
            offloaded_bytes=moved.offloaded_bytes,
            missing_bytes=self.guard.missing_bytes,
            work_ms=max(step_ms - stall_ms, 0.0),
        )

    def _stall_ms_of_states(self) -> float:
        return 0.0 if self.states is None else self.states.stats().stall_ms

    @uninterrupted()
    def close(self) -> None:
        self.meter.let_go()
        self._watching = []
        self.take_off()
        self._guard(False)
        if self.states is not None:
            self.states.remove()
        self.tile(replace(self.fixed, tiles=()))

    def _guard(self, on: bool) -> None:
        if on and not self.guarded:
            self.meter.start()
            self.guard.start()
        elif self.guarded and not on:
            self.guard.stop()
            self.meter.stop()
        self.guarded = on


def ahead_of_calls(before: Before, module: nn.Module) -> Wrapper:
    """Return what calls ``before`` ahead of each call of ``module``, before PyTorch collects its hooks.

    Calls on fake tensors are left out: they train nothing, and may come inside a real call.
    """

    def watched(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_dry(args, kwargs):
                before(module, args, kwargs)
            return inner(*args, **kwargs)

        return call

    return watched
