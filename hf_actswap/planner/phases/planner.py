"""Leads a training from phase to phase; the package's docstring says when each begins and ends."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...config.sizes import GIB, gib_text
from ...engine.agreement import from_all_ranks, rank, world_size
from ...engine.frozen_weights import FrozenWeights
from ...engine.install import AppliedPlan
from ...engine.stats import SwapStats
from ...engine.tiled_calls import AUTO_LEAST_TOKENS
from ...errors import short_traceback
from ...interrupts import uninterrupted
from ...plan.actions import MemoryPlan
from ...plan.dry_run import is_dry
from ...plan.in_words import plan_in_words
from ...plan.model_structure import ModelStructure, unwrapped
from ..budget import BudgetError, fits_outside_backward
from ..meter import baseline_tensors, gradient_bytes, others_bytes
from ..oom_guard import DeviceMemoryError, Failure, Retry
from ..plan_file import FilePlan, MadeFor, Outcome, Trial, write_plan
from ..planning import (
    RESIDENT,
    PlanningTask,
    agreed_task,
    states_in_passing,
    weights_pay,
    without_others,
)
from ..profile import Prediction
from ..record.recorder import batch_shape
from ..recorded_step import BatchSize, RecordedStep, beside_old_gradients, beside_others
from ..run import Run
from ..search.find_plan import Found
from ..search.states_place import whole_step
from ..states.optimizer_states import OptimizerStates
from .search import STEPS_PER_TRIAL, SearchPhase
from .stable import MOST_PLANS, Stable
from .warm_up import WarmUp, first_steps, module_weights

LEAST_ON_PAPER_BYTES = 4 * GIB
"""On less memory steps are recorded: parts of the allocator's pages, of 20 MiB each, are a larger share there
than a plan from shapes leaves to them."""

FEW_GRADIENTS = 0.005
"""Share of memory that gradients may take unforeseen: those of adapters are not worth another search."""

_OUTSIDE_SHARE = 0.01
"""Share of a step above which the time before its first forward with gradients is said."""

TIMED_STEPS = 2
"""How many steps are timed once a plan that was found on paper runs as any other."""

Value = TypeVar("Value")


class Planner:
    """Finds a plan while a model trains, and keeps it on. Use as a context manager, or call `remove`.

    It is used in place of an `AppliedPlan`. Call `step_ended` after each optimizer step: all forwards between
    two such calls are the micro-batches of one step.

    Args:
        made_for: describes this run for a plan file, given a batch's shape; ``None``: no file is written.
        known: the plan of a file, which is used instead of searching.
        writes_file: whether ``memory.plan_file`` may be written.

    Attributes:
        structure: structure of the model.
        trials: the plans that were tried so far, with what was measured.
        planning_s: seconds that each search took so far.
        task: what was searched last; ``None``: nothing yet.
        outcome: what a step takes with and without the plan, measured or from the file; ``None``: not known.
        logging_context: returns a context in which decisions and the lines at the end of a step are logged.
        progress: called after each step until the plan is found, with the phase and how many steps of it are
            left at most.
    """

    def __init__(
        self,
        run: Run,
        made_for: Callable[[tuple[int, ...]], MadeFor] | None = None,
        known: FilePlan | None = None,
        writes_file: bool = True,
    ) -> None:
        self._run, self._made_for, self._writes_file = run, made_for, writes_file
        self._found: FilePlan | None = known
        self.logging_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.structure: ModelStructure = run.training.structure
        self.trials: list[Trial] = []
        self.planning_s: list[float] = []
        self.task: PlanningTask | None = None
        self.outcome: Outcome | None = None
        self.progress: Callable[[str, int], None] | None = None
        self._in_step = False  # between a forward and the end of the optimizer's step
        self._seen = False  # whether any training forward was seen
        self._steps_unseen = 0  # steps of the optimizer until then
        self._gives_up = False  # the budget is impossible, and within inference mode nothing can be removed
        self._predicted_ms = self._states_ms = 0.0
        self._largest: BatchSize | None = None
        self._planned_for: BatchSize | None = None  # the largest that was planned for on paper
        self._micro_batches = run.training.micro_batches
        self._in_flight = run.in_flight  # on the rank with most
        self._may_find_gradients = False  # whether a forward may meet gradients that the plan does not count
        self._recorded: RecordedStep | None = None
        self._warm_up_peak_bytes: int | None = None
        self._plans = 0  # how many stable plans were given up
        self._beyond_bytes = 0  # what steps took beyond their predictions
        self._times_left = 0  # steps to be timed under a plan from paper
        self._last: MemoryPlan | None = None  # the plan before the one that is looked for
        self._unplanned: Prediction | None = None  # the step as it is without a plan
        self._impossible: list[BudgetError] = []
        self._retry = Retry(
            run.training.model,
            run.idle.device,
            ready=self._can_try_again,
            ran_out=self._ran_out,
            ahead=self._ahead,
            missed=self._missed_budget,
        )
        self._may_tile_ahead = known is None and run.ladder is not None and world_size() > 1
        training = run.training
        self._plans_on_paper = self.memory_mode == "adaptive" and not training.part
        self._may_plan_ahead = self._plans_on_paper and known is None
        self._may_reject = known is None and world_size() == 1 and not self.structure.sharded
        self._undo = ExitStack()
        self._phase: WarmUp | SearchPhase | Stable
        if known is not None:
            self._phase = self._stable_from(known)
            self.outcome = known.outcome
        else:
            self._phase = WarmUp(run, first_steps(run))
        run.watch(self._forward_starts, self._retry.around)

    @property
    def phase(self) -> str:
        """``warm-up``, ``search`` or ``stable``."""
        return self._phase.name

    @property
    def plan(self) -> MemoryPlan:
        """The plan that is on the model; an empty one if none is."""
        if self._run.applied is None:
            return replace(self._run.fixed, rows=())
        return self._run.applied.plan

    @property
    def memory_mode(self) -> str:
        return self._run.name

    @property
    def final_plan(self) -> AppliedPlan | None:
        """The applied plan if it runs as any other: in the stable phase without the guard; else ``None``."""
        return self._run.applied if self.phase == "stable" and not self._run.guarded else None

    def stats(self) -> SwapStats:
        """Return the totals over all plans that the planner has put on the model."""
        return self._run.stats()

    @property
    def evicted_bytes(self) -> int:
        """Bytes that were moved to the host so far because memory ran out."""
        return self._run.idle.evicted_bytes

    @property
    def weights(self) -> FrozenWeights | None:
        """The frozen weights of layers, where they wait on the host."""
        return self._run.weights

    @property
    def optimizer_states(self) -> OptimizerStates | None:
        """The states that ``preference: memory_saving`` keeps on the host, with statistics of their own."""
        return self._run.states

    def outside_compute(self) -> AbstractContextManager[Any]:
        """Return a context whose time belongs to no op of a step that is recorded meanwhile."""
        return self._run.idle.around_copies()

    @property
    def outside_ms(self) -> float:
        """Time of a step before its first forward with gradients, in which the plan has no part."""
        return self._run.outside_ms

    def step_begins(self) -> None:
        """Note where a step begins, if that may be before its first forward with gradients; may be left out.

        Preference trainings compute what a reference says first.
        """
        self._run.step_begins()

    @short_traceback
    def step_ended(self) -> None:
        """End a training step; call it after the optimizer's step, on every rank.

        Raises:
            BudgetError: no plan fits; the error names the least budget that would do. The planner has removed
                itself, because its guard would hold all later work of the process to this budget.
        """
        if not self._in_step:
            self._say_unseen()
            return
        self._in_step = False
        try:
            with self.logging_context():
                self._end_step()
        except BudgetError:
            self.remove()
            raise

    def _say_unseen(self) -> None:
        """Warn, once, if the optimizer has stepped twice before any training forward was seen."""
        self._steps_unseen += 1
        if self._steps_unseen == 2 and not self._seen:
            self._run.log.warning(
                "the optimizer has stepped, and neither the model nor its decoder was called with gradients: "
                "nothing is planned. Call the module that runs the layers."
            )

    def _end_step(self) -> None:
        phase = self._phase
        self._time_step()
        more = not isinstance(phase, Stable) and self._has_more_in_flight()
        if isinstance(phase, WarmUp):
            self._after_warm_up(phase)
        elif isinstance(phase, SearchPhase) and more:
            self._plan_for_more_in_flight(phase)
        elif isinstance(phase, SearchPhase):
            over, before = phase.step_ended(), self._micro_batches
            self._micro_batches = phase.micro_batches
            if before == 1 < self._micro_batches and self._may_find_gradients:
                self._may_plan_ahead = True  # several ranks, which did not look in mid-step
            anew = phase.corrected or self._micro_batches > before
            larger = phase.too_large is not None and self._plans_for_larger(phase, *phase.too_large)
            if not larger and not (anew and self._states_move_now(phase)) and over:
                self._settle(phase)
        elif phase.step_ended():
            missed = phase.missed_by_bytes
            self._beyond_bytes = self._beyond_bytes + missed if missed else 0
            if missed:
                self._recorded = None
            self._start_anew(phase.plan)
        if self.progress is not None and not (phase is self._phase and isinstance(phase, Stable)):
            self.progress(self._phase.name, self._phase.steps_left)

    def _plans_for_larger(self, search: SearchPhase, size: BatchSize, error: BudgetError) -> bool:
        """Let the next forward plan anew for a batch that outgrew a search: in more tiles, if need be.

        Every rank must call it. Once for a size: if nothing fits then, ``error`` is a warning.
        """
        tried = self._planned_for
        # Stages of a pipeline, which do not plan on paper, search one by one: they must not wait here.
        if not self._plans_on_paper or not all(from_all_ranks(tried is None or not tried.covers(size))):
            self._run.log.warning("for a batch of %d tokens, %s", size.tokens, str(error))
            return False
        self._leave(search)
        self._start_anew(search.best.plan)
        return True

    def _has_more_in_flight(self) -> bool:
        """Whether a step runs more forwards ahead of its backward than are planned for, on any rank.

        Every rank must call it; stages of a pipeline, which know how many, need not.
        """
        run, before = self._run, self._in_flight
        if not run.training.part:
            self._in_flight = max(from_all_ranks(run.in_flight))
        return self._in_flight > before

    def _plan_for_more_in_flight(self, search: SearchPhase) -> None:
        said = "a step runs %d forwards ahead of its backward: planning for the activations of all"
        self._run.log.info(said, self._in_flight)
        self._run.meter.let_go()
        self._micro_batches = max(self._micro_batches, int(self._in_flight))
        self._leave(search)
        self._start_anew(self.plan)

    def _start_anew(self, last: MemoryPlan | None) -> None:
        """Look for another plan than ``last``: on paper ahead of the next forward, else in a warm-up."""
        self._last, self._impossible = last, []
        self._plans += isinstance(self._phase, Stable)
        self._phase, self._may_plan_ahead = WarmUp(self._run, 1), self._plans_on_paper

    def _leave(self, search: SearchPhase) -> None:
        self.trials += [trial for trial in (*search.outgrown, *search.trials) if trial.steps]
        self.planning_s += search.planning_s

    def _time_step(self) -> None:
        """Time the first steps under a plan that was found on paper: those under the guard took longer."""
        if isinstance(self._phase, Stable) and self._times_left and self.outcome is not None:
            measured_ms = self._run.measured_here().step_ms
            before, self._times_left = self.outcome, self._times_left - 1
            step_ms = measured_ms if self._times_left == TIMED_STEPS - 1 else min(measured_ms, before.step_ms)
            times = before.without_step_ms / before.step_ms if before.step_ms else 1.0
            self.outcome = replace(before, step_ms=step_ms, without_step_ms=step_ms * times)
            if not self._times_left:
                said, outside_ms = "a step takes %.0f ms%s; %.0f were predicted", self._run.outside_ms
                small = outside_ms < _OUTSIDE_SHARE * step_ms
                before_it = "" if small else f", and {outside_ms:.0f} before its first forward with gradients"
                self._run.log.info(said, step_ms, before_it, self._predicted_ms)

    def micro_batch(self, step: Callable[[], Value]) -> Value:
        """Run forward and backward (``step``, and nothing else) of a micro-batch, again if memory runs out.

        A forward alone is retried anywhere.

        Raises:
            DeviceMemoryError: the micro-batch cannot be run again, and the text says why.
        """
        return self._retry.micro_batch(step)

    def on_remove(self, step: Callable[[], None]) -> None:
        """Let `remove` call ``step`` too; the step that was added last is called first."""
        self._undo.callback(step)

    @uninterrupted()
    def remove(self) -> None:
        """Take everything off the model; not inside ``torch.inference_mode()``. Safe to call again."""
        self._run.check_removable()
        if isinstance(self._phase, WarmUp):
            self._phase.close()
        self._run.close()
        self._undo.close()

    def __repr__(self) -> str:
        left = self._phase.steps_left
        steps = f" ({left} step(s) left at most)" if left else ""
        words = "; ".join(plan_in_words(self.plan, self.structure))
        return f"<Planner {self.memory_mode}, {self.phase}{steps}: {words}>"

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _forward_starts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if not self._in_step:
            self._in_step = self._seen = True
            self._run.step_starts()
            if not isinstance(self._phase, WarmUp):
                self._phase.step_starts()
        shape = batch_shape(args, kwargs)
        size = BatchSize.of(shape, True)
        self._largest = self._largest if size is None else size.joined(self._largest)
        self._phase.forward_starts(shape)

    def _stable_from(self, known: FilePlan) -> Stable:
        run, asked_gib = self._run, self._run.training.memory.budget_gib
        run.replace_plan(known.plan, guarded=False)
        budget = known.plan.device_memory_bytes or run.meter.limit_bytes()
        if asked_gib is not None:
            budget = round(asked_gib * GIB)
        run.log.info("stable: the plan of %s, nothing is searched", known.path)
        return Stable(run, budget, BatchSize.of(known.batch_shape, False), self._plans)

    def _after_warm_up(self, phase: WarmUp) -> None:
        step = phase.step_ended()
        if step is None:
            return
        self._micro_batches = max(from_all_ranks(phase.micro_batches))
        self._recorded = _better_record(step, self._recorded)
        if step is self._recorded and not self._unplanned:
            self._warm_up_peak_bytes = phase.peak_bytes
        if self.progress is not None:  # the search may take seconds
            self.progress(SearchPhase.name, max(self._run.training.memory.search_steps, 1))
        try:
            self._phase = self._begin_search(self._recorded, self._largest)
        except BudgetError as error:
            if self._last is None:
                raise
            self._keep_last_plan_guarded(self._last, error)

    def _begin_search(
        self, step: RecordedStep, largest: BatchSize | None, best: Found | None = None, steps: int = 0
    ) -> SearchPhase | WarmUp:
        """Search from a recorded step, at most ``steps`` (0: ``search_steps``); ``best`` is tried first."""
        run = self._run
        steps = steps or max(run.training.memory.search_steps, 1)
        states_bytes = 0 if run.states is None else run.states.state_bytes
        states_bytes += 0 if run.weights is None else run.weights.host_bytes
        task = agreed_task(
            step,
            run.fixed,
            run.training.memory,
            run.meter.limit_bytes(),
            states_bytes,
            self._beyond_bytes,
            self._last is not None,
            largest,
            self._unplanned,
            self._in_flight,
            RESIDENT if run.training.part else 0.0,
            run.host_bytes,
        )
        if best is not None:  # found with other states or another speed
            best = replace(best, prediction=task.predicted(task.profile, best.plan))
        if run.movable is not None and run.movable.if_faster:
            why, best = weights_pay(task, run.movable.sizes_bytes)
            if why:
                return self._weights_to_host(task.unplanned, why)
        moved, best = self._states_in_passing(task, step, best)
        if moved is not None:
            return self._begin_search(moved, largest, best, steps)
        try:
            return SearchPhase(run, task, steps, best)
        except BudgetError as error:
            if run.movable is not None:
                return self._weights_to_host(task.unplanned)
            self._impossible.append(error)
            rests = fits_outside_backward(task.profile, run.training.memory, task.budget_bytes)
            if rests and (anew := self._more_tiles(task.size, task.unplanned)) is not None:
                return anew
            if largest is None or task.step is None or task.size == task.step.size:
                least = min(self._impossible, key=lambda error: error.least_bytes)
                raise run.with_weights_named(least) from None
            run.log.warning("not for the largest batch so far, which would be guarded: %s", str(error))
            return self._begin_search(step, None, steps=steps)

    def _say(self, text: str, *values: object) -> None:
        with self.logging_context():
            self._run.log.info(text, *values)

    def _states_in_passing(
        self, task: PlanningTask, step: RecordedStep, best: Found | None
    ) -> tuple[RecordedStep | None, Found | None]:
        """Keep the optimizer's states on the host from now on, where its step is predicted to be faster so.

        Every rank must call it. Returns the recorded step without the states (``None``: they stay), and the
        best plan so far; ``best`` is that with them on the device.
        """
        run = self._run
        if run.training.memory.preference != "auto":
            return None, best
        ranks = from_all_ranks((run.make_states is not None, self._micro_batches))
        if not all(may for may, _ in ranks):
            return None, best
        micro_batches = max(count for _, count in ranks)
        found, best = states_in_passing(task, micro_batches, best)
        if found is None:
            return None, best
        said = f"and {found.kept_ms:.0f} ms with them on the device"
        self._say(
            "the optimizer's states wait on the host: a step of %d micro-batch(es) is predicted to take "
            "%.0f ms, %s",
            micro_batches,
            found.ms,
            "and nothing fits with them on the device" if math.isinf(found.kept_ms) else said,
        )
        run.states_to_host(found.resident_bytes)
        self._unplanned, self._states_ms = self._unplanned or task.unplanned, found.ms
        self._recorded = moved = step.without_states(found.resident_bytes)
        return moved, best

    def _states_move_now(self, search: SearchPhase) -> bool:
        """Search anew with the optimizer's states on the host, if that is faster by corrected predictions."""
        assert search.task.step is not None
        moved, best = self._states_in_passing(search.task, search.task.step, None)
        if moved is None:
            return False
        self._leave(search)
        steps = max(search.steps_left, STEPS_PER_TRIAL)
        self._phase = self._begin_search(moved, self._largest, best, steps)
        return True

    def _weights_to_host(
        self, without: Prediction | None, why: str = "nothing fits with them on the device"
    ) -> WarmUp:
        """Keep frozen weights on the host from now on, on all ranks, and return a new warm-up.

        ``without`` as for `_more_tiles`.
        """
        run = self._run
        self._say("frozen weights of the layers wait on the host: %s", why)
        if isinstance(self._phase, WarmUp):
            self._phase.close()
        run.weights_to_host()
        self._unplanned, self._recorded = self._unplanned or without, None
        return WarmUp(run, first_steps(run))

    def _more_room(self, size: BatchSize | None, without: Prediction | None) -> WarmUp | None:
        return (
            self._more_tiles(size, without) if self._run.movable is None else self._weights_to_host(without)
        )

    def _more_tiles(self, size: BatchSize | None, without: Prediction | None) -> WarmUp | None:
        """Run more of the model in tiles, on all ranks, and return a new warm-up; ``None``: nothing more can.

        ``without`` is the step predicted without a plan so far; ``None``: no step has been recorded.
        """
        run = self._run
        if size is None or size.tokens <= AUTO_LEAST_TOKENS:
            return None
        tiled = next((plan for plan in run.ladder or () if len(plan.tiles) > len(run.fixed.tiles)), None)
        if tiled is None:
            return None
        run.log.warning("%s", tiled.adjustments[-1])
        if isinstance(self._phase, WarmUp):
            self._phase.close()
        run.take_off()
        run.tile(replace(tiled, weights=run.fixed.weights))
        self._unplanned, self._recorded = self._unplanned or without, None
        return WarmUp(run, first_steps(run))

    def _ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Choose tiles or a plan ahead of the first forward; return whether anything was put on the model."""
        if self._gives_up:
            self.remove()
            return False
        changed = self._tiles_ahead(args, kwargs)
        if is_dry(args, kwargs):
            return changed
        if self._is_outgrown(args, kwargs):
            self._run.meter.let_go()
            if isinstance(self._phase, SearchPhase):
                self._leave(self._phase)
            self._start_anew(self.plan)
            self._in_step = False  # this forward begins a step of the next plan
        if self._may_plan_ahead:
            self._may_plan_ahead, one = False, self._micro_batches == 1
            self._may_find_gradients = one and not self._seen
            old_bytes = self._gradient_bytes() if one and self._seen else 0
            changed = self._plans_ahead(args, kwargs, old_bytes) or changed
        elif self._may_find_gradients and self._seen and not (self._in_step and world_size() > 1):
            # In mid-step ranks may have different numbers of micro-batches, and cannot search together.
            changed = self._finds_gradients(args, kwargs) or changed
        return changed

    def _is_outgrown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the coming batch is larger than what is planned for, and can be planned for ahead of it.

        Not where something else runs at the time: a forward whose backward is to come, or, within a step,
        other ranks. Ranks agree where a step of the search starts, which has an exchange at its end too; a
        stable step has none. What is not planned for runs under the guard, and the step's end plans anew.
        """
        phase = self._phase
        alone = world_size() == 1 and not self._run.forwards
        together = world_size() > 1 and not self._in_step and isinstance(phase, SearchPhase)
        if isinstance(phase, WarmUp) or not self._plans_on_paper or self._plans >= MOST_PLANS:
            return False
        if not (alone or together):
            return False
        shape, sizes = batch_shape(args, kwargs), (phase.size, self._planned_for)
        return any(from_all_ranks(not any(size is None or size.holds(shape) for size in sizes)))

    def _gradient_bytes(self) -> int:
        """Return the bytes of gradients that are there now, on the rank with most. All ranks must call it."""
        return max(from_all_ranks(gradient_bytes(unwrapped(self._run.training.model))))

    def _finds_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Plan again where gradients are there ahead of a forward; return whether that was done.

        Every rank must call it. In the first step the coming backward adds to them. In the second the loop
        sets them to zero between forward and backward.
        """
        run, accumulates, before = self._run, self._in_step, self.plan
        old_bytes = self._gradient_bytes()
        self._may_find_gradients = accumulates and not old_bytes
        if accumulates and old_bytes:
            self._in_flight = max(self._in_flight, run.in_flight)
            self._micro_batches = int(self._in_flight) + 1  # or more: the step's end shows it
        if old_bytes <= FEW_GRADIENTS * run.limit_bytes:
            return False
        if accumulates:
            run.meter.let_go()
        else:
            said = "gradients of the last step (%s) are there in forward; zero_grad() ahead of it frees them"
            self._say(said, gib_text(old_bytes))
        planned = self._plans_ahead(args, kwargs, 0 if accumulates else old_bytes)
        if isinstance(self._phase, WarmUp):
            self._last = self._last or before  # where nothing fits, it stays on under the guard
        elif accumulates:
            run.step_starts()
            self._phase.step_starts()
        return planned

    def _plans_ahead(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], old_gradient_bytes: int = 0
    ) -> bool:
        """Begin the search from a step computed from shapes; return whether that did.

        Every rank must call it. What the first steps measure corrects it (`SearchPhase`). If nothing fits on
        paper, more of the model runs in tiles; if nothing fits then, steps are recorded, which may need less.
        ``old_gradient_bytes`` are there in forward, and gone before backward.
        """
        run, phase = self._run, self._phase
        on_paper = run.profile_on_paper if run.limit_bytes >= LEAST_ON_PAPER_BYTES else None
        if not all(from_all_ranks(on_paper is not None)) or on_paper is None:
            return False
        if self.progress is not None:  # it takes seconds
            self.progress(SearchPhase.name, max(run.training.memory.search_steps, 1))
        others = int(self._in_flight) - 1
        profile = on_paper(args, kwargs, self._micro_batches > self._in_flight, others)
        if not all(from_all_ranks(profile is not None)) or profile is None:
            return False
        profile = without_others(profile, others)
        root, structure = unwrapped(run.training.model), run.training.structure
        streamed = {} if run.weights is None else run.weights.sizes_bytes
        in_use, own = run.meter.allocated_bytes(), baseline_tensors(root, run.training.optimizer)
        on_device = in_use + max(profile.optimizer_state_bytes - run.state_bytes(), 0)
        # DDP's buckets, another model, tensors of the user. Ranks plan for the one that has most.
        beside = from_all_ranks(others_bytes(in_use, (*own, *tree_leaves((args, kwargs)))))
        profile = beside_old_gradients(beside_others(profile, max(beside)), old_gradient_bytes)
        profile = replace(profile, link=run.transfer.link(), device=run.device_name)
        step = RecordedStep(profile, module_weights(root, structure), on_device, streamed)
        if isinstance(phase, WarmUp):
            phase.close()
        size, fixed = BatchSize.of(profile.batch_shape, True), run.fixed
        self._planned_for = None if size is None else size.joined(self._largest)
        try:
            self._phase = self._begin_search(step, self._planned_for)
        except BudgetError as error:
            run.log.debug("no plan on paper: %s", str(error))
            self._impossible = []
            self._phase = WarmUp(run, first_steps(run))
        if run.fixed is not fixed:  # in more tiles, or without the weights, a step is computed anew
            self._plans_ahead(args, kwargs, old_gradient_bytes)
        return True

    def _tiles_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Choose tiles ahead of the first forward if no plan fits some rank; return whether any were chosen.

        Only with several ranks, which all must call it: one that runs out of memory in warm-up cannot choose
        tiles alone.

        Raises:
            BudgetError: weights, gradients and states alone exceed the budget (the only rank's).
        """
        if self._may_reject and not is_dry(args, kwargs):
            self._may_reject = False
            error = self._run.budget_error(self._run.resting_bytes(), args, kwargs)
            if error is not None:
                if self._run.movable is None:
                    self.remove()
                    raise error
                self._phase = self._weights_to_host(None)
                return True
        if not self._may_tile_ahead or is_dry(args, kwargs):
            return False
        self._may_tile_ahead, before = False, self._phase
        sizes = from_all_ranks(BatchSize.of(batch_shape(args, kwargs), False))
        size = max((size for size in sizes if size is not None), default=None)

        def fits() -> bool:
            least_bytes = self._run.least_bytes(args, kwargs)
            return all(from_all_ranks(least_bytes is None or least_bytes <= self._run.meter.limit_bytes()))

        while size is not None and size.tokens > AUTO_LEAST_TOKENS and not fits():
            if (anew := self._more_tiles(size, None)) is None:
                break
            self._phase = anew
        return self._phase is not before

    def _keep_last_plan_guarded(self, plan: MemoryPlan, error: BudgetError) -> None:
        run = self._run
        run.log.warning("the plan before stays on, under the guard, which costs time: %s", str(error))
        run.replace_plan(plan, guarded=True)
        self._phase = Stable(run, run.meter.limit_bytes(), self._largest, MOST_PLANS, stays_guarded=True)

    def _can_try_again(self) -> str:
        """Return the phase if it allows a retry, else ``""``."""
        on_paper = isinstance(self._phase, SearchPhase) and self._plans_on_paper and world_size() == 1
        if isinstance(self._phase, WarmUp) or on_paper:
            if self._run.movable is not None:
                return self.phase
            known, may_tile = self._largest, self._run.training.memory.mode == "adaptive"
            return self.phase if may_tile and (known is None or known.tokens > AUTO_LEAST_TOKENS) else ""
        return self.phase if isinstance(self._phase, Stable) and not self._run.guarded else ""

    def _ran_out(self, failure: Failure) -> None:
        search = self._phase if isinstance(self._phase, SearchPhase) else None
        if isinstance(self._phase, Stable):
            self._phase.ran_out(failure)
        elif (anew := self._more_room(self._largest, search.task.unplanned if search else None)) is not None:
            if search is not None:  # a batch larger than the one that was planned for
                self._run.meter.let_go()
                self._leave(search)
                self._may_plan_ahead = True
            self._phase, self._in_step = anew, False
        else:
            raise DeviceMemoryError(failure.text)

    def _missed_budget(self) -> BudgetError | None:
        """Remove the planner if a first step ran out of the budget itself, as on a CPU; return the error.

        Within ``torch.inference_mode()`` it only lets the process have its memory, and is removed when the
        next training forward starts.
        """
        run, asked_gib = self._run, self._run.training.memory.budget_gib
        later = not isinstance(self._phase, WarmUp) or self._last is not None
        if later or asked_gib is None or run.meter.limit_bytes() > round(asked_gib * GIB):
            return None
        if run.is_removable:
            self.remove()
        else:
            run.meter.lift()
            self._gives_up = True
        return run.budget_error(run.guard.least_budget_bytes)

    def _settle(self, search: SearchPhase) -> None:
        run, best = self._run, search.best
        self._leave(search)
        self.task = task = search.task
        budget = task.reservable_bytes
        fits = best.fits(budget)
        if not fits:
            if (anew := self._more_room(task.size, task.unplanned)) is not None:
                self._phase = anew
                return
            run.log.warning(
                "no plan that was tried stays within %s; the one that needs least stays on, under the "
                "guard, which costs time",
                gib_text(budget),
            )
        # What the allocator holds after one step lies otherwise in the next.
        guarded = not fits or len(best.steps) < STEPS_PER_TRIAL
        if best is search.trials[-1] and run.applied is not None:
            run.set_guard(guarded)  # it is on the model, and its memory is there
        else:
            run.replace_plan(best.plan, guarded)
        micro_batches = best.steps[-1].micro_batches
        self._predicted_ms = self._states_ms or whole_step(task.profile, best.prediction, micro_batches).ms
        self.outcome = self._outcome(search)
        self._beyond_bytes = task.unpredicted_bytes
        self._phase = Stable(run, budget, task.size, self._plans, not fits)
        on_paper = task.profile.source == "shapes"
        run.log.info("stable: %s", _in_words(best, timed=not on_paper))
        self._times_left = TIMED_STEPS if on_paper else 0
        self._found = None
        if fits and self._made_for is not None:
            made_for = self._made_for(task.profile.batch_shape)
            resident = None if run.states is None else run.states.resident_bytes
            numbers = _numbers(best, budget, self.outcome) | {"states_resident_bytes": resident}
            self._found = FilePlan(best.plan, made_for, numbers)
        if (plan_file := run.training.memory.plan_file) is not None and self._writes_file:
            self.write_plan(plan_file)

    def write_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plan that was found as a plan file, on rank 0; if there is none yet, nothing happens.

        A file that cannot be written is a warning.
        """
        found = self._found
        if rank() != 0 or found is None or found.made_for is None or self.phase != Stable.name:
            return
        try:
            model = unwrapped(self._run.training.model)
            write_plan(path, found.plan, model, found.made_for, found.numbers)
        except OSError as error:
            said = "the plan is on, but cannot be written to %s (%s)"
            self._run.log.warning(said, os.fspath(path), error.strerror)

    def _outcome(self, search: SearchPhase) -> Outcome:
        task, best, fixed = search.task, search.best, self._run.fixed
        nothing = MemoryPlan((), task.profile.num_layers, task.profile.family)
        without = self._unplanned or task.predicted(task.profile, nothing)
        on_paper = task.profile.source == "shapes"
        peak_bytes = without.peak_bytes
        source = "predicted from shapes" if on_paper else "predicted from the recorded step"
        recorded = task.step is not None and task.step.size == task.size and task.in_flight == 1
        if self._warm_up_peak_bytes is not None and recorded:
            peak_bytes, source = self._warm_up_peak_bytes, "measured in warm-up"
        if fixed.tiles and self._unplanned is None:
            source += ", in tiles"  # no step without them was recorded
        used_bytes = max(step.peak_bytes for step in best.steps)
        # Measured, whatever the batches' lengths: nothing was planned.
        if not best.plan.rows and not fixed.tiles and self._unplanned is None:
            said = source if source.startswith("measured") else "measured"
            return Outcome(used_bytes, best.step_ms, used_bytes, best.step_ms, said, "measured")
        kept_everything = (trial for trial in search.trials if trial.plan.rows == fixed.rows)
        keeping = [trial.step_ms for trial in kept_everything if trial.steps]
        if keeping and self._unplanned is None:
            return Outcome(used_bytes, best.step_ms, peak_bytes, min(keeping), source, "measured")
        # Recorded and guarded steps take longer than others, so only the ratio of predicted times is used.
        without_ms = whole_step(task.profile, without, best.steps[-1].micro_batches).ms
        times = without_ms / self._predicted_ms if self._predicted_ms else 1.0  # 0: the clock stood still
        return Outcome(used_bytes, best.step_ms, peak_bytes, best.step_ms * times, source)


def _better_record(step: RecordedStep, before: RecordedStep | None) -> RecordedStep:
    """Return the step of the larger batch, since less must be guessed from it; if equal, the later one."""
    if before is None or before.size is None or step.size is None:
        return step
    same = before.profile.optimizer_state_bytes == step.profile.optimizer_state_bytes
    return before if same and before.size.tokens > step.size.tokens else step


def _in_words(trial: Trial, timed: bool) -> str:
    """``timed``: whether the trial's steps took as long as those that follow."""
    predicted = trial.prediction
    return (
        f"{gib_text(predicted.kept_bytes)} kept, {gib_text(predicted.swapped_bytes)} swapped, "
        f"{gib_text(predicted.recomputed_bytes)} recomputed; "
        f"{f'{trial.step_ms:.1f} ms a step, ' if timed else ''}"
        f"{gib_text(trial.reserved_peak_bytes)} at the peak"
    )


def _numbers(trial: Trial, budget_bytes: int, outcome: Outcome) -> Any:
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": outcome.peak_bytes,
        "reserved_peak_bytes": trial.reserved_peak_bytes,
        "step_ms": trial.step_ms,
        "predicted_peak_bytes": trial.prediction.peak_bytes,
        "predicted_step_ms": trial.prediction.step_ms,
        "without_plan_peak_bytes": outcome.without_peak_bytes,
        "without_plan_step_ms": outcome.without_step_ms,
    }
