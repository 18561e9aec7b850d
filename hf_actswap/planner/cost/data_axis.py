"""Predicts the collectives of a step of data-parallel ranks: their bytes, and how long they take.

Layers are units, and what is outside of them is one more. Who waits for what is as in FSDP2
(``torch.distributed.fsdp.fully_shard``, "implicit prefetching") and in DeepSpeed and DDP with overlap:

* Sharded weights are gathered layer by layer. A layer's are on their way while the layer before it computes;
  compute waits for the first layer's, and for those outside of layers, which stay until backward has ended.
* Backward gathers them once more, in the other order, unless they stay (``reshard_after_forward=False``).
* A layer's gradients are summed while the layer before it computes its own. After the first layer's, and
  those outside of layers, nothing is left to compute.
* Where only states are sharded (ZeRO 1 and 2), weights are gathered after the optimizer's step.

The two collectives beside one layer's backward share the fabric. With DDP gradients are summed likewise; its
buckets are smaller than most layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from ...plan.actions import Scope
from ..devices import Fabric
from ..profile import Profile
from .exchanges import Exchange, Kind


class Unit(NamedTuple):
    """Bytes of a unit's weights, of those that are trained, and of their gradients as they are summed."""

    weight_bytes: int
    trained_bytes: int
    gradient_bytes: int


def units_of(
    root: nn.Module, layers: Mapping[Scope, nn.Module], unit: Callable[[Iterable[nn.Parameter]], Unit]
) -> tuple[dict[Scope, Unit], Unit]:
    """Return the units of the layers, and that of what is outside of them; ``unit`` makes one of weights."""
    inside = {id(weight) for layer in layers.values() for weight in layer.parameters()}
    outside = unit(weight for weight in root.parameters() if id(weight) not in inside)
    return {scope: unit(layer.parameters()) for scope, layer in layers.items()}, outside


def data_axis(
    profile: Profile,
    layers: Mapping[Scope, Unit],
    outside: Unit,
    stage: int,
    stays: bool,
    ranks: int,
    fabric: Fabric,
) -> Iterator[Exchange]:
    """Yield the exchanges of one step of a rank.

    Args:
        profile: a step without a plan, which gives times. Recomputation would hide more.
        layers: in the order of forward.
        outside: all other weights.
        stage: stage of ZeRO, 0 to 3.
        stays: whether gathered weights of layers stay until backward.
    """
    forward_ms, backward_ms = profile.scope_ms()
    if stage == 3:
        yield Exchange("forward", "all_gather", outside.weight_bytes)
        before: Scope | None = None
        for scope, unit in layers.items():
            beside_ms = 0.0 if before is None else forward_ms[before]
            yield Exchange("forward", "all_gather", unit.weight_bytes, beside_ms)
            before = scope
    sums: Kind = "reduce_scatter" if stage else "all_reduce"
    gathers = stage == 3 and not stays
    waiting = 0  # gradients of the layer whose backward has just ended
    order: list[Scope] = ["head", *reversed(list(layers))]
    for scope, following in zip(order, [*order[1:], None], strict=True):
        left_ms = backward_ms[scope]
        if waiting:
            summed = Exchange("backward", sums, waiting, left_ms)
            left_ms = max(left_ms - summed.ms(ranks, fabric), 0.0)
            yield summed
        if gathers and following is not None:
            yield Exchange("backward", "re-gather", layers[following].weight_bytes, left_ms)
        waiting = layers[scope].gradient_bytes if scope in layers else 0
    for size_bytes in (waiting, outside.gradient_bytes):
        if size_bytes:
            yield Exchange("after backward", sums, size_bytes)
    if stage in (1, 2):
        for unit in (*layers.values(), outside):
            if unit.trained_bytes:
                yield Exchange("after backward", "all_gather", unit.trained_bytes)
