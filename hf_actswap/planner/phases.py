"""The planner beside a training: warm-up, search, stable.

======== ============================================ =================================================
phase    what is on the model                         ends
======== ============================================ =================================================
warm-up  evictable tickets, the guard; the last step  after ``warmup_steps`` steps
         is recorded
search   one plan after another, the guard            after ``search_steps`` steps, or when nothing that
                                                      is untried could be faster
stable   the best measured plan, nothing else         when a batch is larger than any before, or a step
                                                      misses the budget or runs out of memory: then it
                                                      begins anew, bounded
======== ============================================ =================================================

Between steps only: inside a step nothing depends on a clock or on free memory, but for the guard, which moves
tensors and changes no number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..engine.install import AppliedPlan
from ..engine.stats import SwapStats
from ..plan.actions import MemoryPlan
from ..plan.outline import Outline
from .budget import BudgetError
from .plan_file import FilePlan, MadeFor, write_plan
from .planning import Task, is_rank_0, task_of
from .rescue.out_of_memory import Failure
from .run import Run
from .search_phase import Search
from .second_try import SecondTry
from .stable import MOST_PLANS, Stable, batch_shape
from .states.optimizer_states import OptimizerStates
from .trials import Trial
from .warm_up import WarmUp

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Planner:
    """Finds a plan while a model trains, and keeps it on. Use as a context manager, or call `remove`.

    It stands where an `AppliedPlan` stands. Say when a step has ended: `step_ended`, after the optimizer's
    step; between two calls of it lies one step, whatever its micro-batches.

    Args:
        run: the training.
        made_for: says what the run is, for the plan file; ``None``: none is written.
        known: the plan of the file, which is used instead of searching.

    Attributes:
        outline: of the model.
        trials: what was measured so far.
        planning_s: seconds of each search on paper so far.
        task: what was searched last; ``None``: nothing yet.
        progress: told after each step until the plan is found: the stage, and how many steps of it are left
            at most; ``None``: nobody is.
    """

    def __init__(
        self,
        run: Run,
        made_for: Callable[[tuple[int, ...]], MadeFor] | None = None,
        known: FilePlan | None = None,
    ) -> None:
        self._run, self._made_for = run, made_for
        self.outline: Outline = run.outline
        self.trials: list[Trial] = []
        self.planning_s: list[float] = []
        self.task: Task | None = None
        self.progress: Callable[[str, int], None] | None = None
        self._in_step = False
        self._shape: tuple[int, ...] = ()
        self._plans = self._beyond_bytes = 0
        self._last: MemoryPlan | None = None
        self._second_try = SecondTry(run.model, run.idle.device, self._can_try_again, self._ran_out)
        self._undo: list[Callable[[], None]] = []
        self._phase: WarmUp | Search | Stable
        if known is not None and known.made_for is not None:
            self._phase = self._stable_from(known, known.made_for.batch_shape)
        else:
            self._phase = WarmUp(run, run.memory.warmup_steps)
        run.watch(self._forward_starts, self._second_try.around)

    @property
    def phase(self) -> str:
        """``warm-up``, ``search`` or ``stable``."""
        return self._phase.name

    @property
    def plan(self) -> MemoryPlan:
        """What is on the model."""
        if self._run.applied is None:
            return MemoryPlan((), len(self.outline.layers), self.outline.family)
        return self._run.applied.plan

    @property
    def memory_mode(self) -> str:
        """``smart_swap`` or ``adaptive``."""
        return self._run.name

    @property
    def settled(self) -> AppliedPlan | None:
        """What is on the model, where it runs as any other plan: in the stable stage, without the guard."""
        return self._run.applied if self.phase == "stable" and not self._run.guarded else None

    def stats(self) -> SwapStats:
        """Return the totals since the planner began, over all plans that it put on the model."""
        return self._run.stats()

    @property
    def optimizer_states(self) -> OptimizerStates | None:
        """The states that ``preference: memory_saving`` keeps on the host, with statistics of their own."""
        return self._run.states

    def step_ended(self) -> None:
        """The optimizer has stepped. Every rank must call it.

        Raises:
            BudgetError: nothing fits the budget; it names the least that would.
        """
        if not self._in_step:
            return
        self._in_step = False
        phase = self._phase
        if isinstance(phase, WarmUp):
            self._after_warm_up(phase)
        elif isinstance(phase, Search):
            if phase.step_ended():
                self._settle(phase)
        elif phase.step_ended():
            missed = phase.missed_by_bytes
            self._beyond_bytes = self._beyond_bytes + missed if missed else 0
            self._last = self.plan
            self._phase = WarmUp(self._run, 1)
        if self.progress is not None and not (phase is self._phase and isinstance(phase, Stable)):
            now = self._phase
            self.progress(now.name, 0 if isinstance(now, Stable) else now.steps_left)

    def micro_batch(self, step: Callable[[], Value]) -> Value:
        """Run forward and backward of a micro-batch, in the stable stage with a second try; see `second_try`.

        A forward has one wherever it is called; backward only in here.

        Args:
            step: both, and nothing that a second call of it would do twice.

        Raises:
            torch.OutOfMemoryError: it cannot be run again, and the text says why.
        """
        return self._second_try.micro_batch(step)

    def on_remove(self, step: Callable[[], None]) -> None:
        """Let `remove` do one thing more."""
        self._undo.append(step)

    def remove(self) -> None:
        """Take everything off the model. Safe to call again."""
        if isinstance(self._phase, WarmUp):
            self._phase.close()
        self._run.close()
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()

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
        self._shape = batch_shape(args, kwargs)
        if isinstance(self._phase, WarmUp):
            self._phase.forward_starts()
        elif isinstance(self._phase, Stable):
            self._phase.forward_starts(self._shape)

    def _stable_from(self, known: FilePlan, shape: tuple[int, ...]) -> Stable:
        run = self._run
        run.switch(known.plan, guarded=False)
        budget = known.budget_bytes if known.budget_bytes is not None else run.meter.limit_bytes()
        logger.info("%s: stable: the plan of %s, nothing is searched", run.name, run.memory.plan_file)
        return Stable(run, budget, shape, self._plans)

    def _after_warm_up(self, phase: WarmUp) -> None:
        run = self._run
        profile = phase.step_ended()
        if profile is None:
            return
        states_bytes = 0 if run.states is None else run.states.state_bytes
        device_bytes, again = run.meter.limit_bytes(), self._last is not None
        self._plans += 1
        try:
            task = task_of(
                profile, run.fixed, run.memory, device_bytes, states_bytes, self._beyond_bytes, again
            )
            self._phase = Search(run, task, max(run.memory.search_steps, 1))
        except BudgetError as error:
            if self._last is None:
                raise
            self._go_on_guarded(self._last, profile.batch_shape, error)

    def _go_on_guarded(self, plan: MemoryPlan, shape: tuple[int, ...], error: BudgetError) -> None:
        """Nothing fits any more: a training that has come so far is not ended for that."""
        run = self._run
        logger.warning("%s: the plan before stays on, under the guard, which costs time: %s", run.name, error)
        run.switch(plan, guarded=True)
        self._phase = Stable(run, run.meter.limit_bytes(), shape, MOST_PLANS, stays_guarded=True)

    def _can_try_again(self) -> bool:
        return isinstance(self._phase, Stable) and not self._run.guarded

    def _ran_out(self, failure: Failure) -> None:
        if isinstance(self._phase, Stable):
            self._phase.ran_out(failure)

    def _settle(self, search: Search) -> None:
        run, best = self._run, search.best
        self.trials += search.trials
        self.task = search.task
        self.planning_s += search.planning_s
        budget = search.task.budget_bytes
        fits = best.fits(budget)
        if not fits:
            logger.warning(
                "%s: no plan that was tried stays within %s bytes; the one that needs least stays on, under "
                "the guard, which costs time",
                run.name,
                f"{budget:,}",
            )
        run.switch(best.plan, guarded=not fits)
        shape = search.task.profile.batch_shape
        self._beyond_bytes = search.beyond_bytes
        self._phase = Stable(run, budget, shape, self._plans, stays_guarded=not fits)
        logger.info("%s: stable: %s", run.name, _in_words(best))
        if fits and is_rank_0() and self._made_for is not None and run.memory.plan_file is not None:
            write_plan(run.memory.plan_file, best.plan, self._made_for(self._shape), _numbers(best, budget))


def _in_words(trial: Trial) -> str:
    predicted = trial.prediction
    if predicted is None:
        return f"{trial.step_ms:.1f} ms a step"
    return (
        f"{predicted.kept_bytes:,} bytes kept, {predicted.swapped_bytes:,} swapped, "
        f"{predicted.recomputed_bytes:,} recomputed; {trial.step_ms:.1f} ms a step, "
        f"{trial.reserved_peak_bytes:,} bytes at the peak"
    )


def _numbers(trial: Trial, budget_bytes: int) -> dict[str, Any]:
    predicted = trial.prediction
    found: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "peak_bytes": trial.reserved_peak_bytes,
        "step_ms": trial.step_ms,
    }
    if predicted is not None:
        found["predicted_peak_bytes"] = predicted.peak_bytes
        found["predicted_step_ms"] = predicted.step_ms
    return found
