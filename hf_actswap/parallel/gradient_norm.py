"""Computes the norm of all gradients of a model that is divided among ranks, and clips by it.

Each element of the model counts once, wherever and however often it is held:

- a parameter with ``tensor_model_parallel = True`` is this rank's shard: its part is summed over the group;
- with ``replicated_over = r`` as well, r ranks of the group hold this same shard (key and value heads where
  there are fewer of them than ranks): each contributes an r-th. For a fused weight the attribute is a tuple
  of pairs (number of rows, r), from the first row to the last;
- every other parameter is held alike by all ranks: rank 0's counts, so that the ranks get the very same
  norm, and with it the same clip factor, even if a kernel's sums came out differently;
- an FSDP2 parameter is a shard over the data axis too: its part is summed over that axis first.

Tagged gradients (`gradients`) must be summed before. The arithmetic is fp32, or fp64 where a parameter is.
After ``neuronx_distributed.parallel_layers.grads``, which takes the norm in the parameters' dtype, counts
replicated heads as often as they are held, and cannot take an infinity norm without replicated parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .collectives import reduce_in_place
from .gradients import gradient_of, local, reject_unsummed
from .group import group_or_enclosing

_CLIP_EPSILON = 1e-6
"""Added to the norm that divides, as in `torch.nn.utils.clip_grad_norm_` and NxD."""

DataGroups = tuple[dist.ProcessGroup, ...]

Held = tuple[torch.Tensor, int]
"""A gradient and the number of ranks of the group that hold it; 0: all."""


def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of the whole model's gradients, bitwise the same on every rank of the group.

    Every rank must call it, with or without gradients. The host does not wait for the device, except with
    ``error_if_nonfinite``.

    Args:
        parameters: the parameters; one without a gradient counts as zero, and none counts twice.
        norm_type: greater than zero, or ``inf``.
        error_if_nonfinite: as in `torch.nn.utils.clip_grad_norm_`.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.

    Returns:
        Scalar on the parameters' device: fp64 if one of the parameters is, else fp32.

    Raises:
        ValueError: the norm's type is not greater than zero, or a DTensor gradient is a partial sum.
        UnsummedGradientError: watched tagged gradients are still this rank's part (`TaggedGradients`).
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; or no group is known.
    """
    group = group_or_enclosing(process_group)
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a number greater than 0 or inf, found {norm_type}")
    distinct = list(_distinct(parameters))
    if group.size() > 1:
        reject_unsummed(distinct)
    device = distinct[0].device if distinct else _device_of(group)
    zero = torch.zeros((), dtype=_wide_dtype(distinct), device=device)
    totals = _own_part(distinct, norm_type, group, zero)
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    if group.size() > 1:
        reduce_in_place(totals, group, operation)
    norm = totals if math.isinf(norm_type) else totals.pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
            "anyway, set `error_if_nonfinite=False`"
        )
    return norm


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``; return the norm before.

    The factor is ``max_norm / (norm + 1e-6)``, at most 1, bitwise the same on every rank.

    Args:
        parameters: as in `get_grad_norm`.
        max_norm: largest norm; with ``inf`` the gradients do not change.
        norm_type: as in `get_grad_norm`.
        error_if_nonfinite: as in `get_grad_norm`.
        process_group: as in `get_grad_norm`.

    Raises:
        As `get_grad_norm`.
    """
    distinct = list(_distinct(parameters))
    norm = get_grad_norm(distinct, norm_type, error_if_nonfinite, process_group)
    factor = torch.clamp(float(max_norm) / (norm + _CLIP_EPSILON), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in distinct:
        gradient = gradient_of(parameter)
        if gradient is not None:
            by_device.setdefault(gradient.device, []).append(local(gradient).detach())
    with torch.no_grad():
        for device, gradients in by_device.items():
            torch._foreach_mul_(gradients, factor.to(device))
    return norm


def _distinct(parameters: torch.Tensor | Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return {id(parameter): parameter for parameter in parameters}.values()


def _wide_dtype(parameters: list[torch.Tensor]) -> torch.dtype:
    """Return the dtype in which all ranks compute: it depends on the parameters, not on their gradients."""
    doubles = any(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if doubles else torch.float32


def _own_part(
    parameters: list[torch.Tensor], norm_type: float, group: dist.ProcessGroup, zero: torch.Tensor
) -> torch.Tensor:
    """Return this rank's part of the sum of powers, or of the maximum (infinity norm), like ``zero``."""
    by_data: dict[DataGroups, list[Held]] = {}
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is None:
            continue
        sharded = getattr(parameter, "tensor_model_parallel", False)
        # A gradient that all ranks hold alike is listed on every rank: each must join its data groups' sums.
        holders = getattr(parameter, "replicated_over", 1) if sharded else 0
        held = _by_holders(gradient.detach(), holders)
        by_data.setdefault(_data_groups(gradient), []).extend(held)
    total, largest = zero, math.isinf(norm_type)
    for data_groups, gradients in by_data.items():
        part = _part(gradients, norm_type, group, zero)
        for data_group in data_groups:
            reduce_in_place(part, data_group, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        total = torch.maximum(total, part) if largest else total + part
    return total


def _by_holders(gradient: torch.Tensor, holders: int | tuple[tuple[int, int], ...]) -> list[Held]:
    own = local(gradient)
    if isinstance(holders, int):
        return [(own, holders)]
    counts = [count for count, _ in holders]
    if isinstance(gradient, DTensor):  # FSDP2 has cut the rows at a place of its own
        settings = gradient.shape, gradient.device_mesh, gradient.placements
        first = compute_local_shape_and_global_offset(*settings)[1][0]
        ends = list(accumulate(counts))
        counts = [
            max(min(end, first + own.shape[0]) - max(end - count, first), 0)
            for end, count in zip(ends, counts, strict=True)
        ]
    return [(part, held) for part, (_, held) in zip(own.split(counts), holders, strict=True)]


def _part(
    gradients: list[tuple[torch.Tensor, int]],
    norm_type: float,
    group: dist.ProcessGroup,
    zero: torch.Tensor,
) -> torch.Tensor:
    """Return this rank's part for gradients with the same data groups.

    Args:
        gradients: each with the number of ranks of the group that hold it; 0: all.
        norm_type: type of the norm.
        group: tensor-parallel group.
        zero: scalar with the dtype and device of the result.
    """
    counted = [(found, holders) for found, holders in gradients if holders or group.rank() == 0]
    counted = [(found, holders) for found, holders in counted if found.numel()]
    if not counted:
        return zero.clone()
    norms = _norms([found for found, _ in counted], norm_type, zero)
    if math.isinf(norm_type):
        return norms.amax().nan_to_num(torch.inf, torch.inf)  # a maximum over ranks may lose a NaN
    shares = [1.0 / max(holders, 1) for _, holders in counted]
    powers = norms.pow(norm_type)
    if any(share != 1.0 for share in shares):
        powers = torch.stack([power * share for power, share in zip(powers.unbind(), shares, strict=True)])
    return powers.sum()


def _norms(gradients: list[torch.Tensor], norm_type: float, like: torch.Tensor) -> torch.Tensor:
    """Return the norm of each gradient, ``[n]``, like ``like``; by one kernel per device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, gradient in enumerate(gradients):
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(position)
    found: dict[int, torch.Tensor] = {}
    for positions in by_kind.values():
        of_kind = [gradients[position] for position in positions]
        dtype = torch.promote_types(of_kind[0].dtype, like.dtype)
        norms = torch._foreach_norm(of_kind, norm_type, dtype=dtype)
        found.update(zip(positions, norms, strict=True))
    return torch.stack([found[position].to(like) for position in range(len(gradients))])


def _data_groups(gradient: torch.Tensor) -> DataGroups:
    """Return the groups over which FSDP2 shards a gradient; none for a plain tensor or a replica (HSDP)."""
    if not isinstance(gradient, DTensor):
        return ()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"a gradient is a partial sum over a mesh: {gradient.placements}; reduce it before")
    dims = [dim for dim, placement in enumerate(gradient.placements) if placement.is_shard()]
    return tuple(gradient.device_mesh.get_group(dim) for dim in dims)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device on which the group can communicate, for a rank without any parameter."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return accelerator
