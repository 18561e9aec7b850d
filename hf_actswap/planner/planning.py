"""Finds one plan for all ranks: puts together what they measured, searches on rank 0, sends the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..config.schema import MemoryConfig
from ..engine.agreement import from_all_ranks, from_one_rank, rank
from ..engine.link import slowest
from ..engine.stats import GIB
from ..errors import ActSwapError
from ..plan.actions import MemoryPlan
from .budget import MARGIN_SHARE, BudgetError, budget_bytes, impossible, limits_of
from .cost.simulate import predict
from .profile import Limits, Prediction, Profile
from .search.find_plan import Found, candidates, find_plan, least_peak_bytes
from .search.states_place import WholeStep, whole_step, with_states_in_passing, with_states_on_host
from .shape_buckets import BatchSize, RecordedStep

Value = TypeVar("Value")


@dataclass(frozen=True)
class PlanningTask:
    """What is to be planned; the same on every rank.

    Args:
        profile: the step of the rank that needs most memory, with times of the slowest rank.
        fixed: fates written by hand.
        memory: the ``memory`` section of the configuration.
        budget_bytes: the most device memory that a step may use, fragments included.
        unplanned: the step with only the fates written by hand, without tiles that the planner chose.
        states_bytes: host memory that the optimizer's states take.
        unpredicted_bytes: the most that a step so far used beyond the prediction of its plan.
        step: the recorded step; scaled to ``size`` it is ``profile``; ``None``: it cannot be scaled.
        size: the largest batch that is planned for; ``None``: not known.
        in_flight: the most micro-batches whose activations a pipeline stage holds at once.
    """

    profile: Profile
    fixed: MemoryPlan
    memory: MemoryConfig
    budget_bytes: int
    unplanned: Prediction
    states_bytes: int = 0
    unpredicted_bytes: int = 0
    step: RecordedStep | None = None
    size: BatchSize | None = None
    in_flight: float = 1

    def at(self, size: BatchSize) -> Profile:
        """Return the profile scaled to another batch size, with compiled layers as trials have measured them.

        Raises:
            ValueError: the step cannot be scaled to it.
        """
        if size == self.size:
            return self.profile
        if self.step is None:
            raise ValueError("there is no recorded step to scale")
        return replace(self.step.at(size), frontier=self.profile.frontier)

    def grown(self, size: BatchSize) -> PlanningTask:
        """Return the same task for batches of up to ``size`` too."""
        if self.step is None or self.size is None:
            raise ValueError("there is no recorded step to scale")
        size = self.size.joined(size)
        profile = self.at(size)
        unplanned = self.predicted(profile, self.fixed)
        more_bytes = unplanned.peak_bytes - self.predicted(self.profile, self.fixed).peak_bytes
        budget = self.budget_bytes + (0 if self.memory.reduce_by_gib is None else more_bytes)
        return replace(self, profile=profile, unplanned=unplanned, budget_bytes=budget, size=size)

    def plan_at(self, size: BatchSize) -> Found:
        """Return the best predicted plan for a smaller size; each rank searches, and all find the same.

        Raises:
            ActSwapError: nothing fits, or scipy is missing.
            ValueError: the step cannot be scaled to it.
        """
        return candidates(self.at(size), self.fixed, self.limits(), 1)[0]

    def predicted(self, profile: Profile, plan: MemoryPlan) -> Prediction:
        """Predict a micro-batch under a plan; its peak includes all micro-batches in flight."""
        return limits_in_flight(Limits(0), self.in_flight).with_others(predict(profile, plan))

    @property
    def beyond_bytes(self) -> int:
        """What a step is expected to use beyond its prediction: what trials did, and fragments.

        Of the recorded step's fragments most could be given back, if memory were short; a trial shows more.
        """
        fragments = min(self.profile.reserved_bytes, round(MARGIN_SHARE * self.budget_bytes))
        return max(self.unpredicted_bytes, fragments)

    def limits(self) -> Limits:
        """Return a plan's limits: budget less fragments, or less what steps used beyond predictions."""
        found = limits_of(self.memory, self.budget_bytes - self.beyond_bytes, self.fixed.min_tensor_bytes)
        host = None if found.host_bytes is None else max(found.host_bytes - self.states_bytes, 0)
        found = replace(found, host_bytes=host, frees_optimizer_states=False)  # the profile lacks them
        return limits_in_flight(found, self.in_flight)


def agreed_task(
    own: RecordedStep,
    fixed: MemoryPlan,
    memory: MemoryConfig,
    device_bytes: int,
    states_bytes: int,
    unpredicted_bytes: int = 0,
    again: bool = False,
    largest: BatchSize | None = None,
    unplanned: Prediction | None = None,
    in_flight: float = 1,
) -> PlanningTask:
    """Return the task made of what all ranks recorded; every rank must call it.

    Args:
        own: the step that this rank recorded, with the optimizer's states where they are in every step.
        fixed, memory: as in `PlanningTask`.
        device_bytes: device memory that this rank can use.
        states_bytes: host memory that the optimizer's states take on this rank.
        unpredicted_bytes: as in `PlanningTask`; the same on every rank.
        again: whether there was a plan before; then a device that has less than ``budget_gib`` by now lowers
            the budget and is no error.
        largest: the largest batch that this rank has seen, which is planned for if it is larger than the
            recorded one; ``None``: not known.
        unplanned: as in `PlanningTask`; ``None``: predicted from the recorded step.
        in_flight: as in `PlanningTask`.

    Raises:
        BudgetError: the budget is larger than a rank's device, or the reduction larger than the peak.
    """
    step = agreed_step(own)
    size = step.size
    if size is not None:
        for seen in from_all_ranks(largest):
            size = size.joined(seen if seen is None or size.pairs else BatchSize(seen.tokens))
    profile = step.profile if size is None else step.at(size)
    least_device_bytes = min(from_all_ranks(device_bytes))
    if again and memory.budget_gib is not None:
        memory = replace(memory, budget_gib=min(memory.budget_gib, least_device_bytes / GIB))
    unplanned = unplanned or limits_in_flight(Limits(0), in_flight).with_others(predict(profile, fixed))
    budget = budget_bytes(memory, least_device_bytes, unplanned.peak_bytes + profile.reserved_bytes)
    states_bytes = max(from_all_ranks(states_bytes))
    return PlanningTask(
        profile, fixed, memory, budget, unplanned, states_bytes, unpredicted_bytes, step, size, in_flight
    )


def limits_in_flight(limits: Limits, in_flight: float) -> Limits:
    """Return ``limits`` for one of the micro-batches in flight, which share the host's memory equally.

    What the others keep is on the device. Of what they swap, at most half of one micro-batch's share is
    there, on its way out or back (`engine.passes`).
    """
    if in_flight <= 1:
        return limits
    host = None if limits.host_bytes is None else int(limits.host_bytes / in_flight)
    return replace(limits, host_bytes=host, waiting=in_flight - 1.0, resident=0.5)


def agreed_step(own: RecordedStep) -> RecordedStep:
    """Return the step of the rank that needs most memory, at the speed of the slowest rank and link."""
    mine = own.profile
    keep_all = MemoryPlan((), mine.num_layers, mine.family)
    facts = from_all_ranks((predict(mine, keep_all).peak_bytes, mine.compute_ms, mine.link))
    largest = max(range(len(facts)), key=lambda number: (facts[number][0], -number))
    step = from_one_rank(own if rank() == largest else None, largest)
    profile = step.profile
    slowdown = max(ms for _, ms, _ in facts) / profile.compute_ms if profile.compute_ms else 1.0
    links = [link for _, _, link in facts if link is not None]
    profile = replace(
        profile,
        op_events=tuple(
            replace(
                op_event,
                forward_ms=op_event.forward_ms * slowdown,
                backward_ms=op_event.backward_ms * slowdown,
            )
            for op_event in profile.op_events
        ),
        link=slowest(links) if len(links) == len(facts) else None,
    )
    return replace(step, profile=profile)


def found_by_rank_0(search: Callable[[], Value]) -> Value:
    """Run ``search`` on rank 0 and return on every rank what it returned there, or raise what it raised."""
    outcome: tuple[Value | None, ActSwapError | None] = (None, None)
    if rank() == 0:
        try:
            outcome = (search(), None)
        except ActSwapError as error:
            outcome = (None, error)
    value, problem = from_one_rank(outcome)
    if problem is not None:
        raise problem
    return value  # type: ignore[return-value]


@dataclass(frozen=True)
class StatesInPassing:
    """The optimizer's states are to wait on the host between its steps.

    Args:
        resident_bytes: how many bytes of them leave in the first forward and come back in the last backward.
        ms, kept_ms: the predicted time of the optimizer's step so, and with the states on the device.
    """

    resident_bytes: int
    ms: float
    kept_ms: float


def states_in_passing(task: PlanningTask, micro_batches: int) -> StatesInPassing | None:
    """Return how the optimizer's states wait on the host, where its step is predicted to be faster so.

    ``None``: they stay on the device, or nothing fits with them there. The same on every rank.

    Args:
        task: what is to be planned, with the states on the device.
        micro_batches: how many micro-batches the gradients of a step are accumulated from.
    """
    profile, limits = task.profile, task.limits()

    def on_host(swaps: bool) -> tuple[Found, WholeStep]:
        bucket = limits.swap_bucket_bytes if swaps else 0
        moved = replace(limits, frees_optimizer_states=True, swap_bucket_bytes=bucket)
        found = find_plan(profile, task.fixed, moved.beside_states(profile), search_least=False)
        return found, with_states_in_passing(profile, found.prediction, micro_batches, limits.device_bytes)

    def choose() -> StatesInPassing | None:
        try:
            on_device = find_plan(profile, task.fixed, limits, search_least=False)
        except BudgetError:
            return None
        kept = whole_step(profile, on_device.prediction, micro_batches)
        best = with_states_on_host(profile, micro_batches, limits.host_bytes, kept, on_host)
        return None if best is None else StatesInPassing(best[1].resident_bytes or 0, best[1].ms, kept.ms)

    return found_by_rank_0(choose)


def best_plans(task: PlanningTask, count: int) -> Sequence[Found]:
    """Return up to ``count`` plans that are worth a trial, the best first; the same on every rank.

    Raises:
        BudgetError: nothing fits; it names what would.
    """
    limits = task.limits()

    def search() -> Sequence[Found]:
        try:
            return candidates(task.profile, task.fixed, limits, count)
        except BudgetError:
            least = least_peak_bytes(task.profile, task.fixed, limits)
            beyond = task.budget_bytes - limits.device_bytes
            peak = task.unplanned.peak_bytes + task.profile.reserved_bytes
            tiles = task.fixed.tiles
            raise impossible(task.memory, task.budget_bytes, least + beyond, peak, tiles) from None

    return found_by_rank_0(search)
