"""What the planner's phases share: the model in training, what is on it, and one step's measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..config.schema import MemoryConfig
from ..engine.agreement import from_all_ranks
from ..engine.evictable import IdleTensors
from ..engine.hook_wrappers import Before, Undo, compiled_wrapper, replace_call
from ..engine.install import AppliedPlan
from ..engine.stats import SwapStats
from ..engine.swapped_storages import PackHandler
from ..engine.transfer import Stamp, Transfer
from ..errors import ActSwapError
from ..interrupts import uninterrupted
from ..plan.actions import MemoryPlan, Tile
from ..plan.dry_run import is_dry
from ..plan.model_structure import ModelStructure, unwrapped
from .meter import Meter
from .rescue.oom_guard import OomGuard, guard_compiled
from .states.optimizer_kinds import state_bytes_beside_weights
from .states.optimizer_states import OptimizerStates
from .trials import MeasuredStep

Put = Callable[[MemoryPlan, PackHandler | None], AppliedPlan]
"""Puts a plan on the model."""

PutTiles = Callable[[Iterable[Tile]], list[Undo]]
"""Lets parts of the model run in tiles; returns what restores them."""


@dataclass(frozen=True)
class PlannedTraining:
    """A model in training, and what the user wrote for it.

    Args:
        model: on its device, as it is called, in its wrappers.
        structure: of the model inside.
        fixed: the plan of the fates that are written by hand; its rows are constraints.
        memory: the ``memory`` section; its mode is not ``off``.
        optimizer: of the model; ``None``: not known.
        counts_steps: whether the optimizer's step ends a training step; if not, whoever trains calls
            `Planner.step_ended`.
        in_flight: micro-batches of which a stage of a pipeline holds activations at most.
        chunks: of that stage: calls of the model for a micro-batch.
        part: of the model, if this is a stage, in words: a plan file for another part does not fit.
    """

    model: nn.Module
    structure: ModelStructure
    fixed: MemoryPlan
    memory: MemoryConfig
    optimizer: torch.optim.Optimizer | None = None
    counts_steps: bool = True
    in_flight: float = 1
    chunks: int = 1
    part: str = ""


@dataclass
class Run:
    """One training under the planner.

    Args:
        model: as it is called, in its wrappers.
        structure: of the model inside.
        fixed: what the user wrote by hand: constraints. Its tiles, to which the planner may add, are on the
            model, whatever plan is.
        memory: what the user wrote of the planner.
        meter: of device memory.
        transfer: marks time, measures the link.
        guard: survives running out of memory while it is on.
        idle: what the guard can evict.
        put, put_tiles: put a plan, and tiles, on the model.
        device_name: for people.
        optimizer: of the model, if it is known.
        states: of the optimizer, where they are kept on the host between its steps.
        ladder: what may be fixed where no plan fits, with more and more in tiles; ``None``: nothing more may.
        in_flight, chunks: see `PlannedTraining`.
        least_bytes: the least peak of any plan, in the tiles that are on the model, for the arguments of a
            forward that comes; ``None``: it is not known.
    """

    model: nn.Module
    structure: ModelStructure
    fixed: MemoryPlan
    memory: MemoryConfig
    meter: Meter
    transfer: Transfer
    guard: OomGuard
    idle: IdleTensors
    put: Put
    put_tiles: PutTiles
    device_name: str
    optimizer: torch.optim.Optimizer | None = None
    states: OptimizerStates | None = None
    ladder: Iterator[MemoryPlan] | None = None
    in_flight: float = 1
    chunks: int = 1
    least_bytes: Callable[[tuple[Any, ...], dict[str, Any]], int | None] = lambda _args, _kwargs: None
    applied: AppliedPlan | None = None
    guarded: bool = False
    _tiled: list[Undo] = field(default_factory=list)
    _plans: list[AppliedPlan] = field(default_factory=list)
    _watching: list[Callable[[], list[Undo]]] = field(default_factory=list)
    _around: list[Undo] = field(default_factory=list)
    _guards: list[Undo] = field(default_factory=list)
    _past: SwapStats = field(default_factory=SwapStats)
    _start: Stamp | None = None
    _stats: SwapStats = field(default_factory=SwapStats)
    _evicted_bytes: int = 0

    @property
    def name(self) -> str:
        """For log lines."""
        return self.memory.mode

    @property
    def pack_handler(self) -> PackHandler:
        """Makes tickets that the guard can evict."""
        return self.idle.keep

    def stats(self) -> SwapStats:
        """Totals over all plans so far; what is no total is that of the plan that is on."""
        total = self._past
        for applied in sorted(self._plans, key=lambda item: item is self.applied):
            total += applied.stats()
        return total

    @uninterrupted()
    def tile(self, fixed: MemoryPlan) -> None:
        """Let ``fixed`` be what is written by hand; what runs in tiles from now on is what it says.

        Between two forwards, with no plan on the model.

        Raises:
            PlanError: something cannot run in tiles in this model.
        """
        undo, self._tiled = self._tiled, []
        for step in reversed(undo):
            step()
        self.fixed, self._tiled = fixed, self.put_tiles(fixed.tiles)

    @uninterrupted()
    def switch(self, plan: MemoryPlan | None, guarded: bool) -> None:
        """Take off what is on, and put ``plan`` on (``None``: nothing is swapped or recomputed).

        Args:
            plan: of the model.
            guarded: whether to survive running out of memory meanwhile, which costs host time.
        """
        self.take_off()
        self.meter.give_back()
        wanted = MemoryPlan((), len(self.structure.layers), self.structure.family) if plan is None else plan
        self.applied = self._put(wanted)
        self._plans = [self.applied]
        self.wrap()
        self.rescue(guarded)

    @uninterrupted()
    def use(self, plan: AppliedPlan | MemoryPlan) -> AppliedPlan:
        """Let another plan act from the next forward on, and suspend the one that is on.

        Graphs that still live keep to the plan under which they were made. Ahead of a forward this must be
        outside of the module's call: PyTorch reads its hooks once, before the first of them runs.

        Args:
            plan: one that was suspended, or a new one, which then stays beside the others until `take_off`.

        Raises:
            PlanError: a new plan cannot be put on; the one that was on still is.
        """
        before = self.applied
        if plan is before:
            return before
        self._leave_guards()
        if before is not None:
            before.suspend()
        try:
            if isinstance(plan, MemoryPlan):
                self.applied = self._put(plan)
                self._plans.append(self.applied)
            else:
                plan.handle_packs_by(self.pack_handler)  # its hooks are there even if nothing is swapped
                plan.resume()
                self.applied = plan
        except ActSwapError:
            if before is not None:
                before.handle_packs_by(self.pack_handler)
                before.resume()
            raise
        finally:
            self._guard_calls()
            self.rescue(self.guarded)
        return self.applied

    def _put(self, plan: MemoryPlan) -> AppliedPlan:
        return self.put(replace(plan, tiles=self.fixed.tiles), self.pack_handler)

    def drop(self, applied: AppliedPlan) -> None:
        """Take a suspended plan off for good, and keep what it counted."""
        self._plans.remove(applied)
        self._past += applied.stats()
        applied.remove()

    @property
    def called(self) -> nn.Module:
        """Whose call is a forward: the model inside its wrappers, or what the compiler made of it."""
        compiled = compiled_wrapper(self.model, self.structure)
        return unwrapped(self.model) if compiled is None else compiled  # which may have no truth value

    @uninterrupted()
    def watch(self, before: Before, wrapper: Callable[[nn.Module], list[Undo]]) -> None:
        """Be there at each forward of the model, around everything else of ours.

        Args:
            before: called ahead of it, before PyTorch looks for hooks, so that it may change them.
            wrapper: puts something around the calls of a module; returns what undoes it.
        """
        self.unwrap()
        self._watching = [
            lambda: ahead_of_calls(self.called, before),
            lambda: wrapper(self.called),
        ]
        self.wrap()

    @uninterrupted()
    def rescue(self, on: bool) -> None:
        """From the next forward on, survive running out of memory, or do no longer."""
        self._guard(on)
        if self.applied is not None:
            self.applied.handle_packs_by(self.pack_handler if on else None)

    @uninterrupted()
    def take_off(self) -> None:
        """Take all plans off, the last that was put on first, and keep what they counted."""
        self.unwrap()
        self.applied = None
        for applied in reversed(list(self._plans)):
            self.drop(applied)

    @uninterrupted()
    def wrap(self) -> None:
        """Guard the calls of compiled modules and watch, from outside of all that is around them by now."""
        self._guard_calls()
        for put in self._watching:
            self._around += put()

    @uninterrupted()
    def unwrap(self) -> None:
        """Undo `wrap`, before what it is around is taken off. Safe to call again."""
        undo, self._around = self._around, []
        for step in reversed(undo):
            step()
        self._leave_guards()

    def _guard_calls(self) -> None:
        self._guards = guard_compiled(self.guard, list(self.model.modules()))

    def _leave_guards(self) -> None:
        undo, self._guards = self._guards, []
        for step in reversed(undo):
            step()

    def state_bytes(self) -> int:
        """Bytes of the optimizer's states that are on the device between its steps."""
        if self.states is not None:
            return self.states.device_bytes
        return 0 if self.optimizer is None else state_bytes_beside_weights(self.optimizer)

    def step_starts(self) -> None:
        """Begin to measure."""
        self.meter.reset_peak()
        self._stats, self._evicted_bytes = self.stats(), self.idle.evicted_bytes
        self._start = self.transfer.stamp()

    def measured(self) -> MeasuredStep:
        """Return what the step that ends took, the worst of all ranks; every rank must call it."""
        return MeasuredStep.worst(from_all_ranks(self.measured_here()))

    def measured_here(self) -> MeasuredStep:
        """Return what the step that ends took on this rank; waits for the device."""
        if self._start is None:
            raise RuntimeError("no step has started")
        end = self.transfer.stamp()
        self.transfer.synchronize()
        return MeasuredStep(
            step_ms=end.ms_since(self._start),
            peak_bytes=self.meter.peak_bytes(),
            reserved_peak_bytes=self.meter.reserved_peak_bytes(),
            evicted_bytes=self.idle.evicted_bytes - self._evicted_bytes,
            offloaded_bytes=(self.stats() - self._stats).offloaded_bytes,
        )

    @uninterrupted()
    def close(self) -> None:
        """Take everything off the model."""
        self._watching = []
        self.take_off()
        self._guard(False)
        if self.states is not None:
            self.states.remove()
        self.tile(replace(self.fixed, tiles=()))

    def _guard(self, on: bool) -> None:
        """Enter or leave the guard's mode, the meter's around it."""
        if on and not self.guarded:
            self.meter.start()
            self.guard.start()
        elif self.guarded and not on:
            self.guard.stop()
            self.meter.stop()
        self.guarded = on


def ahead_of_calls(module: nn.Module, before: Before) -> list[Undo]:
    """Call ``before`` ahead of each call of ``module``, outside of it: its hooks are not collected yet.

    Not ahead of calls on fake tensors, which may come in the midst of a real one: those are no training.
    """

    def watched(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_dry(args, kwargs):
                before(module, args, kwargs)
            return inner(*args, **kwargs)

        return call

    return [replace_call(module, watched)]
