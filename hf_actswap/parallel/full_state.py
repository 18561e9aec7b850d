"""Saves and loads a divided model as a whole state dict, in Hugging Face's names and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from .data_sharding import sharded_as, whole_over_data
from .sequence_region import SequenceRegion
from .sharded_module import partitions_in
from .weights import Partition, whole_of_ranks

Item = TypeVar("Item")

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and the bytes in all."""


def partitions_of(model: nn.Module) -> Iterator[tuple[str, Partition]]:
    """Yield name and division of each divided parameter, tied ones under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, partition in partitions_in(module).items():
            if module._parameters.get(name) is not None:
                yield f"{path}.{name}" if path else name, partition


def gather_full_state(
    model: nn.Module,
    region: SequenceRegion,
    wanted: Callable[[str], bool],
    keeps: bool,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Return whole tensors on the CPU; every rank of the group, and of FSDP2's mesh, must call it.

    Args:
        model: a patched model.
        region: says where the model's hidden states are parts of the sequence.
        wanted: tells by name whether a tensor is returned; the same on every rank.
        keeps: whether this rank gets the result; other ranks only take part, and get an empty dict.
        progress: called with how many bytes of this rank's tensors are gathered, and how many there are.
    """
    group, partitions = region.group, dict(partitions_of(model))
    full: dict[str, torch.Tensor] = {}
    by_tensor: dict[int, str] = {}
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and wanted(name)
    }
    for name, tensor in with_progress(state.items(), [tensor.nbytes for tensor in state.values()], progress):
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


def with_progress(items: Iterable[Item], sizes: Sequence[int], progress: Progress | None) -> Iterator[Item]:
    """Yield items, and report after each how many bytes are done.

    Args:
        items: the items to yield.
        sizes: bytes of each item.
        progress: called with (bytes done, bytes in all); ``None``: no report.
    """
    total, done = sum(sizes), 0
    for item, size_bytes in zip(items, sizes, strict=True):
        yield item
        done += size_bytes
        if progress is not None:
            progress(done, total)


def own_state(
    model: nn.Module, region: SequenceRegion, full: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's parts of whole tensors, by the same names; under FSDP2 its shards of them.

    Raises:
        ValueError: a tensor does not have the shape of the whole parameter.
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
