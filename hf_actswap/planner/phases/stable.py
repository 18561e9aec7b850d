"""The stable phase: the plan that was found runs as any other, and two checks see whether it still serves."""

from __future__ import annotations

from ...config.sizes import gib_text
from ...engine.agreement import from_all_ranks, world_size
from ..oom_guard import Failure
from ..recorded_step import BatchSize
from ..run import Run

CHECK_STEPS = 16
MOST_PLANS = 8


class Stable:
    """The phase in which the plan that was found stays on, until a batch or a peak needs a new one.

    Args:
        size: the largest batch that the plan was made for; ``None``: not known, and no batch is too large.
        plans: how many plans were given up so far.
        stays_guarded: whether the guard stays on, because the plan does not fit; only larger batches then
            make the planner plan anew.

    Attributes:
        missed_by_bytes: the most that a step wanted beyond the budget, or beyond what the device had; the
            most of all ranks once `step_ended` has returned true.
    """

    name, steps_left = "stable", 0

    def __init__(
        self,
        run: Run,
        budget_bytes: int,
        size: BatchSize | None,
        plans: int,
        stays_guarded: bool = False,
    ) -> None:
        self._run, self._budget_bytes, self.size = run, budget_bytes, size
        self._may_plan = plans < MOST_PLANS
        self._steps = 0
        self._larger = self._larger_now = False
        self._stays_guarded = stays_guarded
        if run.applied is not None:
            run.applied.verify(run.fixed.verify)
        self.plan = None if run.applied is None else run.applied.plan
        self.missed_by_bytes = self._held_bytes = 0

    def step_starts(self) -> None:
        """Free what an evaluation since the last step has left cached: it is not this step's peak."""
        meter = self._run.meter
        if meter.reserved_peak_bytes() > max(self._budget_bytes, self._held_bytes):
            meter.give_back()
            meter.reset_peak()

    def forward_starts(self, shape: tuple[int, ...]) -> None:
        if self.size is not None and not self.size.holds(shape):
            if not self._larger:
                self._run.log.info(
                    "a batch of %s is larger than what is planned for: this step runs under the guard", shape
                )
            self._larger = self._larger_now = True
            self._run.set_guard(True)

    def ran_out(self, failure: Failure) -> None:
        self.missed_by_bytes = max(self.missed_by_bytes, failure.missing_bytes or 1)
        self._run.set_guard(True)

    def step_ended(self) -> bool:
        """Return whether to plan anew; the same on every rank."""
        self._steps += 1
        self._held_bytes = self._run.meter.reserved_peak_bytes()
        if not self._stays_guarded:
            # Not what the allocator holds: it frees what it caches only when the device is full.
            over_bytes = self._run.meter.peak_bytes() - self._budget_bytes
            if self._steps == 1 and self.plan is not None and self.plan.verify != "off":
                over_bytes = 0  # checksums are bytes of this step alone
            if not self._larger_now:  # a larger batch's peak says nothing about the plan
                wanted_bytes = self._run.guard.missing_bytes if self._run.guarded else 0
                self.missed_by_bytes = max(self.missed_by_bytes, over_bytes, wanted_bytes)
            if self._run.guarded:
                self._run.set_guard(False)
        self._larger_now = False
        if not self._may_plan or not (world_size() == 1 or self._steps % CHECK_STEPS == 0):
            return False
        needs = from_all_ranks((self._larger, self.missed_by_bytes))
        self.missed_by_bytes = max(missed for _, missed in needs)
        if self.missed_by_bytes:
            self._run.log.info(
                "a step wanted %s more than there is; planning anew", gib_text(self.missed_by_bytes)
            )
        return self.missed_by_bytes > 0 or any(larger for larger, _ in needs)
