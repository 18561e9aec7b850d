"""Finds one plan for all ranks: puts together what they measured, searches on rank 0, sends the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..config.schema import MemoryConfig
from ..config.sizes import GIB
from ..engine.agreement import from_all_ranks, from_one_rank, rank
from ..engine.link import slowest
from ..errors import ActSwapError
from ..plan.actions import MemoryPlan, Scope, is_layer, whole_layers_again
from .budget import (
    MARGIN_SHARE,
    BudgetError,
    allocatable_bytes,
    beside_leaving_states,
    budget_bytes,
    impossible,
    limit_bytes,
    limits_of,
)
from .cost.simulate import predict
from .profile import Limits, Prediction, Profile
from .record.adjusted import with_weights_on_host
from .recorded_step import BatchSize, RecordedStep, beside_others
from .search.find_plan import Found, candidates, find_plan, least_peak
from .search.states_place import (
    WholeStep,
    faster_with_weights_on_host,
    whole_step,
    with_states_in_passing,
    with_states_on_host,
)

Value = TypeVar("Value")

RESIDENT = 0.5
"""`Limits.resident` on a stage of a pipeline: half of what one micro-batch swaps."""


@dataclass(frozen=True)
class PlanningTask:
    """What is to be planned; the same on every rank.

    Args:
        profile: the step of the rank that needs most memory, with times of the slowest rank.
        fixed: fates written by hand.
        budget_bytes: the most device memory that a step may use, fragments included.
        unplanned: the step with only the fates written by hand, without tiles that the planner chose.
        states_bytes: host memory that the optimizer's states and frozen weights take.
        unpredicted_bytes: the most that a step so far used beyond the prediction of its plan.
        step: the recorded step; scaled to ``size`` it is ``profile``; ``None``: it cannot be scaled.
        size: the largest batch that is planned for; ``None``: not known.
        in_flight: the most micro-batches whose activations are there at once: on a stage of a pipeline, or
            where a step runs several forwards ahead of its backward.
        resident: `Limits.resident`.
        device_bytes: the most that the device has for the process, the least of all ranks.
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
    resident: float = 0.0
    device_bytes: int = 0

    def at(self, size: BatchSize) -> Profile:
        """Return the profile at another batch size; `ValueError`: the step cannot be scaled to it."""
        if size == self.size:
            return self.profile
        if self.step is None:
            raise ValueError("there is no recorded step to scale")
        return replace(self.step.at(size), frontier=self.profile.frontier)

    def grown(self, size: BatchSize) -> PlanningTask:
        assert self.size is not None
        size = self.size.joined(size)
        profile = self.at(size)
        unplanned = self.predicted(profile, self.fixed)
        more_bytes = unplanned.peak_bytes - self.predicted(self.profile, self.fixed).peak_bytes
        budget = self.budget_bytes + (0 if self.memory.reduce_by_gib is None else more_bytes)
        return replace(self, profile=profile, unplanned=unplanned, budget_bytes=budget, size=size)

    def slower(self, factor: float) -> PlanningTask:
        """Return the task on a device on which all but copies takes ``factor`` times as long."""
        step = self.step
        if step is not None:
            step = replace(step, profile=step.profile.slower(factor))
        return replace(self, profile=self.profile.slower(factor), step=step)

    def predicted(self, profile: Profile, plan: MemoryPlan) -> Prediction:
        """Predict a micro-batch under a plan; its peak includes all micro-batches in flight."""
        return Limits(0).shared_by(self.in_flight, self.resident).with_others(predict(profile, plan))

    @property
    def beyond_bytes(self) -> int:
        """What a step is expected to use beyond its prediction: what trials did, and fragments.

        Of the recorded step's fragments most could be given back, if memory were short; a trial shows more.
        On paper a share of the budget is left to them.
        """
        if self.profile.source == "shapes":
            fragments = self.budget_bytes - allocatable_bytes(self.profile, self.memory, self.budget_bytes)
        else:
            fragments = min(self.profile.reserved_bytes, round(MARGIN_SHARE * self.budget_bytes))
        return max(self.unpredicted_bytes, fragments)

    @property
    def reservable_bytes(self) -> int:
        """The most that the allocator may hold in a step."""
        return limit_bytes(self.memory, self.device_bytes, self.budget_bytes)

    def limits(self) -> Limits:
        """Return a plan's limits: budget less fragments, or less what steps used beyond predictions."""
        found = limits_of(self.memory, self.budget_bytes - self.beyond_bytes, self.fixed.min_tensor_bytes)
        host = None if found.host_bytes is None else max(found.host_bytes - self.states_bytes, 0)
        found = replace(found, host_bytes=host, frees_optimizer_states=False)  # the profile lacks them
        return found.shared_by(self.in_flight, self.resident)


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
    resident: float = 0.0,
    host_bytes: int | None = None,
) -> PlanningTask:
    """Return the task made of what all ranks recorded; every rank must call it.

    Args:
        own: the step that this rank recorded, with the optimizer's states where they are in every step.
        device_bytes: device memory that this rank can use.
        again: whether there was a plan before; then a device that has less than ``budget_gib`` by now lowers
            the budget and is no error.
        largest: the largest batch that this rank has seen, which is planned for if it is larger than the
            recorded one; ``None``: not known.
        unplanned: ``None``: predicted from the recorded step.
        host_bytes: host memory that this rank can use for all that waits there; ``None``: not known.
        fixed, memory, states_bytes, unpredicted_bytes, in_flight, resident: as in `PlanningTask`.

    Raises:
        BudgetError: the budget is larger than a rank's device, or the reduction larger than the peak.
    """
    step = agreed_step(own)
    size = step.size
    if size is not None:
        for seen in from_all_ranks(largest):
            size = size.joined(seen if seen is None or size.pairs else BatchSize(seen.tokens))
    profile = step.at(size)
    least_device_bytes = min(from_all_ranks(device_bytes))
    if again and memory.budget_gib is not None:
        memory = replace(memory, budget_gib=min(memory.budget_gib, least_device_bytes / GIB))
    there = [found for found in from_all_ranks(host_bytes) if found is not None]
    if there and (memory.host_memory_gib is None or min(there) < memory.host_memory_gib * GIB):
        memory = replace(memory, host_memory_gib=min(there) / GIB)
    unplanned = unplanned or Limits(0).shared_by(in_flight, resident).with_others(predict(profile, fixed))
    budget = budget_bytes(memory, least_device_bytes, unplanned.peak_bytes + profile.reserved_bytes)
    states_bytes = max(from_all_ranks(states_bytes))
    return PlanningTask(
        profile,
        fixed,
        memory,
        budget,
        unplanned,
        states_bytes,
        unpredicted_bytes,
        step,
        size,
        in_flight,
        resident,
        least_device_bytes,
    )


def without_others(profile: Profile, others: int) -> Profile:
    """Return a profile without the storages that autograd saved in other forwards, whose backward is to come.

    `PlanningTask.predicted` counts them, by the plan. What else these forwards hold stays: losses, outputs.
    After backward there is nothing of them.
    """
    if not others:
        return profile
    kept_bytes = predict(profile, MemoryPlan((), profile.num_layers, profile.family)).kept_bytes
    found = beside_others(profile, -others * kept_bytes)
    return replace(found, outside_base_bytes=profile.outside_base_bytes)


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
    link = slowest(links) if len(links) == len(facts) else None
    return replace(step, profile=replace(profile.slower(slowdown), link=link))


def found_by_rank_0(search: Callable[[], Value]) -> Value:
    """Run ``search`` on rank 0 and return on every rank what it returned there, or raise what it raised."""
    outcome: Any = None
    if rank() == 0:
        try:
            outcome = search()
        except ActSwapError as error:
            outcome = error
    outcome = from_one_rank(outcome)
    if isinstance(outcome, ActSwapError):
        raise outcome
    return outcome


@dataclass(frozen=True)
class StatesInPassing:
    """The optimizer's states are to wait on the host between its steps.

    Args:
        resident_bytes: `WholeStep.resident_bytes`.
        ms, kept_ms: the predicted time of the optimizer's step so, and with the states on the device
            (infinite: nothing fits with them there).
    """

    resident_bytes: int
    ms: float
    kept_ms: float


def states_in_passing(
    task: PlanningTask, micro_batches: int, on_device: Found | None = None
) -> tuple[StatesInPassing | None, Found | None]:
    """Return how the optimizer's states wait on the host, where its step is predicted to be faster so, or
    nothing fits with them on the device.

    ``None``: they stay. With it comes the best plan, with them where they are then to be; ``None``: nothing
    fits with them on the device. The same on every rank.

    ``on_device`` is the best plan with them on the device, where it is known already.
    """
    profile, limits = task.profile, task.limits()

    def on_host(swaps: bool) -> tuple[Found, WholeStep]:
        bucket, device_bytes = limits.swap_bucket_bytes, beside_leaving_states(profile, limits.device_bytes)
        moved = replace(limits, device_bytes=device_bytes, frees_optimizer_states=True)
        moved = replace(moved, swap_bucket_bytes=bucket if swaps else 0).beside_states(profile)
        found = find_plan(profile, task.fixed, moved, search_least=False)
        return found, with_states_in_passing(profile, found.prediction, micro_batches, device_bytes)

    def choose() -> tuple[StatesInPassing | None, Found | None]:
        best, kept = on_device, None
        with suppress(BudgetError):
            best = best or find_plan(profile, task.fixed, limits, search_least=False)
            kept = whole_step(profile, best.prediction, micro_batches)
        moved = with_states_on_host(profile, micro_batches, limits.host_bytes, kept, on_host)
        if moved is None:
            return None, best
        kept_ms = math.inf if kept is None else kept.ms
        return StatesInPassing(moved[1].resident_bytes or 0, moved[1].ms, kept_ms), moved[0]

    return found_by_rank_0(choose)


def weights_pay(task: PlanningTask, sizes_bytes: Mapping[Scope, int]) -> tuple[str, Found | None]:
    """Return why the frozen weights of layers should wait on the host, and the best plan without that.

    The reason is empty where they should not; the plan is ``None`` if nothing fits. The same on every rank.
    ``sizes_bytes`` are those of each layer's weights, in the order of forward.
    """
    limits, profile = task.limits(), task.profile
    left = None if limits.host_bytes is None else limits.host_bytes - sum(sizes_bytes.values())

    def on_host() -> tuple[Found, float]:
        moved = with_weights_on_host(profile, sizes_bytes)
        found = find_plan(moved, task.fixed, replace(limits, host_bytes=left), search_least=False)
        return found, found.prediction.step_ms

    def in_words(ms: float, other_ms: float, place: str) -> str:
        return f"a step is predicted to take {ms:.0f} ms, and {other_ms:.0f} ms with them on the {place}"

    def choose() -> tuple[str, Found | None]:
        try:
            kept = find_plan(profile, task.fixed, limits, search_least=False)
        except BudgetError:
            return "nothing fits with them on the device", None
        if profile.link is None or (left is not None and left < 0):  # None: the copies' time is not known
            return "", kept
        least_ms = profile.compute_ms + profile.outside_ms
        moved, why = faster_with_weights_on_host(kept.prediction.step_ms, least_ms, on_host, in_words)
        return "" if moved is None else why, kept

    return found_by_rank_0(choose)


def best_plans(task: PlanningTask, count: int, first: Found | None = None) -> Sequence[Found]:
    """Return up to ``count`` plans that are worth a trial, the best first; the same on every rank.

    ``first`` is the best plan, where it is known already. `BudgetError`: nothing fits; it names what would.
    """
    limits = task.limits()

    def search() -> Sequence[Found]:
        try:
            return candidates(task.profile, task.fixed, limits, count, first)
        except BudgetError as error:
            least = error.least_bytes + task.budget_bytes - limits.device_bytes
            peak = task.unplanned.peak_bytes + task.profile.reserved_bytes
            raise impossible(task.memory, task.budget_bytes, least, peak, task.fixed.tiles) from None

    return found_by_rank_0(search)


def whole_layers(task: PlanningTask) -> Found | None:
    """Return the plan that recomputes each layer as a whole; ``None``: it does not fit, or is no choice here.

    It is none beside fates of layers that are written by hand, or where compiled layers have fewer to choose
    from.
    """
    profile, fixed, limits = task.profile, task.fixed, task.limits()
    by_hand = any(is_layer(row.scope) for row in fixed.rows)
    if by_hand or profile.compiled_layers:
        return None
    plan = replace(fixed, rows=(*fixed.rows, *whole_layers_again(profile.layers)))
    prediction = task.predicted(profile, plan)
    return Found(plan, prediction, 0.0) if prediction.peak_bytes <= limits.device_bytes else None


def least_plan(task: PlanningTask) -> Found:
    """Return the plan with the least predicted peak; the same on every rank."""
    return found_by_rank_0(lambda: least_peak(task.profile, task.fixed, task.limits()))
