"""Collectives on plain tensors along any dim: out of place, contiguous results, no autograd.

Fake tensors (a forward that only records what a model does) get fake results, and nobody is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor


def gathered(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks in order along ``dim``: ``[.., n, ..]`` to ``[.., tp n, ..]``."""
    front = _dim_to_front(part, dim)
    whole = front.new_empty((front.shape[0] * group.size(), *front.shape[1:]))
    if not isinstance(part, FakeTensor):
        _collective("all_gather_single", "all_gather_into_tensor")(whole, front, group=group)
    return whole.movedim(0, dim).contiguous()


def reduce_scattered(whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum over all ranks.

    Raises:
        ValueError: the size along ``dim`` does not divide by the group size.
    """
    _check_divisible(whole, dim, group)
    front = _dim_to_front(whole, dim)
    part = front.new_empty((front.shape[0] // group.size(), *front.shape[1:]))
    if not isinstance(whole, FakeTensor):
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(part, front, group=group)
    return part.movedim(0, dim).contiguous()


def all_reduced(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over all ranks; ``tensor`` stays as it is."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    if not isinstance(tensor, FakeTensor):
        dist.all_reduce(total, group=group)
    return total


def own_part(whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part along ``dim``, in a storage of its own: a view would keep the whole alive.

    Raises:
        ValueError: the size along ``dim`` does not divide by the group size.
    """
    _check_divisible(whole, dim, group)
    return whole.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _dim_to_front(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.movedim(dim, 0).contiguous()


def _check_divisible(whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> None:
    if whole.shape[dim] % group.size():
        raise ValueError(
            f"dim {dim} of a tensor {list(whole.shape)} does not divide by {group.size()} "
            "tensor-parallel ranks"
        )


def _collective(name: str, name_before: str) -> Callable[..., Any]:
    """The collective by its name since torch 2.13, or by its name before (deprecated since)."""
    found: Callable[..., Any] | None = getattr(dist, name, None)
    return found if found is not None else getattr(dist, name_before)
