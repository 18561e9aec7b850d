"""The limits that a plan must keep within, from what the user wrote and what the device has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..config.schema import MemoryConfig
from ..config.sizes import GIB, gib_text
from ..errors import PlanError, Problem
from ..plan.actions import Tile
from ..plan.saved_bytes import OpCall
from ..plan.tiles import tile_names
from .profile import Limits, Profile

MARGIN_SHARE = 0.03
"""Share of a device, or of a budget on paper, that no tensor of a step takes: for fragments, which are parts
of pages that PyTorch's allocator holds and cannot give back, and for kernels' workspaces. In rehearsal, with
expandable segments, parts of pages took at most 1.3 % of what was allocated (docs/rehearsal.md)."""
_FRAGMENTS_BYTES, _MOST_FRAGMENTS_SHARE = 400 << 20, 0.08
"""What is left to fragments of a named budget at least, but for small budgets no more than this share. Pages
have 20 MiB whatever the step is: in rehearsal parts of 10 to 15 of them stayed, in steps of 7 and 9 GiB."""
HOLES_SHARE = 0.02
"""Share that is left free in addition where the optimizer's states leave during a forward."""


class BudgetError(PlanError):
    """No plan keeps within the budget.

    Attributes:
        least_bytes: the least peak that any plan reaches; 0: no plan was searched.
        budget_bytes: the budget that it was compared with; 0: none.
        peak_at: the call that runs at that peak; ``None``: not known.
    """

    subject = "memory budget"
    least_bytes = 0
    budget_bytes = 0
    peak_at: OpCall | None = None

    def with_hint(self, hint: str) -> BudgetError:
        (problem,) = self.problems
        error = BudgetError([replace(problem, hint=f"{problem.hint} {hint}".strip())])
        error.least_bytes, error.budget_bytes = self.least_bytes, self.budget_bytes
        error.peak_at = self.peak_at
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return (*super().__reduce__(), vars(self))


def limit_bytes(memory: MemoryConfig, device_bytes: int, budget_bytes: int) -> int:
    """Return what may be reserved at a peak: the budget if one is named, else the device's memory.

    A budget that follows from the device leaves a margin of it, for fragments among others.
    """
    named = memory.budget_gib is not None or memory.reduce_by_gib is not None
    return budget_bytes if named else max(device_bytes, budget_bytes)


def budget_bytes(memory: MemoryConfig, device_bytes: int, unplanned_peak_bytes: int) -> int:
    """Return the most device memory that a step may use: ``budget_gib``, less by ``reduce_by_gib``, or the
    device.

    Args:
        device_bytes: the memory that a process can use, the least of all ranks; a margin is left of it.
        unplanned_peak_bytes: the peak of a step with only the fates that are written by hand.

    Raises:
        BudgetError: the reduction is larger than the peak, or the budget larger than the device.
    """
    if memory.budget_gib is not None:
        wanted = round(memory.budget_gib * GIB)
        if wanted > device_bytes:
            most = f"at most {gib_text(device_bytes, math.floor)}, which the device has for this process"
            hint = "Leave it out to use all of it, less a margin."
            raise BudgetError([Problem("memory.budget_gib", most, f"{memory.budget_gib:g} GiB", hint)])
        return wanted
    if memory.reduce_by_gib is not None:
        left = unplanned_peak_bytes - round(memory.reduce_by_gib * GIB)
        if left <= 0:
            peak = f"less than the peak without a plan, {gib_text(unplanned_peak_bytes, math.floor)}"
            raise BudgetError([Problem("memory.reduce_by_gib", peak, f"{memory.reduce_by_gib:g} GiB")])
        return left
    written = memory.margin_gib
    margin = round(MARGIN_SHARE * device_bytes) if written is None else round(written * GIB)
    return device_bytes - margin


def allocatable_bytes(profile: Profile, memory: MemoryConfig, budget: int) -> int:
    """Return how much of ``budget`` tensors may take: measured fragments, or `MARGIN_SHARE`, are left of it.

    On paper that is for a budget that is written. One that follows from the device has its margin for them,
    and one that follows from a reduction is the difference of two peaks, both without fragments.
    """
    if profile.source == "measured":
        return budget - profile.reserved_bytes
    allocatable = budget if memory.budget_gib is None else budget - fragments_of(budget)
    return (
        beside_leaving_states(profile, allocatable) if memory.preference == "memory_saving" else allocatable
    )


def fragments_of(budget: int) -> int:
    """Return what is left of a named budget to the allocator's fragments."""
    return round(max(MARGIN_SHARE * budget, min(_FRAGMENTS_BYTES, _MOST_FRAGMENTS_SHARE * budget)))


def with_fragments(allocated_bytes: int) -> int:
    """Return the least budget, named, in which a step on paper may allocate so much."""
    least = min(allocated_bytes + _FRAGMENTS_BYTES, allocated_bytes / (1 - _MOST_FRAGMENTS_SHARE))
    return math.ceil(max(allocated_bytes / (1 - MARGIN_SHARE), least))


def beside_leaving_states(profile: Profile, allocatable: int) -> int:
    """Return how much tensors may take where the optimizer's states leave during a forward.

    The forward allocates meanwhile, between states that are still there, and what these leave is in pieces:
    of each, the allocator cannot use parts of its 20 MiB pages elsewhere (``kLargeBuffer`` in
    ``c10/cuda/CUDACachingAllocator.cpp``). A profile that was measured has these fragments.
    """
    return allocatable if profile.source == "measured" else allocatable - round(HOLES_SHARE * allocatable)


def budget_for(profile: Profile, memory: MemoryConfig, allocated_bytes: int) -> int:
    """Return the least budget in which a step may allocate so much: `allocatable_bytes` the other way."""
    if profile.source == "measured":
        return allocated_bytes + profile.reserved_bytes
    if memory.preference == "memory_saving":
        allocated_bytes = math.ceil(allocated_bytes / (1 - HOLES_SHARE))
    return allocated_bytes if memory.budget_gib is None else with_fragments(allocated_bytes)


_LEAST_SHARE = 2**-17
"""Share of the budget below which the planner swaps no tensor: a few hundred of these are not worth what a
copy costs the host (some 50 us out, as much back), which in short steps is not hidden."""


def limits_of(memory: MemoryConfig, device_bytes: int, engine_min_bytes: int) -> Limits:
    """Return the limits of a search within the budget ``device_bytes``.

    ``engine_min_bytes``: the engine never swaps smaller tensors.
    """
    bucket, host, least = memory.swap_bucket_size, memory.host_memory_gib, memory.min_tensor_mib
    smallest = max(engine_min_bytes, int(device_bytes * _LEAST_SHARE))
    return Limits(
        device_bytes=device_bytes,
        host_bytes=None if host is None else round(host * GIB),
        min_tensor_bytes=smallest if least is None else round(least * 2**20),
        swap_bucket_bytes=None if bucket < 0 else bucket,
        layers_per_stage=memory.num_attn_layers_per_stage,
        frees_optimizer_states=memory.preference == "memory_saving",
    )


def fits_outside_backward(
    profile: Profile, memory: MemoryConfig, budget: int, states_may_move: bool = False
) -> bool:
    """Return whether ``budget`` suffices outside forward and backward, where tiles change nothing.

    ``states_may_move``: the optimizer's states may also wait on the host where ``memory`` does not say so.
    """
    states_may_move |= memory.preference == "memory_saving"
    moved = profile.optimizer_state_bytes if states_may_move else 0
    return profile.outside_base_bytes - moved <= budget


def impossible(
    memory: MemoryConfig, budget: int, least_bytes: int, unplanned_peak_bytes: int, tiles: Iterable[Tile] = ()
) -> BudgetError:
    """Return the error that names what would be possible, in the unit in which the user asked.

    Args:
        budget: the budget in bytes that follows from ``memory``.
        least_bytes: the least peak that any plan reaches.
        unplanned_peak_bytes: the peak of a step with only the fates that are written by hand.
        tiles: the tiles in which the step runs.
    """
    names = tile_names(tiles)
    tiled = f", with {names} in tiles" if names else ""
    if memory.reduce_by_gib is not None:
        most = gib_text(max(unplanned_peak_bytes - least_bytes, 0), math.floor)
        expected = f"at most {most}, the largest reduction that any plan reaches{tiled}"
        problem = Problem("memory.reduce_by_gib", expected, f"{memory.reduce_by_gib:g} GiB")
    else:
        found = gib_text(budget) if memory.budget_gib is None else f"{memory.budget_gib:g} GiB"
        hint = "Shorter sequences, a smaller batch, or more ranks in the tensor-parallel group need less."
        if memory.preference != "memory_saving":
            hint = "`preference: memory_saving` moves the optimizer's states away too. " + hint
        if memory.mode == "smart_swap" and not tiled:
            hint = "In tiles (`tile_config: {loss: auto}`, or `mode: adaptive`) it needs less. " + hint
        expected = f"at least {gib_text(least_bytes, math.ceil)}, the least that any plan reaches{tiled}"
        problem = Problem("memory.budget_gib", expected, found, hint)
    error = BudgetError([problem])
    error.least_bytes, error.budget_bytes = least_bytes, budget
    return error
