"""The search phase: tries the plans with the best predictions on the machine, and corrects the predictions.

A plan runs for two steps. The first prepares (kernels, page-locked memory) and shows whether memory suffices;
if not, the plan is given up. The second is timed. Once a plan has been measured, the search for the others
runs again with what its steps used beyond the prediction. **The best measured plan is kept**: the fastest
of those that stayed within the budget while nothing had to be evicted.

Where batches differ in size, a step's time is scaled, by tokens, to the size that is planned for, and its
memory is compared with the prediction for its own size. If a batch is larger than the planned size, the
planner plans for that batch from then on, and earlier trials count no longer.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import reduce

from ..engine.agreement import from_all_ranks
from ..engine.stats import gib_text
from .budget import BudgetError
from .planning import PlanningTask, best_plans
from .run import Run
from .search.compiled_frontier import learned, shown_by
from .search.find_plan import Found
from .shape_buckets import BatchSize
from .trials import MeasuredStep, Trial, best_trial

logger = logging.getLogger(__name__)

STEPS_PER_TRIAL = 2


class SearchPhase:
    """Tries the plans with the best predictions, two steps each, and keeps the best that was measured.

    Args:
        run: the training.
        task: what is to be planned.
        steps: the most training steps that the search takes.

    Attributes:
        trials: the plans tried so far for the largest batch.
        outgrown: the plans tried before a larger batch came.
        planning_s: seconds that each search by prediction took.

    Raises:
        BudgetError: no plan fits by prediction.
    """

    name = "search"

    def __init__(self, run: Run, task: PlanningTask, steps: int) -> None:
        self._run, self.task, self._steps_left = run, task, steps
        self.trials: list[Trial] = []
        self.outgrown: list[Trial] = []
        self.planning_s: list[float] = []
        self._sizes: list[BatchSize] = []
        self._trial_sizes: set[BatchSize] = set()
        self._waiting = self._planned()
        logger.info(
            "%s: search (%d steps at most, budget %s; without a plan %s)",
            run.name,
            steps,
            gib_text(task.budget_bytes),
            gib_text(task.unplanned.peak_bytes),
        )
        self._next()

    @property
    def steps_left(self) -> int:
        """Steps that are still to come, at most."""
        return max(self._steps_left, 0)

    @property
    def best(self) -> Trial:
        """The best trial that has run; the first trial if none has."""
        return best_trial(self.trials, self.task.budget_bytes) or self.trials[0]

    def forward_starts(self, shape: tuple[int, ...]) -> None:
        """Note the size of a micro-batch of this step."""
        planned = self.task.size
        size = None if planned is None else BatchSize.of(shape, planned.pairs > 0)
        if size is not None:
            self._sizes.append(size)

    def step_ended(self) -> bool:
        """Take the step's measurement; return whether the search is over. Every rank must call it."""
        trial = self.trials[-1]
        measured, largest = self._measured()
        trial.steps.append(measured)
        self._steps_left -= 1
        fits = trial.fits(self.task.budget_bytes)
        if largest is not None and self.task.size is not None and not self.task.size.covers(largest):
            self._say(trial, fits)
            if self._grows(largest):
                return False
        elif fits and len(trial.steps) < STEPS_PER_TRIAL and self._steps_left:
            return False
        else:
            self._say(trial, fits)
        if fits and self._costs_nothing(trial):
            return True  # there is nothing faster
        if self._steps_left <= 0 or not self._learn(trial, fits):
            return True
        self._next()
        return False

    def _measured(self) -> tuple[MeasuredStep, BatchSize | None]:
        """Return the measured step, its time scaled to the planned size, and all ranks' largest batch."""
        sizes, self._sizes = self._sizes, []
        steps = from_all_ranks((self._run.measured_here(), sizes))
        measured = MeasuredStep.worst([step for step, _ in steps])
        known = [size for _, sizes in steps for size in sizes]
        if not known or self.task.size is None:
            return measured, None
        largest = reduce(BatchSize.joined, known)
        self._trial_sizes.add(largest)
        tokens = max(sum(size.tokens for size in sizes) for _, sizes in steps)
        planned_tokens = self.task.size.tokens * max(len(sizes) for _, sizes in steps)
        outside_ms = min(self.task.profile.outside_ms, measured.step_ms)
        step_ms = outside_ms + (measured.step_ms - outside_ms) * planned_tokens / tokens
        if tokens != planned_tokens:
            measured = replace(measured, step_ms=step_ms)
        return measured, largest

    def _grows(self, size: BatchSize) -> bool:
        """Plan for batches of up to ``size``; return whether a plan fits them."""
        before, planned = self.task, self._waiting
        self.task = before.grown(size)
        logger.info(
            "%s: a batch of %d tokens, and the trials are for %d: planning for the larger one",
            self._run.name,
            size.tokens,
            before.size.tokens if before.size is not None else 0,
        )
        try:
            self._waiting = self._planned()
        except BudgetError as error:
            logger.warning("%s: for a batch of %d tokens, %s", self._run.name, size.tokens, error)
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
        self._run.replace_plans(found.plan, guarded=True)

    def _learn(self, trial: Trial, fits: bool) -> bool:
        """Correct predictions by what ``trial`` used; return whether there are more plans to try."""
        task, profile, predicted = self.task, self.task.profile, trial.prediction
        if self._trial_sizes <= {task.size}:
            profile = learned(profile, trial.plan, shown_by(trial))
            if profile is not task.profile:
                predicted = task.predicted(profile, trial.plan)
        else:
            profile_of_trial = task.at(reduce(BatchSize.joined, self._trial_sizes))
            predicted = task.predicted(profile_of_trial, trial.plan)
        used = trial.reserved_peak_bytes + max(step.evicted_bytes for step in trial.steps)
        beyond = used - predicted.peak_bytes
        if (
            not fits
            or profile is not task.profile
            or beyond > max(task.unpredicted_bytes, profile.reserved_bytes)
        ):
            self.task = replace(task, profile=profile, unpredicted_bytes=max(beyond, task.unpredicted_bytes))
            self._search_again()
        return bool(self._waiting)

    def _search_again(self) -> None:
        try:
            found = self._planned()
        except BudgetError as error:
            logger.warning("%s: with what the last trial used, %s", self._run.name, error)
            return
        tried = [trial.plan.rows for trial in self.trials]
        self._waiting = [item for item in found if item.plan.rows not in tried]

    def _planned(self) -> list[Found]:
        started = time.perf_counter()
        try:
            found = list(best_plans(self.task, max(self._steps_left // STEPS_PER_TRIAL, 1)))
        finally:
            self.planning_s.append(time.perf_counter() - started)
        text = "%s: %d plan(s) worth a trial, found in %.2f s"
        logger.debug(text, self._run.name, len(found), self.planning_s[-1])
        return found

    def _costs_nothing(self, trial: Trial) -> bool:
        return trial.plan.rows == self.task.fixed.rows

    def _say(self, trial: Trial, fits: bool) -> None:
        predicted = trial.prediction
        logger.debug(
            "%s: trial %d: %s at the peak, %.1f ms a step (on paper %s, %.1f ms); %s",
            self._run.name,
            len(self.trials),
            gib_text(trial.reserved_peak_bytes),
            trial.step_ms,
            gib_text(predicted.peak_bytes),
            predicted.step_ms,
            "fits" if fits else "does not fit",
        )
