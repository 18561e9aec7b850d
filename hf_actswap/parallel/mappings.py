"""Mappings between the regions of tensor and sequence parallelism, with NxD's names and arguments.

Each pairs what happens to activations in forward with what happens to gradients in backward
(``neuronx_distributed.parallel_layers.mappings``). All take an optional ``process_group`` (``None``: that of
the enclosing `tensor_parallel_group`) and do nothing in a group of one. Unlike NxD's they use the given group
in backward too, are right for any sequence dimension, and never write into an argument, with one exception
that NxD's callers rely on: `reduce_from_tensor_model_parallel_region`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .collectives import all_reduced, gathered, own_part
from .communication import all_gather, all_reduce, reduce_scatter
from .group import group_or_enclosing


def copy_to_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Copy a replicated tensor to ranks that do different work on it: identity, all-reduce in backward."""
    group = group_or_enclosing(process_group)
    if group.size() == 1:
        return input_
    return copied(input_, group)


def reduce_from_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum the ranks' tensors: all-reduce, identity in backward.

    A tensor that requires no gradient (``parameter.grad.data``, a buffer) is outside of autograd and summed
    *in place*, as NxD does it: callers such as its ``allreduce_sequence_parallel_gradients`` throw the
    returned tensor away. A tensor that requires a gradient stays as it is, in grad mode or not.
    """
    group = group_or_enclosing(process_group)
    if group.size() == 1:
        return input_
    total = all_reduce(input_, group)
    return total if input_.requires_grad else input_.copy_(total)


def scatter_to_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Keep this rank's part of a replicated tensor along its last dim; all-gather in backward.

    Raises:
        ValueError: the last dim does not divide by the group size.
    """
    return scatter_to_sequence_parallel_region(input_, -1, process_group)


def gather_from_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """All-gather along the last dim; in backward this rank's part of the gradient is taken.

    It is for results with which all ranks do the same, so that each has the whole gradient.
    """
    return gather_from_tensor_model_parallel_region_with_dim(input_, -1, process_group)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: torch.Tensor, gather_dim: int, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """All-gather along ``gather_dim``; in backward this rank's part of the gradient is taken."""
    return gather_from_sequence_parallel_region(input_, gather_dim, False, process_group)


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    input_: torch.Tensor, partition_dim: int, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum over the ranks and keep this rank's part along ``partition_dim``; all-gather in backward.

    Raises:
        ValueError: the size along ``partition_dim`` does not divide by the group size.
    """
    return reduce_scatter_to_sequence_parallel_region(input_, partition_dim, process_group=process_group)


def scatter_to_sequence_parallel_region(
    input_: torch.Tensor, sequence_dimension: int = 0, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Keep this rank's part of a replicated tensor along the sequence; all-gather in backward.

    Raises:
        ValueError: the sequence does not divide by the group size.
    """
    group = group_or_enclosing(process_group)
    if group.size() == 1:
        return input_
    result: torch.Tensor = _ScatterToRegion.apply(input_, sequence_dimension, group)
    return result


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """All-gather along the sequence.

    Args:
        input_: this rank's part of the sequence.
        sequence_dimension: dim that is gathered, ``S / tp`` to ``S``.
        to_model_parallel: whether each rank does different work on the result. True: gradients are partial,
            and backward is a reduce-scatter. False: each rank does the same, and backward takes this rank's
            part of the gradient. The wrong choice raises no error: gradients are wrong by a factor of tp.
        process_group: tensor-parallel group.
    """
    group = group_or_enclosing(process_group)
    return input_ if group.size() == 1 else all_gather(input_, sequence_dimension, group, to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sum over the ranks and keep this rank's part along the sequence; all-gather in backward.

    Args:
        input_: partial sums over the whole sequence.
        sequence_dimension: dim that is scattered, ``S`` to ``S / tp``.
        dtype: dtype to which gradients are cast before they are gathered.
        process_group: tensor-parallel group.

    Raises:
        ValueError: the sequence does not divide by the group size.
    """
    group = group_or_enclosing(process_group)
    return input_ if group.size() == 1 else reduce_scatter(input_, sequence_dimension, group, dtype)


def copied(
    tensor: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``tensor``; in backward gradients are summed over the ranks, in ``reduce_dtype`` if given."""
    result: torch.Tensor = _CopyToRegion.apply(tensor, group, reduce_dtype)
    return result


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return all_reduced(gradient, ctx.group, ctx.reduce_dtype).to(gradient.dtype), None, None


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return own_part(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gathered(gradient, ctx.dim, ctx.group), None, None
