"""Search: the plans that look best on paper, tried on the machine; what was measured corrects the paper.

A plan runs for two steps. The first prepares (kernels, page-locked memory) and shows whether memory suffices;
a plan that does not fit then is given up. The second is timed. Once a plan has been measured, the others are
searched anew with what its steps used beyond the prediction. **The best measured plan is kept**: the fastest
of those that stayed within the budget and of which nothing had to be evicted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from ..plan.actions import MemoryPlan
from .budget import BudgetError
from .cost.simulate import predict
from .planning import Task, best_plans
from .run import Run
from .search.compiled_frontier import learned, shown_by
from .search.find_plan import Found
from .trials import Trial, best_trial

logger = logging.getLogger(__name__)

STEPS_PER_TRIAL = 2


class Search:
    """See the module's text.

    Args:
        run: the training.
        task: what is planned.
        steps: at most so many training steps.

    Attributes:
        trials: what was tried so far.
        planning_s: seconds of each search on paper.

    Raises:
        BudgetError: no plan fits on paper.
    """

    name = "search"

    def __init__(self, run: Run, task: Task, steps: int) -> None:
        self._run, self.task, self._steps_left = run, task, steps
        self.trials: list[Trial] = []
        self.planning_s: list[float] = []
        self._beyond_bytes = task.beyond_bytes
        self._waiting = self._planned()
        logger.info(
            "%s: search (%d steps at most, budget %s bytes, without a policy %s bytes and %.1f ms)",
            run.name,
            steps,
            f"{task.budget_bytes:,}",
            f"{task.unplanned.peak_bytes:,}",
            task.unplanned.step_ms,
        )
        self._next()

    @property
    def steps_left(self) -> int:
        """Steps that are still to come, at most."""
        return max(self._steps_left, 0)

    @property
    def best(self) -> Trial:
        """The best of what was tried; of what is untried, the first."""
        return best_trial(self.trials, self.task.budget_bytes) or self.trials[0]

    @property
    def beyond_bytes(self) -> int:
        """The most that a step used beyond its prediction."""
        return self._beyond_bytes

    def step_ended(self) -> bool:
        """Take the step's measurement; return whether the search is over."""
        trial = self.trials[-1]
        trial.steps.append(self._run.measured())
        self._steps_left -= 1
        fits = trial.fits(self.task.budget_bytes)
        if fits and len(trial.steps) < STEPS_PER_TRIAL and self._steps_left:
            return False
        self._say(trial, fits)
        if fits and self._costs_nothing(trial):
            return True  # there is nothing faster
        if self._steps_left <= 0 or not self._learn(trial, fits):
            return True
        self._next()
        return False

    def _next(self) -> None:
        found = self._waiting.pop(0)
        self.trials.append(Trial(found.plan, found.prediction, []))
        self._run.switch(found.plan, guarded=True)

    def _learn(self, trial: Trial, fits: bool) -> bool:
        """Correct the paper by what ``trial`` used; return whether there is anything more to try."""
        predicted = trial.prediction
        if predicted is not None:
            profile = learned(self.task.profile, trial.plan, shown_by(trial))
            if knows_more := profile is not self.task.profile:
                self.task, predicted = replace(self.task, profile=profile), predict(profile, trial.plan)
            used = trial.reserved_peak_bytes + max(step.evicted_bytes for step in trial.steps)
            beyond = used - predicted.peak_bytes
            corrects = beyond > max(self._beyond_bytes, self.task.profile.reserved_bytes)
            if not fits or corrects or knows_more:
                self._beyond_bytes = max(beyond, self._beyond_bytes)
                self._search_again()
        return bool(self._waiting)

    def _search_again(self) -> None:
        try:
            found = self._planned()
        except BudgetError as error:
            logger.warning("%s: with what the last trial used, %s", self._run.name, error)
            return
        tried = [_rows(trial.plan) for trial in self.trials]
        self._waiting = [item for item in found if _rows(item.plan) not in tried]

    def _planned(self) -> list[Found]:
        started = time.perf_counter()
        try:
            count = max(self._steps_left // STEPS_PER_TRIAL, 1)
            return list(best_plans(self.task, count, self._beyond_bytes))
        finally:
            self.planning_s.append(time.perf_counter() - started)

    def _costs_nothing(self, trial: Trial) -> bool:
        return trial.plan.rows == self.task.fixed.rows

    def _say(self, trial: Trial, fits: bool) -> None:
        predicted = trial.prediction
        paper = (
            ""
            if predicted is None
            else f" (on paper {predicted.peak_bytes:,} bytes, {predicted.step_ms:.1f} ms)"
        )
        logger.info(
            "%s: trial %d: %s bytes at the peak, %.1f ms a step%s; %s",
            self._run.name,
            len(self.trials),
            f"{trial.reserved_peak_bytes:,}",
            trial.step_ms,
            paper,
            "fits" if fits else "does not fit",
        )


def _rows(plan: MemoryPlan) -> Sequence[object]:
    return replace(plan, overrides=()).rows
