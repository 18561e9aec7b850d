"""Small tools of the layer cases: the same data on every rank, parts of it, comparisons, a reference."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

TOLERANCE = 1e-6


def same(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part along ``dim``."""
    return tensor.chunk(group.size(), dim)[group.rank()].clone()


def summed(tensor: torch.Tensor | None, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def from_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """What each rank has."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def assert_close(
    found: torch.Tensor | None, wanted: torch.Tensor | None, tolerance: float = TOLERANCE
) -> None:
    """Equal up to ``tolerance`` of the largest wanted number."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    error = (found.detach().double() - wanted.detach().double()).abs().max().item()
    scale = max(1.0, wanted.detach().abs().max().item())
    assert error <= tolerance * scale, f"off by {error / scale}"


def alone(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of this rank only."""
    groups = [dist.new_group([rank]) for rank in range(group.size())]
    found = groups[group.rank()]
    assert isinstance(found, dist.ProcessGroup)
    return found


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Forget gradients."""
    for parameter in parameters:
        parameter.grad = None
