"""The search of a training's planner: plans run two steps each, and the best that was measured is kept.

The plans with the best predictions are tried on the machine, and correct the predictions. A plan runs for two
steps, in which the allocator is held to the budget: so it must give back what it only caches. The
first step prepares (kernels, page-locked memory) and shows whether memory suffices; if not, the plan is given
up. The second is timed. Then the search for the others runs again with what the plan's steps needed beyond
the prediction, and with the time that its ops took. If nothing fits then, the plan of the least peak is
tried. The best measured plan is kept: the fastest of those that stayed within the budget while nothing had to
be evicted.

No prediction knows the time of the host. Where a step waits for it, as in a mixture of many small experts, to
run single ops again costs more than on paper. So a plan that takes longer than it would by recomputing whole
layers, which is the cheapest for the host, is compared with that.

Where batches differ in size, a step's time is scaled, by tokens, to the planned size, and its memory is
compared with the prediction for its own size. If a batch is larger, the planner plans for that batch from
then on, and earlier trials count no longer.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import reduce

from ...config.sizes import gib_text
from ...engine.agreement import from_all_ranks, world_size
from ..budget import BudgetError, fragments_of
from ..plan_file import MeasuredStep, Trial, best_trial
from ..planning import PlanningTask, best_plans, least_plan, whole_layers
from ..recorded_step import BatchSize
from ..run import Run
from ..search.compiled_frontier import learned, shown_by
from ..search.find_plan import Found
from ..search.states_place import whole_step

STEPS_PER_TRIAL = 2

SPEED_ERROR = 0.05
"""Ops of a trial must take less time than predicted by more than this share to be predicted anew."""


class SearchPhase:
    """Tries the plans with the best predictions, two steps each, and keeps the best that was measured.

    ``first`` is the best plan by prediction, where it is known already; the search takes ``steps`` at most.

    Attributes:
        trials: the plans tried so far for the largest batch.
        outgrown: the plans tried before a larger batch came.
        planning_s: seconds that each search by prediction took.
        corrected: whether the last step has corrected the predictions.
        too_large: the size of the last step's batch, and why no plan fits it; ``None``: one does.
        micro_batches: how many the last step had, on the rank with most.

    Raises:
        BudgetError: no plan fits by prediction.
    """

    name = "search"

    def __init__(self, run: Run, task: PlanningTask, steps: int, first: Found | None = None) -> None:
        self._run, self.task, self._steps_left = run, task, steps
        self.trials: list[Trial] = []
        self.outgrown: list[Trial] = []
        self.planning_s: list[float] = []
        self.corrected, self.micro_batches = False, 1
        self.too_large: tuple[BatchSize, BudgetError] | None = None
        self._sizes: list[BatchSize] = []
        self._trial_sizes: set[BatchSize] = set()
        self._on_paper = task.profile.source == "shapes"
        self._waiting = self._planned(first)
        run.log.info(
            "search (%d steps at most, budget %s; without a plan %s)",
            steps,
            gib_text(task.budget_bytes),
            gib_text(task.unplanned.peak_bytes),
        )
        self._next()

    @property
    def steps_left(self) -> int:
        return max(self._steps_left, 0)

    @property
    def size(self) -> BatchSize | None:
        """The largest batch that is planned for; ``None``: not known."""
        return self.task.size

    @property
    def best(self) -> Trial:
        return best_trial(self.trials, self.task.reservable_bytes) or self.trials[0]

    def step_starts(self) -> None:
        """Hold the allocator to the budget, so that what it holds at the peak is what the plan needs.

        Not in a group: collectives and FSDP's gathering of weights ask the allocator past the guard.
        """
        if world_size() == 1:
            self._run.meter.hold_to(self.task.reservable_bytes)

    def forward_starts(self, shape: tuple[int, ...]) -> None:
        planned = self.task.size
        size = None if planned is None else BatchSize.of(shape, planned.pairs > 0)
        if size is not None:
            self._sizes.append(size)

    def step_ended(self) -> bool:
        """Take the step's measurement; return whether the search is over. Every rank must call it."""
        trial, self.corrected, self.too_large = self.trials[-1], False, None
        self._run.meter.let_go()
        measured, largest = self._measured()
        trial.steps.append(measured)
        self.micro_batches = measured.micro_batches
        self._steps_left -= 1
        fits = trial.fits(self.task.reservable_bytes)
        if largest is not None and self.task.size is not None and not self.task.size.covers(largest):
            self._say(trial, fits)
            if self._grows(largest):
                return False
        elif fits and len(trial.steps) < STEPS_PER_TRIAL and self._steps_left:
            return False
        else:
            self._say(trial, fits)
        if fits and (trial.plan.rows == self.task.fixed.rows or self._on_paper):
            # It costs nothing, or it is as good as the search on paper can find.
            return not self._tries_whole_layers(trial)
        if self._steps_left <= 0 or not self._learn(trial, fits):
            return True
        self._next()
        return False

    def _measured(self) -> tuple[MeasuredStep, BatchSize | None]:
        """Return the measured step, its time scaled to the planned size, and all ranks' largest batch."""
        sizes, self._sizes = self._sizes, []
        here = self._run.measured_here()
        if world_size() > 1:  # the allocator was not held (`step_starts`), and keeps what it could give back
            most_bytes = here.peak_bytes + fragments_of(self.task.reservable_bytes)
            here = replace(here, reserved_peak_bytes=min(here.reserved_peak_bytes, most_bytes))
        steps = from_all_ranks((here, sizes))
        most = max(len(sizes) for _, sizes in steps)
        measured = replace(MeasuredStep.worst([step for step, _ in steps]), micro_batches=max(most, 1))
        known = [size for _, sizes in steps for size in sizes]
        if not known or self.task.size is None:
            return measured, None
        largest = reduce(BatchSize.joined, known)
        self._trial_sizes.add(largest)
        tokens = max(sum(size.tokens for size in sizes) for _, sizes in steps)
        planned_tokens = self.task.size.tokens * most

        def scaled_ms(ms: float) -> float:
            outside_ms = min(self.task.profile.outside_ms, ms)
            return outside_ms + (ms - outside_ms) * planned_tokens / tokens

        if tokens != planned_tokens:
            step_ms, work_ms = scaled_ms(measured.step_ms), scaled_ms(measured.work_ms)
            measured = replace(measured, step_ms=step_ms, work_ms=work_ms)
        return measured, largest

    def _grows(self, size: BatchSize) -> bool:
        before, planned = self.task, self._waiting
        self.task = before.grown(size)
        self._run.log.info(
            "a batch of %d tokens, and the trials are for %d: planning for the larger one",
            size.tokens,
            before.size.tokens if before.size is not None else 0,
        )
        try:
            self._waiting = self._planned()
        except BudgetError as error:
            self.too_large = size, error
            self.task, self._waiting = before, planned
            return False
        self.outgrown += self.trials
        self.trials = []
        self._steps_left = max(self._steps_left, STEPS_PER_TRIAL)
        self._next()
        return True

    def _next(self) -> None:
        found = self._waiting.pop(0)
        self.trials.append(Trial(found.plan, found.prediction, []))
        self._trial_sizes = set()
        self._run.replace_plan(found.plan, guarded=True)

    def _learn(self, trial: Trial, fits: bool) -> bool:
        before, task, predicted = self.task, self.task, trial.prediction
        if not self._trial_sizes <= {task.size}:
            predicted = task.predicted(task.at(reduce(BatchSize.joined, self._trial_sizes)), trial.plan)
        elif (profile := learned(task.profile, trial.plan, shown_by(trial))) is not task.profile:
            task, predicted = replace(task, profile=profile), task.predicted(profile, trial.plan)
        elif (factor := self._time_of_ops(trial)) < 1 - SPEED_ERROR:
            self._run.log.debug("ops take %.2f times as long as they were recorded", factor)
            task = task.slower(factor)
        beyond = max(_needed_bytes(step, fits) for step in trial.steps) - predicted.peak_bytes
        if not fits or task is not before or beyond > task.beyond_bytes:
            self.task = replace(task, unpredicted_bytes=max(beyond, task.unpredicted_bytes))
            self.corrected = True
            try:
                found = self._planned()
            except BudgetError as error:
                self._run.log.warning("with what the last trial used, %s", str(error))
                found = [least_plan(self.task), *self._waiting]
            tried = [trial.plan.rows for trial in self.trials]
            self._waiting = [item for item in found if item.plan.rows not in tried]
        return bool(self._waiting)

    def _tries_whole_layers(self, trial: Trial) -> bool:
        """Begin the trial of recomputing whole layers, if that should be faster than ``trial`` was."""
        if len(trial.steps) < STEPS_PER_TRIAL or self._run.training.part:  # a stage waits for others too
            return False
        whole = whole_layers(self.task)
        if whole is None or whole.plan.rows in {one.plan.rows for one in self.trials}:
            return False
        last = trial.steps[-1]
        least_ms = whole_step(self.task.profile, whole.prediction, last.micro_batches).ms
        if last.step_ms <= (1 + SPEED_ERROR) * least_ms:
            return False
        self._run.log.info("a step waits for the host; whole layers, recomputed, may be faster and are tried")
        self._waiting, self._steps_left = [whole], max(self._steps_left, STEPS_PER_TRIAL)
        self._next()
        return True

    def _time_of_ops(self, trial: Trial) -> float:
        """Return the time of a trial's ops as a multiple of the predicted time; 1: it is not known.

        Where it is less, the recorded step was too long: to record takes time on the host, and after an
        eviction the device waits for the host. Copies seem to be hidden behind this time. Where it is more,
        the trial was disturbed, or the host is slower under its plan: that says nothing about the ops.
        """
        task, measured, predicted = self.task, trial.steps[-1], trial.prediction
        streamed = task.step is not None and bool(task.step.streamed_bytes)  # ops contain waits for weights
        if len(trial.steps) < STEPS_PER_TRIAL or measured.evicted_bytes or task.in_flight > 1 or streamed:
            return 1.0
        if not predicted.compute_ms or not measured.work_ms:
            return 1.0
        again = 1 + predicted.recompute_ms / predicted.compute_ms  # it may be predicted at another speed
        expected_ms = measured.micro_batches * again * task.profile.compute_ms + task.profile.outside_ms
        return measured.work_ms / expected_ms

    def _planned(self, first: Found | None = None) -> list[Found]:
        started = time.perf_counter()
        try:
            count = 1 if self._on_paper else max(self._steps_left // STEPS_PER_TRIAL, 1)
            found = list(best_plans(self.task, count, first))
        finally:
            self.planning_s.append(time.perf_counter() - started)
        self._run.log.debug("%d plan(s) worth a trial, found in %.2f s", len(found), self.planning_s[-1])
        return found

    def _say(self, trial: Trial, fits: bool) -> None:
        predicted = trial.prediction
        self._run.log.debug(
            "trial %d: %s at the peak, %.1f ms a step (on paper %s, %.1f ms); %s",
            len(self.trials),
            gib_text(trial.reserved_peak_bytes),
            trial.step_ms,
            gib_text(predicted.peak_bytes),
            predicted.step_ms,
            "fits" if fits else "does not fit",
        )


def _needed_bytes(step: MeasuredStep, fits: bool) -> int:
    # Where memory sufficed, the allocator was not asked to give back what it holds beyond what is in use.
    return step.peak_bytes if fits else step.reserved_peak_bytes + step.missing_bytes
