"""One plan for all ranks: what they measured put together, searched by one of them, told to the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist

from ..config.schema import MemoryConfig
from ..engine.agreement import from_all_ranks, from_one_rank
from ..engine.link import slowest
from ..errors import ActSwapError
from ..plan.actions import MemoryPlan
from .budget import GIB, BudgetError, budget_bytes, impossible, limits_of
from .cost.simulate import predict
from .profile import Limits, Prediction, Profile
from .search.find_plan import Found, candidates, least_peak_bytes

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Task:
    """What is to be planned; the same on every rank.

    Args:
        profile: of the rank whose step is the largest, at the pace of the slowest.
        fixed: fates written by hand.
        memory: what the user wrote.
        budget_bytes: the most that a step may use, fragments included.
        unplanned: a step with nothing but what is written by hand.
        states_bytes: host memory that the optimizer's states take.
        beyond_bytes: what steps of an earlier plan used beyond its prediction.
    """

    profile: Profile
    fixed: MemoryPlan
    memory: MemoryConfig
    budget_bytes: int
    unplanned: Prediction
    states_bytes: int = 0
    beyond_bytes: int = 0

    def limits(self, beyond_bytes: int = 0) -> Limits:
        """Return what a plan must keep within.

        Args:
            beyond_bytes: what a step used beyond its prediction; what the allocator holds in fragments, at
                least.
        """
        beyond = max(beyond_bytes, self.beyond_bytes, self.profile.reserved_bytes)
        found = limits_of(self.memory, self.budget_bytes - beyond, self.fixed.min_tensor_bytes)
        host = None if found.host_bytes is None else max(found.host_bytes - self.states_bytes, 0)
        return replace(found, host_bytes=host, frees_optimizer_states=False)  # what was recorded is without


def task_of(
    own: Profile,
    fixed: MemoryPlan,
    memory: MemoryConfig,
    device_bytes: int,
    states_bytes: int,
    beyond_bytes: int = 0,
    again: bool = False,
) -> Task:
    """Put together what all ranks recorded; every rank must call it.

    Args:
        own: what this rank recorded, the optimizer's states where they are in every step.
        fixed, memory: see `Task`.
        device_bytes: what this rank can use.
        states_bytes: host memory that the optimizer's states take on this rank.
        beyond_bytes: see `Task`; the same on every rank.
        again: there was a plan before; a device that is smaller than ``budget_gib`` by now is the budget.

    Raises:
        BudgetError: the budget is larger than a rank's device, or the reduction larger than the peak.
    """
    profile = agreed_profile(own)
    least_device_bytes = min(from_all_ranks(device_bytes))
    if again and memory.budget_gib is not None:
        memory = replace(memory, budget_gib=min(memory.budget_gib, least_device_bytes / GIB))
    unplanned = predict(profile, fixed)
    budget = budget_bytes(memory, least_device_bytes, unplanned.peak_bytes + profile.reserved_bytes)
    states_bytes = max(from_all_ranks(states_bytes))
    return Task(profile, fixed, memory, budget, unplanned, states_bytes, beyond_bytes)


def agreed_profile(own: Profile) -> Profile:
    """Return the profile of the rank that needs most memory, at the pace of the slowest rank and link."""
    keep_all = MemoryPlan((), own.num_layers, own.family)
    facts = from_all_ranks((predict(own, keep_all).peak_bytes, own.compute_ms, own.link))
    largest = max(range(len(facts)), key=lambda rank: (facts[rank][0], -rank))
    here = dist.get_rank() if len(facts) > 1 else 0
    profile = from_one_rank(own if here == largest else None, largest)
    pace = max(ms for _, ms, _ in facts) / profile.compute_ms if profile.compute_ms else 1.0
    links = [link for _, _, link in facts if link is not None]
    return replace(
        profile,
        spans=tuple(
            replace(span, forward_ms=span.forward_ms * pace, backward_ms=span.backward_ms * pace)
            for span in profile.spans
        ),
        link=slowest(links) if len(links) == len(facts) else None,
    )


def is_rank_0() -> bool:
    """Whether this process speaks for all: it is alone, or the first of them."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def found_by_rank_0(search: Callable[[], Value]) -> Value:
    """Run ``search`` on rank 0 and return on every rank what it returned there, or raise what it raised."""
    outcome: tuple[Value | None, ActSwapError | None] = (None, None)
    if is_rank_0():
        try:
            outcome = (search(), None)
        except ActSwapError as error:
            outcome = (None, error)
    value, problem = from_one_rank(outcome)
    if problem is not None:
        raise problem
    return value  # type: ignore[return-value]


def best_plans(task: Task, count: int, beyond_bytes: int = 0) -> Sequence[Found]:
    """Return up to ``count`` plans that are worth a trial, the best first; the same on every rank.

    Raises:
        BudgetError: nothing fits; it names what would.
    """
    started = time.perf_counter()
    limits = task.limits(beyond_bytes)

    def search() -> Sequence[Found]:
        try:
            return candidates(task.profile, task.fixed, limits, count)
        except BudgetError:
            least = least_peak_bytes(task.profile, task.fixed, limits)
            beyond = task.budget_bytes - limits.device_bytes
            peak = task.unplanned.peak_bytes + task.profile.reserved_bytes
            raise impossible(task.memory, task.budget_bytes, least + beyond, peak) from None

    plans = found_by_rank_0(search)
    logger.info(
        "%s: %d plan(s) worth a trial, found in %.2f s",
        task.memory.mode,
        len(plans),
        time.perf_counter() - started,
    )
    return plans
