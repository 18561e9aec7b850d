"""State dicts in Hugging Face's names and shapes, of a model that the ranks hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .data_sharding import sharded_as, whole_over_data
from .sequence_region import SequenceRegion
from .sharded_module import ShardedModule
from .weights import Partition, whole_of_ranks


class FullLoadHook:
    """Load hook of a module that is not ours: takes the rank's part of full tensors.

    Args:
        partitions: parameter -> how it is divided.
        region: of the model.
    """

    def __init__(self, partitions: Mapping[str, Partition], region: SequenceRegion) -> None:
        self.partitions, self._region = dict(partitions), region

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, partition in self.partitions.items():
            given, own = state.get(prefix + name), module._parameters.get(name)
            if given is not None and own is not None and given.shape != own.shape:
                state[prefix + name] = partition.part(given, self._region.group.rank())


def partitions_of(model: nn.Module) -> Iterator[tuple[str, Partition]]:
    """Yield name and division of each divided parameter, tied ones under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        found: dict[str, Partition] = dict(module.partitions) if isinstance(module, ShardedModule) else {}
        for hook in module._load_state_dict_pre_hooks.values():
            inner: Any = getattr(hook, "hook", hook)
            if isinstance(inner, FullLoadHook):
                found.update(inner.partitions)
        for name, partition in found.items():
            if module._parameters.get(name) is not None:
                yield f"{path}.{name}" if path else name, partition


def gather_full_state(
    model: nn.Module, region: SequenceRegion, wanted: Callable[[str], bool], keeps: bool
) -> dict[str, torch.Tensor]:
    """Return whole tensors on the CPU; every rank of the group, and of FSDP2's mesh, must call it.

    Args:
        model: patched.
        region: of the model.
        wanted: by name; the same on every rank.
        keeps: this rank wants the result; else it only takes part, and gets an empty dict.
    """
    group, partitions = region.group, dict(partitions_of(model))
    full: dict[str, torch.Tensor] = {}
    by_tensor: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or not wanted(name):
            continue
        before = by_tensor.setdefault(id(tensor), name)
        if before != name:
            if keeps:
                full[name] = full[before]
            continue
        found, partition = whole_over_data(tensor.detach()), partitions.get(name)
        if partition is not None:
            found = whole_of_ranks(found, partition, group)
        if keeps:
            full[name] = found.cpu().clone()
    return full


def own_state(
    model: nn.Module, region: SequenceRegion, full: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's parts of whole tensors, by the same names; under FSDP2 its shards of them.

    Raises:
        ValueError: a tensor has not the shape of the whole.
    """
    rank, partitions = region.group.rank(), dict(partitions_of(model))
    present = model.state_dict(keep_vars=True)
    own = {}
    for name, tensor in full.items():
        partition = partitions.get(name)
        if partition is not None and not partition.fits(tensor.shape):
            raise ValueError(
                f"{name}: expected {partition.full_size} in dim {partition.dim}, found {list(tensor.shape)}"
            )
        part = tensor if partition is None else partition.part(tensor, rank)
        own[name] = sharded_as(part, present[name]) if name in present else part
    return own
