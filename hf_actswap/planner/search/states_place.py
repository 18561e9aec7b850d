"""Chooses where the optimizer's states and frozen weights wait: on the device, or on the host.

On the device states take memory in every micro-batch, and recomputation and swap make up for it in each. On
the host they are copied out and back once for a whole step of the optimizer, however many micro-batches it
has. So the times of whole steps are compared, each with the best plan within the same budget.

Most of these copies are hidden: states leave while the first forward fills the device with activations, and
come back while the last backward frees them (`states.optimizer_states`). How many
(`OptimizerStates.resident_bytes`) follows from the predicted memory over time. The rest passes through the
device in the optimizer's step, which waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ...errors import PlanError
from ...plan.actions import Scope
from ..budget import BudgetError
from ..cost.simulate import outside
from ..profile import OpEvent, Prediction, Profile
from ..states.optimizer_states import part_bytes

WORTH = 0.01
"""Share of a step by which the host must be predicted to be faster: less is within a prediction's error."""
_HOST_MS = 0.4
"""The host's work for the copies of one weight's states, on a host that is neither slow nor fast. On a slow
one, where it was 0.6 ms, it made steps of Whisper-medium 40 % longer; 4 % less had been predicted."""
FEW_STATES = 0.01
"""Share of a step's peak below which states are not worth the two searches for a plan without them."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class WholeStep:
    """A step of the optimizer: all its micro-batches under one plan.

    Args:
        micro_batch: the predicted step of one micro-batch, with its memory over time.
        ms: the time of all of them and of the optimizer.
        resident_bytes: bytes of the optimizer's states that leave in the first forward and come back in the
            last backward; ``None``: as `OptimizerStates` does by default, or all stay.
        peak_bytes: the most device memory in use, with these states.
    """

    micro_batch: Prediction
    ms: float
    resident_bytes: int | None = None
    peak_bytes: int = 0


def whole_step(
    profile: Profile, micro_batch: Prediction, micro_batches: int, states_moved: bool = False
) -> WholeStep:
    """Return the step of ``micro_batches``, given the predicted step of one.

    ``states_moved``: the optimizer's states are on the host meanwhile, and come and go in its step.
    """
    once_ms, _ = outside(profile, profile.link, states_moved)
    ms = micro_batches * (micro_batch.step_ms - once_ms) + once_ms
    return WholeStep(micro_batch, ms, peak_bytes=micro_batch.peak_bytes)


def with_states_in_passing(
    profile: Profile, micro_batch: Prediction, micro_batches: int, limit_bytes: int
) -> WholeStep:
    """Return the step with as many states as fit coming and going in the last backward and the first forward.

    ``micro_batch`` is predicted with the states moved; ``limit_bytes`` is the most device memory in use.
    """
    link, states = profile.link, profile.optimizer_state_bytes
    step = whole_step(profile, micro_batch, micro_batches, True)
    if link is None:
        return step
    once_ms, _ = outside(profile, link, True)
    resident = _resident_bytes(profile, micro_batch, limit_bytes)
    moved_bytes = resident + micro_batch.swapped_bytes
    backward_ms = micro_batch.step_ms - once_ms - micro_batch.forward_end_ms
    both_ways = min(link.in_beside_out_bytes_per_ms, link.out_beside_in_bytes_per_ms)
    waits_bytes = states - resident
    if waits_bytes:  # the first bucket leaves before others come: the states of the largest weight
        waits_bytes += max(part_bytes(resident), int(_share_of_the_largest(profile) * states))
    step_ms = max(profile.outside_ms, waits_bytes / both_ways)
    hidden_ms = _hides_ms(profile) + micro_batch.forward_stall_ms
    leave_ms = max(moved_bytes / link.out_bytes_per_ms - hidden_ms, 0.0)
    return_ms = max(moved_bytes / link.in_bytes_per_ms - backward_ms, 0.0)
    in_step = profile.outside_base_bytes - states + resident
    beside = (used_bytes + round(share * resident) for share, used_bytes in _shares(micro_batch))
    ms = step.ms - once_ms + step_ms + leave_ms + return_ms
    return WholeStep(micro_batch, ms, resident, max(micro_batch.peak_bytes, in_step, *beside))


def _hides_ms(profile: Profile) -> float:
    """Return the time in forward behind which states leave: until the last layer starts.

    In a layer that reads values on the host nothing leaves after the first of these, which waits for all that
    has begun to leave.
    """
    by_layer: dict[Scope | None, list[OpEvent]] = {}
    for op_event in profile.op_events:
        by_layer.setdefault(op_event.call[0], []).append(op_event)
    found_ms = 0.0
    for layer in profile.layers[:-1]:
        ops = by_layer.get(layer, [])
        reads = [place for place, op_event in enumerate(ops) if op_event.reads_values]
        found_ms += sum(op_event.forward_ms for op_event in (ops[: reads[0]] if reads else ops))
    return found_ms


def _share_of_the_largest(profile: Profile) -> float:
    """Return the largest gradient's share of all gradients; 0 where they are not known."""
    made = sorted({0, *profile.gradient_bytes})
    return max((after - before for before, after in pairwise(made)), default=0) / (made[-1] or 1)


def _weights(profile: Profile) -> int:
    """Return how many weights are trained, 0 where it is not known: by how often gradients become more."""
    return len({0, *profile.gradient_bytes}) - 1


def _resident_bytes(profile: Profile, step: Prediction, limit_bytes: int) -> int:
    """Return the most bytes of states that may leave during a forward, and come back during a backward."""
    states = profile.optimizer_state_bytes
    resident = min(states, limit_bytes - (profile.outside_base_bytes - states))
    for share, used_bytes in _shares(step):
        if share > 0:
            resident = min(resident, int((limit_bytes - used_bytes) / share))
    return max(resident, 0)


def _shares(step: Prediction) -> Iterator[tuple[float, int]]:
    """Yield, over time, the share of the resident states on the device, and the bytes in use beside it."""
    ends_ms = max((point.ms for point in step.memory), default=0.0)
    for point in step.memory:
        if point.ms < step.forward_end_ms:
            yield 1 - point.ms / step.forward_end_ms, point.total_bytes
        else:
            backward_ms = max(ends_ms - step.forward_end_ms, 1e-9)
            yield (point.ms - step.forward_end_ms) / backward_ms, point.total_bytes


Placed = tuple[Result, WholeStep]
"""What a search has found, and the optimizer's step under it."""


def with_states_on_host(
    profile: Profile,
    micro_batches: int,
    host_bytes: int | None,
    kept: WholeStep | None,
    search: Callable[[bool], Placed[Result]],
) -> Placed[Result] | None:
    """Return the best plan with the optimizer's states on the host, if its step is faster than ``kept``.

    It must be so by 1 %, and by more than the host's work for the copies, which may not be hidden.
    If ``kept`` is ``None``, because nothing fits with them on the device, any plan will do.

    Nothing is searched where no plan could be faster, the time of copies is not known, or the states need
    more host memory than there is, nor for states as few as those of adapters (`FEW_STATES`).

    Args:
        kept: the optimizer's step under the best plan with the states on the device.
        search: searches the best plan with the states on the host, with swap or without: in the first forward
            and the last backward swapped tensors and states share the link. It may raise `BudgetError`.
    """
    states = profile.optimizer_state_bytes
    least = 0.0 if kept is None else FEW_STATES * kept.micro_batch.peak_bytes
    can_move = profile.link is not None and states > least and (host_bytes is None or states <= host_bytes)
    best: Placed[Result] | None = None
    worth_ms = 0.0 if kept is None else max(WORTH * kept.ms, _HOST_MS * _weights(profile))
    most_ms = math.inf if kept is None else kept.ms - worth_ms
    if can_move and micro_batches * profile.compute_ms + profile.outside_ms < most_ms:
        with suppress(BudgetError):  # with swap; without it no more plans fit
            for swaps in (True, False):
                found = search(swaps)
                if found[1].ms < (most_ms if best is None else best[1].ms):
                    best = found
    return best


def faster_with_weights_on_host(
    kept_ms: float,
    least_ms: float,
    search: Callable[[], tuple[Result, float]],
    in_words: Callable[[float, float, str], str],
) -> tuple[Result | None, str]:
    """Return the best plan with frozen weights on the host, if its step is 1 % faster, and the reason.

    ``None``: they stay on the device.

    Args:
        kept_ms: a step under the best plan with the weights on the device.
        least_ms: the least that a step takes, wherever they are.
        search: returns the best plan with the weights on the host, and its step's time. It may raise
            `PlanError`.
        in_words: says that a step takes the first time, and the second one with the weights in that place.
    """
    most_ms = (1 - WORTH) * kept_ms
    if least_ms >= most_ms:
        return None, "nothing is slower with them there"
    try:
        moved, moved_ms = search()
    except PlanError:
        return None, "they cannot wait on the host, or nothing fits so"
    if moved_ms > most_ms:
        return None, in_words(kept_ms, moved_ms, "host")
    return moved, in_words(moved_ms, kept_ms, "device")
