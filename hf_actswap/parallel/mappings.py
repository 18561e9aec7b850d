"""Mappings between the regions of tensor and sequence parallelism, with NxD's names and arguments.

Each pairs what happens to activations in forward with what happens to gradients in backward
(``neuronx_distributed.parallel_layers.mappings``). All take an optional ``process_group`` (``None``: that of
the enclosing `tensor_parallel_group`) and do nothing in a group of one. Unlike NxD's they use the given group
in backward too, are right for any sequence dimension, and never write into an argument, with one exception
that NxD's callers rely on: `reduce_from_tensor_model_parallel_region`. What they cut must divide by the group
size, else they raise ValueError.

A parallel layer communicates in forward only through `all_gather`, `reduce_scatter` and `all_reduce`. A
``TorchFunctionMode`` sees them under these names, as it sees PyTorch's own functions. So the structure of a
model lists each beside the op that it belongs to (``input_layernorm.all_gather``), a plan can give its result
a fate (keep it, or communicate again, ``re-gather``), and the engine can carry that out without knowing any
parallel layer.

The caller passes group and dim: a communication that runs again in backward, on a thread of autograd, cannot
look for its group in a context variable. None of these functions saves a tensor for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import handle_torch_function, has_torch_function_unary

from .collectives import all_reduced, gathered, group_or_enclosing, own_part, reduce_scattered
from .gradients import sum_gradient_in_place

Change = Callable[[torch.Tensor], torch.Tensor]
"""Takes a tensor, and returns its replacement."""


def all_gather(
    part: torch.Tensor,
    dim: int,
    group: dist.ProcessGroup,
    sum_gradients: bool = True,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gather the parts of all ranks along ``dim``: ``[.., n, ..]`` to ``[.., tp n, ..]``.

    Backward is a reduce-scatter, in ``reduce_dtype`` if given. Without ``sum_gradients`` (every rank does the
    same with the result) it takes this rank's part of the gradient, without communication.
    """
    if has_torch_function_unary(part):
        return handle_torch_function(all_gather, (part,), part, dim, group, sum_gradients, reduce_dtype)
    backward = partial(own_part, dim=dim, group=group)
    if sum_gradients:
        backward = partial(_part_of_total, dim=dim, group=group, dtype=reduce_dtype)
    return _Mapping.apply(part, partial(gathered, dim=dim, group=group), backward)


def reduce_scatter(
    whole: torch.Tensor,
    dim: int,
    group: dist.ProcessGroup,
    gradient_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sum over all ranks and keep this rank's part along ``dim``. Backward is an all-gather.

    Args:
        whole: this rank's summand.
        dim: dim whose size divides by the group size.
        group: tensor-parallel group.
        gradient_dtype: dtype to which gradients are cast before they are gathered.
        reduce_dtype: dtype of the sum; the result has the dtype of ``whole`` again.
    """
    if has_torch_function_unary(whole):
        return handle_torch_function(
            reduce_scatter, (whole,), whole, dim, group, gradient_dtype, reduce_dtype
        )
    forward = partial(_part_of_total, dim=dim, group=group, dtype=reduce_dtype)
    return _Sum.apply(whole, forward, partial(_gathered_as, dim=dim, group=group, dtype=gradient_dtype))


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum over all ranks, out of place, in ``reduce_dtype`` if given. Backward is the identity."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(all_reduce, (tensor,), tensor, group, reduce_dtype)
    return _Sum.apply(tensor, partial(_total, group=group, dtype=reduce_dtype), lambda gradient: gradient)


class Tokens:
    """The shape ``[B, S]`` of a block's latest tokens; inside the block they may be flat, ``[B S]``."""

    shape: tuple[int, ...] = ()


def sum_of_shares(
    share: torch.Tensor,
    group: dist.ProcessGroup,
    sequence_dim: int | None,
    reduce_dtype: torch.dtype | None = None,
    tokens: Tokens | None = None,
) -> torch.Tensor:
    """Sum the output of a row-parallel block over all ranks, in ``reduce_dtype`` if given.

    Args:
        share: this rank's summand, for the whole sequence.
        group: tensor-parallel group.
        sequence_dim: dim of the sequence, of which this rank keeps its part; ``None``: it keeps all of it.
        reduce_dtype: dtype of the sum; the result has the dtype of ``share`` again.
        tokens: shape of the block's tokens; needed to keep this rank's part of each sequence in ``[B S, H]``.
    """
    if sequence_dim is None:
        return all_reduce(share, group, reduce_dtype)
    if tokens is not None and share.dim() - 1 < len(tokens.shape):
        of_sequences = share.unflatten(0, tokens.shape)
        return reduce_scatter(of_sequences, sequence_dim, group, None, reduce_dtype).flatten(0, 1)
    return reduce_scatter(share, sequence_dim, group, None, reduce_dtype)


class _Mapping(torch.autograd.Function):
    """What one function makes of a tensor in forward, and another of its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
        ctx.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.of_gradient(gradient), None, None


class _Sum(_Mapping):
    """A mapping that sums over the ranks in forward."""


SUM: Any = _Sum._backward_cls
"""Class of autograd nodes that sum over the ranks in forward."""


def _total(tensor: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> torch.Tensor:
    return all_reduced(tensor, group, dtype).to(tensor.dtype)


def _part_of_total(
    whole: torch.Tensor, dim: int, group: dist.ProcessGroup, dtype: torch.dtype | None
) -> torch.Tensor:
    return reduce_scattered(whole, dim, group, dtype).to(whole.dtype)


def _gathered_as(
    part: torch.Tensor, dim: int, group: dist.ProcessGroup, dtype: torch.dtype | None
) -> torch.Tensor:
    return gathered(part if dtype is None else part.to(dtype), dim, group)


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
    returned tensor away. A gradient that is the sum already (`gradients.GradientWatch`) is not changed. A
    tensor that requires a gradient stays as it is, in grad mode or not.
    """
    group = group_or_enclosing(process_group)
    if group.size() == 1:
        return input_
    if not input_.requires_grad and sum_gradient_in_place(input_, group):
        return input_
    total = all_reduce(input_, group)
    return total if input_.requires_grad else input_.copy_(total)


def scatter_to_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Keep this rank's part of a replicated tensor along its last dim; all-gather in backward."""
    return scatter_to_sequence_parallel_region(input_, -1, process_group)


def gather_from_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """All-gather along the last dim; in backward this rank's part of the gradient is taken.

    For results with which all ranks do the same, so that each has the whole gradient.
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
    """Sum over the ranks and keep this rank's part along ``partition_dim``; all-gather in backward."""
    return reduce_scatter_to_sequence_parallel_region(input_, partition_dim, process_group=process_group)


def scatter_to_sequence_parallel_region(
    input_: torch.Tensor, sequence_dimension: int = 0, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Keep this rank's part of a replicated tensor along the sequence; all-gather in backward."""
    group = group_or_enclosing(process_group)
    if group.size() == 1:
        return input_
    forward = partial(own_part, dim=sequence_dimension, group=group)
    return _Mapping.apply(input_, forward, partial(gathered, dim=sequence_dimension, group=group))


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """All-gather along the sequence, ``S / tp`` to ``S``.

    ``to_model_parallel``: whether each rank does different work on the result. True: gradients are partial,
    and backward is a reduce-scatter. False: each rank does the same, and backward takes this rank's part of
    the gradient. The wrong choice raises no error: gradients are wrong by a factor of tp.
    """
    group = group_or_enclosing(process_group)
    return input_ if group.size() == 1 else all_gather(input_, sequence_dimension, group, to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sum partial sums over the ranks and keep this rank's part of the sequence; all-gather in backward.

    ``dtype``: that to which gradients are cast before they are gathered.
    """
    group = group_or_enclosing(process_group)
    return input_ if group.size() == 1 else reduce_scatter(input_, sequence_dimension, group, dtype)


def copied(
    tensor: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``tensor``; in backward gradients are summed over the ranks, in ``reduce_dtype`` if given."""
    backward = partial(_total, group=group, dtype=reduce_dtype)
    return _Mapping.apply(tensor, lambda same: same.view_as(same), backward)
