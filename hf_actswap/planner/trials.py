"""The plans that were tried on the machine, what was measured of them, and which is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.actions import MemoryPlan
from .profile import Prediction


@dataclass(frozen=True)
class MeasuredStep:
    """What was measured of one step, on one rank or as the worst of all ranks.

    Args:
        step_ms: time from the first forward to the end of the step.
        peak_bytes: the most device memory in use.
        reserved_peak_bytes: the most that the allocator held.
        evicted_bytes: bytes that the guard moved because memory ran out.
        offloaded_bytes: bytes that the plan swapped.
    """

    step_ms: float
    peak_bytes: int
    reserved_peak_bytes: int
    evicted_bytes: int
    offloaded_bytes: int

    @staticmethod
    def worst(steps: Sequence[MeasuredStep]) -> MeasuredStep:
        """Return the largest value of each field over the steps of all ranks."""
        return MeasuredStep(
            max(step.step_ms for step in steps),
            max(step.peak_bytes for step in steps),
            max(step.reserved_peak_bytes for step in steps),
            max(step.evicted_bytes for step in steps),
            max(step.offloaded_bytes for step in steps),
        )


@dataclass
class Trial:
    """A plan that is tried on the machine.

    Args:
        plan: the plan.
        prediction: its prediction.
        steps: its measured steps, in order. The first also prepares: kernels, page-locked memory.
    """

    plan: MemoryPlan
    prediction: Prediction
    steps: list[MeasuredStep]

    @property
    def step_ms(self) -> float:
        """The time of the fastest step."""
        return min((step.step_ms for step in self.steps), default=float("inf"))

    @property
    def reserved_peak_bytes(self) -> int:
        """The most bytes that the allocator held in any step."""
        return max((step.reserved_peak_bytes for step in self.steps), default=0)

    def fits(self, budget_bytes: int) -> bool:
        """Return whether every step kept within the budget, and nothing had to be evicted."""
        return all(step.reserved_peak_bytes <= budget_bytes and not step.evicted_bytes for step in self.steps)


@dataclass(frozen=True)
class Outcome:
    """What a step takes with the plan that was found, and without any.

    Args:
        peak_bytes, step_ms: device memory in use at the peak and time of a step, with the plan.
        without_peak_bytes, without_step_ms: the same if everything is kept.
        source: where the peak without a plan comes from, in words.
        time_source: where the time without a plan comes from, in words.
    """

    peak_bytes: int
    step_ms: float
    without_peak_bytes: int
    without_step_ms: float
    source: str
    time_source: str = "predicted"


def best_trial(trials: Sequence[Trial], budget_bytes: int) -> Trial | None:
    """Return the fastest trial that fits, else the one that used least memory; ``None``: none has run.

    Ties go to the earlier trial.
    """
    tried = [trial for trial in trials if trial.steps]
    fitting = [trial for trial in tried if trial.fits(budget_bytes)]
    if fitting:
        return min(fitting, key=lambda trial: trial.step_ms)
    return min(
        tried, key=lambda trial: (trial.steps[-1].evicted_bytes, trial.reserved_peak_bytes), default=None
    )
