"""Which rows fit into the minutes of a run: those that matter most, in order, as far as estimates reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.rows import EAGER, Row
from benchmarks.workloads import Workload, layer_saved_bytes

COMPILE_S = 25.0
"""One layer, forward and backward, cold."""
COMPILE_AGAIN_S = 6.0
"""Traced again, the kernels found in the cache."""
PIN_S_PER_GIB = 0.8
PLANNING_S = 10.0
"""The planner's searches on paper, one for each plan that it tries."""
PLANNING_STEPS = 10
"""Warm-up and search."""
BUILD_S = 5.0
"""The model on the device, and its gradients."""


@dataclass(frozen=True, eq=False)
class Job:
    """One row on one workload.

    Args:
        workload, row: what is run.
        opens_group: the first of its compile group on this workload.
    """

    workload: Workload
    row: Row
    opens_group: bool = False

    @property
    def urgency(self) -> int:
        """0 comes first: eager, then what the claims need, then the rest by rank and workload."""
        if self.row.name == EAGER.name:
            return 0
        if self.workload.name in self.row.needed_at:
            return 1
        return 1 + self.row.rank + self.workload.handicap

    def estimate_s(self, slowness: float = 1.0) -> float:
        """Seconds that it takes, where a step is ``slowness`` times as long as expected."""
        workload, row = self.workload, self.row
        steps = workload.warmup_steps + workload.steps + 2  # one compares gradients, at half speed
        if row.budget is not None:
            steps += PLANNING_STEPS
        seconds = steps * workload.expected_ms / 1e3 * row.relative_time * slowness
        if row.compiles:
            seconds += COMPILE_S if self.opens_group else COMPILE_AGAIN_S
        if row.budget is not None:
            seconds += PLANNING_S
        if row.name == EAGER.name:
            seconds += BUILD_S
        saved_gib = workload.layers * layer_saved_bytes(workload) / 2**30
        return seconds + PIN_S_PER_GIB * row.pinned_share * saved_gib


def jobs_of(workloads: Sequence[Workload], rows: Sequence[Row]) -> list[Job]:
    """Return the jobs in the order in which they run."""
    jobs = []
    for workload in workloads:
        opened: set[str] = set()
        for row in rows:
            jobs.append(Job(workload, row, opens_group=row.compiles and row.compile_group not in opened))
            opened.add(row.compile_group)
    return jobs


def affordable(jobs: Sequence[Job], remaining_s: float, slowness: float = 1.0) -> list[Job]:
    """Return the jobs that fit, the most urgent first chosen, in the order given."""
    chosen = set()
    for job in sorted(jobs, key=lambda job: job.urgency):
        seconds = job.estimate_s(slowness)
        if seconds <= remaining_s:
            chosen.add(job)
            remaining_s -= seconds
    return [job for job in jobs if job in chosen]


class Minutes:
    """Watches the time of a run.

    Args:
        minutes: that the whole run may take; ``None``: as long as it takes.
        clock: seconds, increasing.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._minutes, self._clock = minutes, clock
        self._start_s = clock()
        self._slowness = 1.0

    def remaining_s(self) -> float:
        """Return the seconds left."""
        if self._minutes is None:
            return float("inf")
        return self._minutes * 60 - (self._clock() - self._start_s)

    def eager_took(self, workload: Workload, ms: float | None) -> None:
        """Learn from a measured eager step how fast the machine is."""
        if ms is not None:
            self._slowness = ms / workload.expected_ms

    def why_not(self, job: Job, ahead: Sequence[Job]) -> str:
        """Return why a job is left out, or ``""``; ``ahead``: all that have not run yet, this one too."""
        if job in affordable(ahead, self.remaining_s(), self._slowness):
            return ""
        return (
            f"left out: about {job.estimate_s(self._slowness):.0f} s, and the {self._minutes:g} minutes "
            "of the run go to rows that matter more"
        )
