"""Computes the step of one rank of FSDP2 from that of a whole model on fake tensors.

The model is there, sharded: shards, types and groups are read off it (`plan --shard` assumes them). Each
decoder layer must be a group of FSDP2 by itself; of other divisions nothing is known here. Where groups of
ranks hold replicas (HSDP), the time of the sum over these is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...plan.gathered import gathered_dtypes, summed_dtypes
from ...plan.model_structure import ModelStructure
from ...plan.wrappers import FSDP2_METHOD
from ..cost.data_axis import Unit, data_axis, units_of
from ..cost.exchanges import exchanged
from ..devices import Fabric
from ..profile import Profile
from .adjusted import Baseline, with_baseline


def of_one_rank(
    profile: Profile, root: nn.Module, structure: ModelStructure, fabric: Fabric | None
) -> Profile | None:
    """Return the profile of one rank's step; ``None``: how the model is divided is not known.

    Args:
        profile: the step computed from shapes, with whole weights, gradients and states.
        fabric: link between the ranks; ``None``: their collectives take no time.
    """
    layers = structure.layer_modules(root)
    weights = list(root.parameters())
    ranks = _ranks(weights)
    if ranks is None or not all(hasattr(type(layer), FSDP2_METHOD) for layer in layers.values()):
        return None
    units, outside = units_of(root, layers, _Units(root).of)
    all_units = [*units.values(), outside]
    made = sum(one.trained_bytes for one in all_units)
    kept = sum(weight.numel() * weight.element_size() for weight in weights if weight.requires_grad)
    resting = sum(map(_local_bytes, weights))
    baseline = Baseline(
        layer_bytes=max(one.weight_bytes for one in units.values()),
        other_bytes=profile.weight_bytes - sum(one.weight_bytes for one in units.values()),
        weight_bytes=profile.weight_bytes,
        kept_bytes=resting * ranks,
        gradient_scale=Fraction(kept, made) if made else Fraction(1),
        stage=3,
        ranks=ranks,
        stays=not structure.gathers_again,
        summed_as_kept=sum(one.gradient_bytes for one in all_units) > made,
    )
    profile = with_baseline(profile, baseline)
    if fabric is None:
        return profile
    told = exchanged(data_axis(profile, units, outside, 3, baseline.stays, ranks, fabric), ranks, fabric)
    return replace(profile, outside_ms=profile.outside_ms + told.added_ms)


class _Units:
    def __init__(self, root: nn.Module) -> None:
        gathered, summed = dict(gathered_dtypes(root)), dict(summed_dtypes(root))
        self._types = {}
        for name, weight in root.named_parameters():
            place = name.rpartition(".")[0]
            computed = gathered.get(place) or weight.dtype
            self._types[id(weight)] = computed.itemsize, (summed.get(place) or computed).itemsize

    def of(self, weights: Iterable[nn.Parameter]) -> Unit:
        gathered = trained = summed = 0
        for weight in weights:
            computed, reduced = self._types[id(weight)]
            gathered += weight.numel() * computed
            trained += weight.numel() * computed if weight.requires_grad else 0
            summed += weight.numel() * reduced if weight.requires_grad else 0
        return Unit(gathered, trained, summed)


def _ranks(weights: Iterable[Any]) -> int | None:
    """Return over how many ranks weights are sharded; ``None``: over none, or several dimensions."""
    meshes = {
        (weight.device_mesh, at)
        for weight in weights
        if isinstance(weight, DTensor)
        for at, place in enumerate(weight.placements)
        if place.is_shard()
    }
    sizes = {mesh.size(at) for mesh, at in meshes}
    return sizes.pop() if len(meshes) == 1 else None


def _local_bytes(weight: Any) -> int:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return int(local.nbytes)
