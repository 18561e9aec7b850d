"""Changes a profile from shapes to one rank's of several, or to other types of weights and gradients.

A step on fake tensors holds whole weights, and gradients in the weights' own type. Here their bytes are
replaced, in each op event, by what a training keeps; beside that only the optimizer's time changes.

The stages of ZeRO shard over N ranks: 1 the optimizer's states, 2 gradients too, 3 weights too (Rajbhandari
et al., ZeRO, 2020, section 3 and figure 1). Shards follow FSDP2's rules (torch/distributed/fsdp): weights
outside the layers are gathered from their forward to the end of backward; of the layers, those of the running
one and of the one that is gathered ahead; gradients of a layer are whole until they are scattered, while the
next layer runs. This is counted in every op event, also where there is no second layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ...plan.actions import Scope
from ...plan.model_structure import is_below
from ..profile import Profile


@dataclass(frozen=True)
class Baseline:
    """How one rank keeps weights and gradients on its device.

    Args:
        layer_bytes: bytes of the largest layer's weights, in the type in which they are kept.
        other_bytes: bytes of all weights outside the layers.
        weight_bytes: bytes of all weights.
        gradient_scale: bytes in which a complete gradient is kept, divided by those that backward makes.
        stage: stage of ZeRO, 0 to 3: 1 shards the optimizer's states, 2 also gradients, 3 also weights.
        ranks: number of ranks over which they are sharded.
        passing: temporary bytes that the ops of a module need in addition, such as dequantised weights:
            (scope, path in the layer) -> bytes.
        passing_ms: the time that making them takes in each forward and in each backward of the module.
    """

    layer_bytes: int
    other_bytes: int
    weight_bytes: int
    gradient_scale: Fraction = Fraction(1)
    stage: int = 0
    ranks: int = 1
    passing: Mapping[tuple[Scope, str], int] = field(default_factory=dict)
    passing_ms: Mapping[tuple[Scope, str], float] = field(default_factory=dict)

    @property
    def running_bytes(self) -> int:
        """Bytes of weights on the device in forward and backward: the shard, and what is gathered."""
        if self.stage < 3:
            return self.weight_bytes
        gathered = min(self.other_bytes + 2 * self.layer_bytes, self.weight_bytes)
        return gathered + _shard(self.weight_bytes - gathered, self.ranks)


def with_baseline(profile: Profile, baseline: Baseline) -> Profile:
    """Return the profile of the same step with weights, gradients and states kept as ``baseline`` says.

    Args:
        profile: a profile computed from shapes, so that it knows weights and gradients; without gradients of
            an earlier micro-batch.
        baseline: how one rank keeps them.
    """
    ranks = baseline.ranks
    states = _shard(profile.optimizer_state_bytes, ranks if baseline.stage else 1)
    gradients = _gradients(profile, baseline)
    weights = baseline.running_bytes - profile.weight_bytes
    less = weights + states - profile.optimizer_state_bytes
    op_events = tuple(
        replace(
            op_event,
            forward_base_bytes=max(op_event.forward_base_bytes + less + passing, 0),
            backward_base_bytes=max(op_event.backward_base_bytes + less + passing + after - before, 0)
            if op_event.backward_place >= 0
            else op_event.backward_base_bytes,
            forward_ms=op_event.forward_ms + more_ms,
            backward_ms=op_event.backward_ms + (more_ms if op_event.backward_place >= 0 else 0),
        )
        for op_event, before, after, passing, more_ms in zip(
            profile.op_events,
            profile.gradient_bytes,
            gradients,
            (_passing(baseline, *op_event.call[:2]) for op_event in profile.op_events),
            _passing_ms(profile, baseline),
            strict=False,
        )
    )
    at_rest = _shard(baseline.weight_bytes, ranks if baseline.stage == 3 else 1) - profile.weight_bytes
    outside = at_rest + states - profile.optimizer_state_bytes + gradients[-1] - profile.gradient_bytes[-1]
    return replace(
        profile,
        op_events=op_events,
        weight_bytes=baseline.running_bytes,
        gradient_bytes=gradients,
        optimizer_state_bytes=states,
        outside_base_bytes=max(profile.outside_base_bytes + outside, 0),
        outside_ms=profile.outside_ms / (ranks if baseline.stage else 1),
    )


def _gradients(profile: Profile, baseline: Baseline) -> tuple[int, ...]:
    """Return `Profile.gradient_bytes` as they are kept: shards of what is scattered, the rest whole."""
    if baseline.stage < 2:
        return tuple(int(size * baseline.gradient_scale) for size in profile.gradient_bytes)
    found = [0] * len(profile.gradient_bytes)
    outside = own = flying = scattered = 0
    running: Scope | None = None
    reached = sorted(
        (op_event.backward_place, number)
        for number, op_event in enumerate(profile.op_events)
        if op_event.backward_place >= 0
    )
    numbers = [number for _, number in reached]
    for number, following in zip(numbers, [*numbers[1:], -1], strict=True):
        scope = profile.op_events[number].call[0]
        if isinstance(scope, int) and scope != running:
            running, scattered, flying, own = scope, scattered + flying, own, 0
        rests = int(scattered * baseline.gradient_scale)
        found[number] = outside + own + flying + _shard(rests, baseline.ranks)
        made = max(profile.gradient_bytes[following] - profile.gradient_bytes[number], 0)
        if isinstance(scope, int):
            own += made
        else:
            outside += made
    found[-1] = _shard(int(profile.gradient_bytes[-1] * baseline.gradient_scale), baseline.ranks)
    return tuple(found)


def _passing(baseline: Baseline, scope: Scope | None, path: str) -> int:
    return max(
        (size for (at, module), size in baseline.passing.items() if at == scope and is_below(path, module)),
        default=0,
    )


def _passing_ms(profile: Profile, baseline: Baseline) -> Iterator[float]:
    """Yield the time that is added to each op event: to the first of each module in `Baseline.passing_ms`."""
    waiting = dict(baseline.passing_ms)
    for op_event in profile.op_events:
        scope, path, _ = op_event.call
        found = [key for key in waiting if key[0] == scope and is_below(path, key[1])]
        yield sum(waiting.pop(key) for key in found)


def _shard(size_bytes: int, ranks: int) -> int:
    return -(-size_bytes // ranks)
