"""What was tried on the machine, and which of it is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.actions import MemoryPlan
from .profile import Prediction


@dataclass(frozen=True)
class MeasuredStep:
    """One step, the worst of all ranks.

    Args:
        step_ms: from the first forward to the end of the step.
        peak_bytes: the most device memory in use.
        reserved_peak_bytes: the most that the allocator held.
        evicted_bytes: what had to be moved because memory ran out.
        offloaded_bytes: what the plan swapped, of the rank that swapped most.
    """

    step_ms: float
    peak_bytes: int
    reserved_peak_bytes: int
    evicted_bytes: int
    offloaded_bytes: int

    @staticmethod
    def worst(steps: Sequence[MeasuredStep]) -> MeasuredStep:
        """Return the largest of each over ranks."""
        return MeasuredStep(
            max(step.step_ms for step in steps),
            max(step.peak_bytes for step in steps),
            max(step.reserved_peak_bytes for step in steps),
            max(step.evicted_bytes for step in steps),
            max(step.offloaded_bytes for step in steps),
        )


@dataclass
class Trial:
    """A plan on the machine.

    Args:
        plan: what was tried.
        prediction: of it.
        steps: in the order in which they ran. The first also prepares: kernels, page-locked memory.
    """

    plan: MemoryPlan
    prediction: Prediction
    steps: list[MeasuredStep]

    @property
    def step_ms(self) -> float:
        """The fastest step."""
        return min((step.step_ms for step in self.steps), default=float("inf"))

    @property
    def reserved_peak_bytes(self) -> int:
        """The most that the allocator held in any step."""
        return max((step.reserved_peak_bytes for step in self.steps), default=0)

    def fits(self, budget_bytes: int) -> bool:
        """Whether every step kept within the budget, and nothing had to be evicted."""
        return all(step.reserved_peak_bytes <= budget_bytes and not step.evicted_bytes for step in self.steps)


@dataclass(frozen=True)
class Outcome:
    """What a step takes with the plan that was found, and without any.

    Args:
        peak_bytes, step_ms: with the plan; device memory in use.
        without_peak_bytes, without_step_ms: where everything is kept; the time is predicted.
        source: where the peak without a plan comes from.
    """

    peak_bytes: int
    step_ms: float
    without_peak_bytes: int
    without_step_ms: float
    source: str


def best_trial(trials: Sequence[Trial], budget_bytes: int) -> Trial | None:
    """Return the fastest that fits; none does: the one that used the least memory; ``None``: no trials.

    Ties go to the earlier one.
    """
    tried = [trial for trial in trials if trial.steps]
    fitting = [trial for trial in tried if trial.fits(budget_bytes)]
    if fitting:
        return min(fitting, key=lambda trial: trial.step_ms)
    return min(
        tried, key=lambda trial: (trial.steps[-1].evicted_bytes, trial.reserved_peak_bytes), default=None
    )
