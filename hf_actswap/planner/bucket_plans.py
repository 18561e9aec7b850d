"""Plans for batches that are shorter than the largest: each bucket of sizes may have a plan of its own.

The first batch of a bucket runs under the plan of the next larger bucket, which fits it. After that step the
planner searches a plan for the bucket by prediction, from the recorded step scaled to the bucket's upper
edge, within the same limits. It is used if it is predicted to be faster there; else the bucket keeps sharing
the larger plan. Nothing is measured, and ranks need not agree: each may choose by itself, since all plans of
the planner run the same collectives.

A plan that misses the budget is dropped for good. Where layers are compiled no bucket has a plan of its own,
because each plan would need a compilation.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from ..engine.install import AppliedPlan
from ..engine.stats import gib_text
from ..errors import ActSwapError
from ..plan.actions import MemoryPlan
from .cost.simulate import predict
from .plan_file import Trial
from .planning import PlanningTask
from .profile import Prediction
from .run import Run
from .shape_buckets import MOST_BUCKETS, BatchSize, bucket_of

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.02
"""A bucket's plan is used if its predicted step is shorter than under the larger plan by this share."""


@dataclass
class ShapeBucket:
    """A bucket: batches of about the same size, in the stable phase.

    Args:
        edge: the largest size in it.
        least_tokens, most_tokens: tokens of its smallest and its largest batch so far.
        batches: how many batches it had so far.
        plan: its own plan; ``None``: it shares the plan of the next larger bucket that has one.
        predicted: prediction of its own plan for a batch of the size ``edge``.
        shared_ms: predicted time of a step under the shared plan, for such a batch; ``None``: no plan was
            searched.
        dropped: whether its plan was dropped, because it missed the budget or could not be put on.
    """

    edge: BatchSize
    least_tokens: int
    most_tokens: int
    batches: int = 0
    plan: MemoryPlan | None = None
    predicted: Prediction | None = None
    shared_ms: float | None = None
    dropped: bool = False


class BucketPlans:
    """Chooses the plan for each batch: that of the largest batches, on the model at first, or a smaller one.

    Args:
        run: the training.
        task: the task for which the largest plan was found.
        largest: the trial of that plan.

    Attributes:
        planning_s: seconds that each search took.
    """

    def __init__(self, run: Run, task: PlanningTask, largest: Trial) -> None:
        if run.applied is None or task.size is None:
            raise ValueError("there is no plan for batches of a known size")
        self._run, self._task, self._top, self._largest = run, task, task.size, run.applied
        tokens = task.size.tokens
        top = ShapeBucket(task.size, tokens, tokens, 0, largest.plan, largest.prediction)
        self._buckets: dict[BatchSize, ShapeBucket] = {task.size: top}
        self._applied: dict[BatchSize, AppliedPlan] = {task.size: run.applied}
        self._waiting: list[ShapeBucket] = []
        self._used: set[BatchSize] = set()
        planned = largest.plan.rows != task.fixed.rows
        self._searches = planned and not task.profile.compiled_layers
        self.planning_s: list[float] = []

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """All buckets that had a batch so far, the largest first."""
        return tuple(sorted(self._buckets.values(), key=lambda bucket: bucket.edge, reverse=True))

    def serve(self, size: BatchSize) -> None:
        """Put on the plan for a batch of ``size``, which must not exceed the size of the largest plan."""
        edge = bucket_of(size, self._top)
        bucket = self._buckets.get(edge)
        if bucket is None:
            bucket = self._buckets[edge] = ShapeBucket(edge, size.tokens, size.tokens)
            if self._searches and len(self._buckets) <= MOST_BUCKETS:
                self._waiting.append(bucket)
        bucket.batches += 1
        bucket.least_tokens = min(bucket.least_tokens, size.tokens)
        bucket.most_tokens = max(bucket.most_tokens, size.tokens)
        self._use(self._serving(edge))

    def use_largest(self) -> None:
        """Put the largest plan on."""
        self._run.suspend_for(self._largest)

    def step_ended(self) -> None:
        """Search plans for the buckets that had their first batch in this step."""
        self._used = set()
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            self._search(bucket)

    def drop_used(self) -> bool:
        """Drop the smaller buckets' plans under which this step missed the budget; return whether any."""
        used = self._used - {self._top}
        self._used = set()
        if not used:
            return False
        self.use_largest()
        for edge in sorted(used):
            self._drop(self._buckets[edge])
        return True

    def _serving(self, edge: BatchSize) -> ShapeBucket:
        """Return the smallest bucket with a plan that fits batches of size ``edge``."""
        fitting = [item for item in self._buckets.values() if item.plan and item.edge.covers(edge)]
        return min(fitting, key=lambda item: item.edge)

    def _use(self, bucket: ShapeBucket) -> None:
        applied = self._applied.get(bucket.edge)
        if applied is None and bucket.plan is not None:
            try:
                applied = self._applied[bucket.edge] = self._run.suspend_for(bucket.plan)
            except ActSwapError as error:
                logger.warning("%s: %s: %s", self._run.name, _name(bucket), error)
                self._drop(bucket)
        self._run.suspend_for(applied or self._largest)
        self._used.add(bucket.edge if applied else self._top)

    def _drop(self, bucket: ShapeBucket) -> None:
        bucket.plan, bucket.predicted, bucket.dropped = None, None, True
        applied = self._applied.pop(bucket.edge, None)
        if applied is not None:
            self._run.drop(applied)
            text = "%s: %s: its plan missed the budget; from now on a larger one serves it"
            logger.info(text, self._run.name, _name(bucket))

    def _search(self, bucket: ShapeBucket) -> None:
        task, larger = self._task, self._serving(bucket.edge).plan
        if larger is None:
            return
        started = time.perf_counter()
        try:
            found = task.plan_at(bucket.edge)
            bucket.shared_ms = predict(task.at(bucket.edge), larger).step_ms
        except ActSwapError as error:
            logger.info("%s: %s: shares a larger plan: %s", self._run.name, _name(bucket), error)
            return
        finally:
            self.planning_s.append(time.perf_counter() - started)
        pays = found.prediction.step_ms <= (1 - LEAST_GAIN) * bucket.shared_ms
        if pays:
            bucket.plan, bucket.predicted = found.plan, found.prediction
        logger.info(
            "%s: %s: %s; on paper %s and %.1f ms a step, %.1f ms under the larger plan (%.2f s)",
            self._run.name,
            _name(bucket),
            "a plan of its own" if pays else "shares a larger plan",
            gib_text(found.prediction.peak_bytes),
            found.prediction.step_ms,
            bucket.shared_ms,
            self.planning_s[-1],
        )


def _name(bucket: ShapeBucket) -> str:
    return f"batches of up to {bucket.edge.tokens:,} tokens"
