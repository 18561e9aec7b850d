"""The planner of a training, which goes through three phases: warm-up, search, stable.

======== ============================================ =================================================
phase    what is on the model                         ends
======== ============================================ =================================================
warm-up  evictable tickets, the guard; the last step  after ``warmup_steps`` steps, at least 3 where
         is recorded                                  layers are compiled
search   one plan after another, the guard            after ``search_steps`` steps, or when nothing that
                                                      is untried could be faster
stable   the best measured plan, or the one of a      when a batch is larger than any before, or a step
         shorter batch's bucket                       misses the budget or runs out of memory: then
                                                      warm-up begins again, a limited number of times
======== ============================================ =================================================

Phases change between steps only. Inside a step nothing depends on a clock or on free memory, except the
guard, which moves tensors and changes no number.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ..engine.agreement import from_all_ranks, rank, world_size
from ..engine.install import AppliedPlan
from ..engine.stats import GIB, SwapStats, gib_text
from ..engine.tiled_calls import AUTO_LEAST_TOKENS
from ..errors import short_traceback
from ..interrupts import uninterrupted
from ..plan.actions import MemoryPlan
from ..plan.dry_run import is_dry
from ..plan.in_words import plan_in_words
from ..plan.model_structure import ModelStructure, unwrapped
from .bucket_plans import BucketPlans, ShapeBucket
from .budget import BudgetError, fits_outside_backward
from .plan_file import FilePlan, MadeFor, write_plan
from .planning import PlanningTask, agreed_task
from .profile import Prediction
from .record.recorder import batch_shape
from .rescue.out_of_memory import Failure
from .retry import Retry
from .run import Run
from .search_phase import SearchPhase
from .shape_buckets import BatchSize, RecordedStep
from .stable import MOST_PLANS, Stable
from .states.optimizer_states import OptimizerStates
from .trials import Outcome, Trial
from .warm_up import WarmUp, first_steps

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Planner:
    """Finds a plan while a model trains, and keeps it on. Use as a context manager, or call `remove`.

    It is used in place of an `AppliedPlan`. Call `step_ended` after each optimizer step: all forwards
    between two such calls are the micro-batches of one step.

    Args:
        run: the training.
        made_for: describes this run for a plan file, given a batch's shape; ``None``: no file is written.
        known: the plan of a file, which is used instead of searching.
        writes_file: whether ``memory.plan_file`` may be written.

    Attributes:
        structure: structure of the model.
        trials: the plans that were tried so far, with what was measured.
        planning_s: seconds that each search took so far.
        task: what was searched last; ``None``: nothing yet.
        outcome: what a step takes with and without the plan, measured or from the file; ``None``: not known.
        logging_context: returns a context in which the lines at the end of a step are logged.
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
        self._in_step = False
        self._largest: BatchSize | None = None
        self._recorded: RecordedStep | None = None
        self._warm_up_peak_bytes: int | None = None
        self._plans = self._beyond_bytes = 0
        self._last: MemoryPlan | None = None
        self._without_tiles: Prediction | None = None
        self._impossible: list[BudgetError] = []
        self._retry = Retry(
            run.training.model,
            run.idle.device,
            self._can_try_again,
            self._ran_out,
            self._tiles_ahead,
            self._missed_budget,
        )
        self._may_tile_ahead = known is None and run.ladder is not None and world_size() > 1
        self._may_reject = known is None and world_size() == 1 and not self.structure.sharded
        self._undo: list[Callable[[], None]] = []
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
            tiles = self._run.fixed.tiles
            return MemoryPlan((), len(self.structure.layers), self.structure.family, tiles=tiles)
        return self._run.applied.plan

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Buckets of the batch sizes that the stable phase has met, the largest first, with their plans.

        Empty in other phases, and where one plan serves all: it was read from a file, or stays guarded.
        """
        smaller = self._phase.smaller if isinstance(self._phase, Stable) else None
        return () if smaller is None else smaller.buckets

    @property
    def memory_mode(self) -> str:
        """``smart_swap`` or ``adaptive``."""
        return self._run.name

    @property
    def final_plan(self) -> AppliedPlan | None:
        """The applied plan if it runs as any other: in the stable phase without the guard; else ``None``."""
        return self._run.applied if self.phase == "stable" and not self._run.guarded else None

    def stats(self) -> SwapStats:
        """Return the totals since the planner began, over all plans that it put on the model."""
        return self._run.stats()

    @property
    def evicted_bytes(self) -> int:
        """Bytes that were moved to the host so far because memory ran out."""
        return self._run.idle.evicted_bytes

    @property
    def optimizer_states(self) -> OptimizerStates | None:
        """The states that ``preference: memory_saving`` keeps on the host, with statistics of their own."""
        return self._run.states

    @short_traceback
    def step_ended(self) -> None:
        """End a training step; call it after the optimizer's step, on every rank.

        Raises:
            BudgetError: no plan fits the budget; the error names the least one that would do. The planner has
                removed itself, because its guard would hold all later work of the process to this budget.
        """
        if not self._in_step:
            return
        self._in_step = False
        try:
            with self.logging_context():
                self._end_step()
        except BudgetError:
            self.remove()
            raise

    def _end_step(self) -> None:
        phase = self._phase
        if isinstance(phase, WarmUp):
            self._after_warm_up(phase)
        elif isinstance(phase, SearchPhase):
            if phase.step_ended():
                self._settle(phase)
        elif phase.step_ended():
            missed = phase.missed_by_bytes
            self._beyond_bytes = self._beyond_bytes + missed if missed else 0
            self._last = phase.plan
            if missed:
                self._recorded = None
            if phase.smaller is not None:
                self.planning_s += phase.smaller.planning_s
            self._impossible = []
            self._phase = WarmUp(self._run, 1)
        if self.progress is not None and not (phase is self._phase and isinstance(phase, Stable)):
            now = self._phase
            self.progress(now.name, 0 if isinstance(now, Stable) else now.steps_left)

    def micro_batch(self, step: Callable[[], Value]) -> Value:
        """Run forward and backward of a micro-batch, once more if they run out of memory (module `retry`).

        A forward is retried wherever it is called; a backward only in here.

        Args:
            step: runs both, and nothing else that must not happen twice.

        Raises:
            torch.OutOfMemoryError: the micro-batch cannot be run again, and the text says why.
        """
        return self._retry.micro_batch(step)

    def on_remove(self, step: Callable[[], None]) -> None:
        """Let `remove` call ``step`` too; the step that was added last is called first."""
        self._undo.append(step)

    @uninterrupted()
    def remove(self) -> None:
        """Take everything off the model. Safe to call again."""
        if isinstance(self._phase, WarmUp):
            self._phase.close()
        self._run.close()
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()

    def __repr__(self) -> str:
        left = 0 if isinstance(self._phase, Stable) else self._phase.steps_left
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
            self._in_step = True
            self._run.step_starts()
            if isinstance(self._phase, Stable):
                self._phase.step_starts()
        shape = batch_shape(args, kwargs)
        size = BatchSize.of(shape, True)
        self._largest = self._largest if size is None else size.joined(self._largest)
        self._phase.forward_starts(shape)

    def _stable_from(self, known: FilePlan) -> Stable:
        run = self._run
        run.replace_plans(known.plan, guarded=False)
        asked_gib, budget = run.training.memory.budget_gib, known.budget_bytes or run.meter.limit_bytes()
        if asked_gib is not None:
            budget = round(asked_gib * GIB)
        logger.info("%s: stable: the plan of %s, nothing is searched", run.name, known.path)
        size = BatchSize.of(known.batch_shape, False)
        return Stable(run, budget, size, self._plans)

    def _after_warm_up(self, phase: WarmUp) -> None:
        step = phase.step_ended()
        if step is None:
            return
        own, step = step, _better_record(step, self._recorded)
        self._recorded = step
        if step is own:
            self._warm_up_peak_bytes = self._warm_up_peak_bytes if self._without_tiles else phase.peak_bytes
        self._plans += 1
        if self.progress is not None:  # the search may take seconds
            self.progress(SearchPhase.name, max(self._run.training.memory.search_steps, 1))
        try:
            self._phase = self._begin_search(step, self._largest)
        except BudgetError as error:
            if self._last is None:
                raise
            self._keep_last_plan_guarded(self._last, error)

    def _begin_search(self, step: RecordedStep, largest: BatchSize | None) -> SearchPhase | WarmUp:
        """Begin to search for the largest batch; if nothing fits, for more tiles or the recorded batch."""
        run, again = self._run, self._last is not None
        states_bytes = 0 if run.states is None else run.states.state_bytes
        device_bytes, unpredicted_bytes = run.meter.limit_bytes(), self._beyond_bytes
        without = self._without_tiles
        task = agreed_task(
            step,
            run.fixed,
            run.training.memory,
            device_bytes,
            states_bytes,
            unpredicted_bytes,
            again,
            largest,
            without,
            run.training.in_flight,
        )
        try:
            return SearchPhase(run, task, max(run.training.memory.search_steps, 1))
        except BudgetError as error:
            self._impossible.append(error)
            rests = fits_outside_backward(task.profile, run.training.memory, task.budget_bytes)
            if rests and (anew := self._more_tiles(task.size, task.unplanned)) is not None:
                return anew
            if largest is None or task.step is None or task.size == task.step.size:
                raise min(self._impossible, key=lambda error: error.least_bytes) from None
            logger.warning(
                "%s: not for the largest batch so far, which would be guarded: %s", run.name, error
            )
            return self._begin_search(step, None)

    def _more_tiles(self, size: BatchSize | None, without: Prediction | None) -> WarmUp | None:
        """Run more of the model in tiles, on all ranks, and return a new warm-up; ``None``: nothing more can.

        Args:
            size: size of the largest batch.
            without: the step predicted without a plan so far; ``None``: no step has been recorded.
        """
        run = self._run
        if size is None or size.tokens <= AUTO_LEAST_TOKENS:
            return None
        tiled = next((plan for plan in run.ladder or () if len(plan.tiles) > len(run.fixed.tiles)), None)
        if tiled is None:
            return None
        logger.warning("%s: %s", run.name, tiled.adjustments[-1])
        if isinstance(self._phase, WarmUp):
            self._phase.close()
        run.take_off()
        run.tile(tiled)
        self._without_tiles, self._recorded = self._without_tiles or without, None
        return WarmUp(run, first_steps(run))

    def _tiles_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Choose tiles ahead of the first forward if no plan fits some rank; return whether any were chosen.

        Only with several ranks: one that runs out of memory later, in warm-up, cannot choose tiles alone.
        Every rank must call it.

        Raises:
            BudgetError: weights, gradients and states alone exceed the budget (the only rank's).
        """
        if self._may_reject and not is_dry(args, kwargs):
            self._may_reject = False
            error = self._run.budget_error(self._run.resting_bytes(), args, kwargs)
            if error is not None:
                self.remove()
                raise error
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
        """Keep the earlier plan under the guard: nothing fits any more, but a running training goes on."""
        run = self._run
        logger.warning("%s: the plan before stays on, under the guard, which costs time: %s", run.name, error)
        run.replace_plans(plan, guarded=True)
        self._phase = Stable(run, run.meter.limit_bytes(), self._largest, MOST_PLANS, stays_guarded=True)

    def _can_try_again(self) -> str:
        """Return the phase if it allows a retry, else ``""``. `Retry` itself excludes tiles on many ranks."""
        if isinstance(self._phase, WarmUp):
            known, may_tile = self._largest, self._run.training.memory.mode == "adaptive"
            return self.phase if may_tile and (known is None or known.tokens > AUTO_LEAST_TOKENS) else ""
        return self.phase if isinstance(self._phase, Stable) and not self._run.guarded else ""

    def _ran_out(self, failure: Failure) -> None:
        if isinstance(self._phase, Stable):
            self._phase.ran_out(failure)
        elif (anew := self._more_tiles(self._largest, None)) is not None:
            self._phase, self._in_step = anew, False
        else:
            raise failure.kind(failure.text)

    def _missed_budget(self) -> BudgetError | None:
        """Return the error of a first step that ran out of the budget itself, as on a CPU; else ``None``.

        The planner has then removed itself.
        """
        run, asked_gib = self._run, self._run.training.memory.budget_gib
        if not isinstance(self._phase, WarmUp) or self._last is not None or asked_gib is None:
            return None
        if run.meter.limit_bytes() > round(asked_gib * GIB):
            return None
        self.remove()
        return run.budget_error(run.guard.least_budget_bytes)

    def _settle(self, search: SearchPhase) -> None:
        run, best = self._run, search.best
        self.trials += [*search.outgrown, *search.trials]
        self.task = search.task
        self.planning_s += search.planning_s
        budget = search.task.budget_bytes
        fits = best.fits(budget)
        if not fits and (anew := self._more_tiles(search.task.size, search.task.unplanned)) is not None:
            self._phase = anew
            return
        if not fits:
            logger.warning(
                "%s: no plan that was tried stays within %s; the one that needs least stays on, under the "
                "guard, which costs time",
                run.name,
                gib_text(budget),
            )
        run.replace_plans(best.plan, guarded=not fits)
        task = search.task
        kept_everything = [trial for trial in search.trials if trial.plan.rows == run.fixed.rows]
        self.outcome = self._outcome(task, best, kept_everything)
        self._beyond_bytes = task.unpredicted_bytes
        alone = run.training.in_flight == 1  # else other micro-batches in flight may be larger
        smaller = BucketPlans(run, task, best) if fits and alone and task.size is not None else None
        self._phase = Stable(run, budget, task.size, self._plans, not fits, smaller)
        logger.info("%s: stable: %s", run.name, _in_words(best))
        self._found = None
        if fits and self._made_for is not None:
            made_for = self._made_for(task.profile.batch_shape)
            self._found = FilePlan(best.plan, made_for, _numbers(best, budget, self.outcome))
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
            said = "%s: the plan is on, but cannot be written to %s (%s)"
            logger.warning(said, self._run.name, os.fspath(path), error.strerror)

    def _outcome(self, task: PlanningTask, best: Trial, kept_everything: Sequence[Trial]) -> Outcome:
        nothing = MemoryPlan((), task.profile.num_layers, task.profile.family)
        without = self._without_tiles or task.predicted(task.profile, nothing)
        peak_bytes, source = without.peak_bytes, "predicted from the recorded step"
        recorded = task.step is not None and task.step.size == task.size and task.in_flight == 1
        if self._warm_up_peak_bytes is not None and recorded:
            peak_bytes, source = self._warm_up_peak_bytes, "measured in warm-up"
        if self._run.fixed.tiles and self._without_tiles is None:
            source += ", in tiles"  # no step without them was recorded
        used_bytes = max(step.peak_bytes for step in best.steps)
        keeping = [trial.step_ms for trial in kept_everything if trial.steps]
        if keeping and self._without_tiles is None:
            return Outcome(used_bytes, best.step_ms, peak_bytes, min(keeping), source, "measured")
        # Recorded and guarded steps take longer than others, so only the ratio of predicted times is used.
        predicted_ms = best.prediction.step_ms
        times = without.step_ms / predicted_ms if predicted_ms else 1.0  # 0: the clock stood still
        return Outcome(used_bytes, best.step_ms, peak_bytes, best.step_ms * times, source)


def _better_record(step: RecordedStep, before: RecordedStep | None) -> RecordedStep:
    """Return the earlier step if its batch was larger, since less must be guessed from it; else the later."""
    if before is None or before.size is None or step.size is None:
        return step
    same = before.profile.optimizer_state_bytes == step.profile.optimizer_state_bytes
    return before if same and before.size.tokens > step.size.tokens else step


def _in_words(trial: Trial) -> str:
    predicted = trial.prediction
    return (
        f"{gib_text(predicted.kept_bytes)} kept, {gib_text(predicted.swapped_bytes)} swapped, "
        f"{gib_text(predicted.recomputed_bytes)} recomputed; {trial.step_ms:.1f} ms a step, "
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
