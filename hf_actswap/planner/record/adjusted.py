"""Adjusts the profile of a step to what else a training keeps on the device or moves over the link.

A step on paper holds whole weights, and gradients in the weights' own type. `with_baseline` replaces their
bytes, in each op event, by what one rank of a training keeps; beside that only the optimizer's time changes.
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

from ...engine.frozen_weights import LAYERS_AHEAD, step_bytes, window_bytes
from ...plan.actions import Scope, is_layer
from ...plan.model_structure import is_below
from ..profile import Places, Profile


@dataclass(frozen=True)
class Baseline:
    """How one rank keeps weights and gradients on its device.

    Args:
        layer_bytes: bytes of the largest layer's weights, in the type in which they are kept.
        other_bytes: bytes of all weights outside the layers.
        gradient_scale: bytes in which a complete gradient is kept, divided by those that backward makes.
        stage: stage of ZeRO, 0 to 3: 1 shards the optimizer's states, 2 also gradients, 3 also weights.
        kept_bytes: bytes of all weights in the type in which their shards are kept.
        stays: whether gathered weights stay until backward.
        summed_as_kept: whether a layer's whole gradients are copied into the type in which they are kept, to
            be summed (FSDP2's ``reduce_dtype``); else they are summed as backward makes them.
        passing: temporary bytes that the ops of a module need in addition, such as dequantised weights:
            (scope, path in the layer) -> bytes.
        passing_ms: the time that making them takes in each forward and in each backward of the module.
    """

    layer_bytes: int
    other_bytes: int
    weight_bytes: int
    kept_bytes: int
    gradient_scale: Fraction = Fraction(1)
    stage: int = 0
    ranks: int = 1
    stays: bool = False
    summed_as_kept: bool = False
    passing: Mapping[tuple[Scope, str], int] = field(default_factory=dict)
    passing_ms: Mapping[tuple[Scope, str], float] = field(default_factory=dict)

    @property
    def running_bytes(self) -> int:
        """Bytes of weights on the device all through forward and backward: shards, what stays gathered.

        That is what is outside the layers: in FSDP1, and in FSDP2 with Accelerate before 1.14. Later the
        embedding leaves when it has run.
        """
        if self.stage < 3:
            return self.weight_bytes
        return self.resting_bytes + (self.weight_bytes if self.stays else self.other_bytes)

    def gathered_bytes(self, scope: Scope | None) -> tuple[int, int]:
        """Bytes of layers' weights that are gathered while a scope runs: in forward, and in backward.

        A layer's own, and those that it gathers ahead. The head's backward gathers those of the last layer.
        """
        if self.stage < 3 or self.stays:
            return 0, 0
        return (2 * self.layer_bytes,) * 2 if is_layer(scope) else (0, self.layer_bytes)

    @property
    def resting_bytes(self) -> int:
        """Bytes of weights on the device between steps."""
        return self.weight_bytes if self.stage < 3 else _shard(self.kept_bytes, self.ranks)


def with_baseline(profile: Profile, baseline: Baseline) -> Profile:
    """Return the profile of the same step with weights, gradients and states kept as ``baseline`` says.

    ``profile`` is computed from shapes, so that it knows weights and gradients, and has no gradients of an
    earlier micro-batch.
    """
    ranks = baseline.ranks
    states = _shard(profile.optimizer_state_bytes, ranks if baseline.stage else 1)
    gradients = _gradients(profile, baseline)
    weights = baseline.running_bytes - profile.weight_bytes
    less = weights + states - profile.optimizer_state_bytes
    op_events = tuple(
        replace(
            op_event,
            forward_base_bytes=max(op_event.forward_base_bytes + less + passing + gathered[0], 0),
            backward_base_bytes=max(
                op_event.backward_base_bytes + less + passing + gathered[1] + after - before, 0
            )
            if op_event.backward_place >= 0
            else op_event.backward_base_bytes,
            forward_ms=op_event.forward_ms + more_ms,
            backward_ms=op_event.backward_ms + (more_ms if op_event.backward_place >= 0 else 0),
        )
        for op_event, before, after, passing, more_ms, gathered in zip(
            profile.op_events,
            profile.gradient_bytes,
            gradients,
            (_passing(baseline, *op_event.call[:2]) for op_event in profile.op_events),
            _passing_ms(profile, baseline),
            (baseline.gathered_bytes(op_event.call[0]) for op_event in profile.op_events),
            strict=False,
        )
    )
    at_rest = baseline.resting_bytes - profile.weight_bytes
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


def with_weights_on_host(profile: Profile, sizes_bytes: Mapping[Scope, int]) -> Profile:
    """Return the profile of the same step with frozen weights of layers on the host (`FrozenWeights`).

    On the device is the largest window of layers, at every moment. A layer waits for its copy where that
    takes longer than the layer before it computes; recomputation, which the profile does not know, would
    hide more.

    ``profile`` is computed from shapes, with all weights on the device. ``sizes_bytes`` are the bytes of each
    such layer, in the order of forward.
    """
    less = sum(sizes_bytes.values()) - window_bytes(list(sizes_bytes.values()))
    forward_ms: dict[Scope | None, float] = {}
    backward_ms: dict[Scope | None, float] = {}
    if (link := profile.link) is not None:
        ahead, back = profile.scope_ms()
        copies_ms = {scope: link.in_ms(size) for scope, size in sizes_bytes.items()}
        forward_ms = _waits_ms(copies_ms, ahead)
        backward_ms = _waits_ms(dict(reversed(copies_ms.items())), back)
    op_events = []
    for op_event in profile.op_events:
        scope = op_event.call[0]  # its first op event waits
        op_events.append(
            replace(
                op_event,
                forward_ms=op_event.forward_ms + forward_ms.pop(scope, 0.0),
                backward_ms=op_event.backward_ms + backward_ms.pop(scope, 0.0),
                forward_base_bytes=max(op_event.forward_base_bytes - less, 0),
                backward_base_bytes=max(op_event.backward_base_bytes - less, 0),
            )
        )
    there = replace(
        profile,
        op_events=tuple(op_events),
        weight_bytes=profile.weight_bytes - less,
        outside_base_bytes=max(profile.outside_base_bytes - less, 0),
    )
    return with_link_beside_weights(there, sizes_bytes)


def with_link_beside_weights(profile: Profile, sizes_bytes: Mapping[Scope, int]) -> Profile:
    """Return the profile with the rates that copies of frozen weights leave to swapped tensors.

    Weights come in during forward, beside what is swapped out, and during backward, where they take their
    share of the time in which swapped tensors come back.

    The times of ``profile`` include waits for weights, and its link has its whole rates. ``sizes_bytes`` are
    those of each layer's frozen weights on the host; empty: nothing is changed.
    """
    link = profile.link
    if link is None or not sizes_bytes:
        return profile
    of_layers = [op_event for op_event in profile.op_events if op_event.call[0] in sizes_bytes]
    copies_ms = step_bytes(list(sizes_bytes.values())) / 2 / link.in_bytes_per_ms
    forward = _share(copies_ms, sum(op_event.forward_ms for op_event in of_layers))
    left = max(1 - _share(copies_ms, sum(op_event.backward_ms for op_event in of_layers)), _LEAST_LINK_SHARE)
    link = replace(
        link,
        out_bytes_per_ms=(1 - forward) * link.out_bytes_per_ms + forward * link.out_beside_in_bytes_per_ms,
        in_bytes_per_ms=link.in_bytes_per_ms * left,
        in_beside_out_bytes_per_ms=link.in_beside_out_bytes_per_ms * left,
    )
    return replace(profile, link=link)


def with_link_beside_collectives(profile: Profile, forward_ms: float, backward_ms: float) -> Profile:
    """Return the profile with the rates that collectives leave to swapped tensors on the same link.

    ``forward_ms`` and ``backward_ms`` are the times of the collectives, which send and receive at once.
    """
    if (link := profile.link) is None:
        return profile
    forward = max(1 - _share(forward_ms, sum(one.forward_ms for one in profile.op_events)), _LEAST_LINK_SHARE)
    back = max(1 - _share(backward_ms, sum(one.backward_ms for one in profile.op_events)), _LEAST_LINK_SHARE)
    link = replace(
        link,
        out_bytes_per_ms=link.out_bytes_per_ms * forward,
        in_bytes_per_ms=link.in_bytes_per_ms * back,
        out_beside_in_bytes_per_ms=link.out_beside_in_bytes_per_ms * forward,
        in_beside_out_bytes_per_ms=link.in_beside_out_bytes_per_ms * back,
    )
    return replace(profile, link=link)


def _share(copies_ms: float, ms: float) -> float:
    return min(copies_ms / ms, 1.0) if ms > 0 else 1.0


def with_optimizer_in_backward(
    profile: Profile, accumulated: bool, resident_bytes: int = 0, step_scale: float = 0.0
) -> Profile:
    """Return the profile of the same step with each parameter stepped in backward (`OptimizerInBackward`).

    Of complete gradients none is there, but those of earlier micro-batches: these are all there while the
    first micro-batches and forward run.

    Args:
        profile: a profile computed from shapes, so that it knows the gradients.
        accumulated: whether a step has several micro-batches.
        resident_bytes: bytes of states on the device in backward, where the others wait on the host.
        step_scale: what a parameter's step allocates and frees again, as a multiple of its gradient.
    """
    gradients = profile.gradient_bytes
    reached = Places(profile.op_events).order
    more = dict.fromkeys(range(len(profile.op_events)), 0)
    for at, following in zip(reached, [*reached[1:], -1], strict=True):
        made = max(gradients[following] - gradients[at], 0)
        freed = 0 if accumulated else gradients[at]
        more[at] = resident_bytes + int(step_scale * made) - freed
    op_events = tuple(
        replace(item, backward_base_bytes=max(item.backward_base_bytes + more[at], 0))
        for at, item in enumerate(profile.op_events)
    )
    there = gradients[:-1] if accumulated else (0,) * (len(gradients) - 1)
    return replace(
        profile,
        op_events=op_events,
        gradient_bytes=(*there, 0),
        outside_base_bytes=max(profile.outside_base_bytes - gradients[-1], 0),
    )


_LEAST_LINK_SHARE = 0.02
"""Least share of the link that is left to swapped tensors: a `Link` has rates above 0."""


def _waits_ms(
    copies_ms: Mapping[Scope, float], compute_ms: Mapping[Scope | None, float]
) -> dict[Scope | None, float]:
    """Return how long each layer waits for its weights, in the order in which layers run.

    The first layers of the window are on the device. Each later copy begins when the layer `LAYERS_AHEAD`
    before its own begins, and ends one after another on the link.
    """
    began: list[float] = []
    waits: dict[Scope | None, float] = {}
    now_ms = link_ms = 0.0
    for at, (scope, copy_ms) in enumerate(copies_ms.items()):
        arrived_ms = 0.0
        if at > LAYERS_AHEAD:
            link_ms = arrived_ms = max(link_ms, began[at - LAYERS_AHEAD]) + copy_ms
        waits[scope] = max(arrived_ms - now_ms, 0.0)
        now_ms = max(now_ms, arrived_ms)
        began.append(now_ms)
        now_ms += compute_ms[scope]
    return waits


def _gradients(profile: Profile, baseline: Baseline) -> tuple[int, ...]:
    """Return `Profile.gradient_bytes` as they are kept: shards of what is scattered, the rest whole."""
    if baseline.stage < 2:
        return tuple(int(size * baseline.gradient_scale) for size in profile.gradient_bytes)
    found = [0] * len(profile.gradient_bytes)
    whole = baseline.gradient_scale if baseline.summed_as_kept else 1
    outside = own = flying = scattered = 0
    running: Scope | None = None
    numbers = Places(profile.op_events).order
    for number, following in zip(numbers, [*numbers[1:], -1], strict=True):
        scope = profile.op_events[number].call[0]
        if is_layer(scope) and scope != running:
            running, scattered, flying, own = scope, scattered + flying, own, 0
        rests = int(scattered * baseline.gradient_scale)
        found[number] = outside + own + int(flying * whole) + _shard(rests, baseline.ranks)
        made = max(profile.gradient_bytes[following] - profile.gradient_bytes[number], 0)
        if is_layer(scope):
            own += made
        else:
            outside += made
    found[-1] = _shard(int(profile.gradient_bytes[-1] * baseline.gradient_scale), baseline.ranks)
    return tuple(found)


def _passing(baseline: Baseline, scope: Scope | None, path: str) -> int:
    items = baseline.passing.items()
    return max((size for (at, root), size in items if at == scope and is_below(path, root)), default=0)


def _passing_ms(profile: Profile, baseline: Baseline) -> Iterator[float]:
    """Yield the time that is added to each op event: to the first of each module in `Baseline.passing_ms`."""
    waiting = dict(baseline.passing_ms)
    for op_event in profile.op_events:
        scope, path, _ = op_event.call
        found = [key for key in waiting if key[0] == scope and is_below(path, key[1])]
        yield sum(waiting.pop(key) for key in found)


def _shard(size_bytes: int, ranks: int) -> int:
    return -(-size_bytes // ranks)
