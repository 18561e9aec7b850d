"""Collectives on plain tensors along any dim: out of place, contiguous results, no autograd.

The ``begin_..`` forms return at once with a `Pending` result, which holds the tensors that the collective
reads and writes. On CUDA a collective runs on NCCL's own stream after the work that the current stream has
so far, and `Pending.wait` makes the current stream wait for the collective; the host waits for nothing.

Fake tensors (a forward that only records what a model does) get fake results, without other ranks. When a
rank dies in a training, the error on every other rank names it (`rank_agreement`).

The group is passed, or taken from the enclosing context (`tensor_parallel_group`), the only state of this
package that is not an argument. The threads on which autograd runs a device's backward do not see that
context variable: what communicates in backward must keep its group from forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from ..releases import collectives_can_be_traced
from .rank_agreement import lost_rank_error


class Pending:
    """A collective that was started and may still run.

    Args:
        work: handle of the collective; ``None`` if it is done.
        arrange: returns the result, once the collective is done.
        held: the tensor that the collective reads, kept alive until it is done.
    """

    __slots__ = ("_arrange", "_group", "_held", "_work")

    def __init__(
        self, work: Any, arrange: Callable[[], torch.Tensor], held: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        self._work, self._arrange, self._group = work, arrange, group
        self._held: torch.Tensor | None = held

    def wait(self) -> torch.Tensor:
        """Let the current stream (on a CPU: the caller) wait for the collective; return its result.

        Raises:
            LostRankError: a rank has ended.
        """
        if self._work is not None:
            _run(self._group, self._work.wait)
        self._work = self._held = None
        return self._arrange()


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are summed: as wide as requested, and never narrower."""
    return dtype if reduce_dtype is None else torch.promote_types(dtype, reduce_dtype)


def gathered(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks, joined in order along ``dim``: ``[.., n, ..]`` to ``[.., tp n, ..]``."""
    return begin_gather(part, dim, group, waits=True).wait()


def begin_gather(part: torch.Tensor, dim: int, group: dist.ProcessGroup, waits: bool = False) -> Pending:
    """Start the gather of `gathered`; with ``waits`` return when its result is there."""
    dim %= part.dim()
    part = part.contiguous()
    parts = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    work = None
    if not isinstance(part, FakeTensor):
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
        work = _run(group, gather, parts, part, group=group, async_op=not waits)
    stacked = parts.unflatten(0, (group.size(), part.shape[0]))
    return Pending(work, lambda: stacked.movedim(0, dim).flatten(dim, dim + 1).contiguous(), part, group)


def reduce_scattered(
    whole: torch.Tensor, dim: int, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum over all ranks, in `sum_dtype` of ``dtype``.

    Raises:
        ValueError: the size along ``dim`` does not divide by the group size.
    """
    return begin_reduce_scatter(whole, dim, group, dtype, waits=True).wait()


def begin_reduce_scatter(
    whole: torch.Tensor,
    dim: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
    waits: bool = False,
) -> Pending:
    """Start the reduction of `reduce_scattered`; ``whole`` must not be written before the result is there."""
    _check_divisible(whole, dim, group)
    whole = whole.to(sum_dtype(whole.dtype, dtype))
    dim %= whole.dim()
    parts = whole.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous().flatten(0, 1)
    part = parts.new_empty((parts.shape[0] // group.size(), *parts.shape[1:]))
    work = None
    if not isinstance(whole, FakeTensor):
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = _run(group, reduce_scatter, part, parts, group=group, async_op=not waits)
    return Pending(work, lambda: part, parts, group)


def all_reduced(
    tensor: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum over all ranks, in `sum_dtype` of ``dtype``; ``tensor`` stays as it is."""
    return begin_all_reduce(tensor, group, dtype, waits=True).wait()


def begin_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None, waits: bool = False
) -> Pending:
    """Start the sum of `all_reduced`; with ``waits`` return when its result is there."""
    wide = sum_dtype(tensor.dtype, dtype)
    total = tensor.to(wide, copy=True, memory_format=torch.contiguous_format)
    work = None
    if not isinstance(tensor, FakeTensor):
        work = _run(group, dist.all_reduce, total, group=group, async_op=not waits)
    return Pending(work, lambda: total, total, group)


def summed_over_replicas(tensor: torch.Tensor, replicas: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over this rank's block of ``replicas`` consecutive ranks; ``replicas`` divides tp.

    Every rank of a block adds the same numbers in the same order, so the results are bitwise equal. Every
    rank of the group must call it.
    """
    if isinstance(tensor, FakeTensor):
        return tensor.clone()
    first = group.rank() // replicas * replicas
    own = tensor.reshape(1, -1)
    counts = [own.numel() if first <= rank < first + replicas else 0 for rank in range(group.size())]
    sent = own.expand(replicas, -1).reshape(-1)
    received = torch.empty_like(sent)
    _run(group, dist.all_to_all_single, received, sent, counts, counts, group=group)
    return received.view(replicas, -1).sum(0).view(tensor.shape)


def own_part(whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part along ``dim``, in a storage of its own: a view would keep the whole alive."""
    _check_divisible(whole, dim, group)
    return whole.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def reduce_in_place(
    tensor: torch.Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Replace ``tensor`` by its sum (or another ``operation``) over all ranks, and return it."""
    if group.size() > 1 and not isinstance(tensor, FakeTensor):
        _run(group, dist.all_reduce, tensor, op=operation, group=group)
    return tensor


def _run(group: dist.ProcessGroup, collective: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return collective(*args, **kwargs)
    except RuntimeError as error:
        lost = lost_rank_error(error, group)
        if lost is None:
            raise
        raise lost from None


if not collectives_can_be_traced():
    _run = torch.compiler.disable(_run)


def _check_divisible(whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> None:
    if whole.shape[dim] % group.size():
        raise ValueError(
            f"dim {dim} of a tensor {list(whole.shape)} does not divide by {group.size()} "
            "tensor-parallel ranks"
        )


_ENCLOSING: ContextVar[dist.ProcessGroup | None] = ContextVar("tensor_parallel_group", default=None)


@contextmanager
def tensor_parallel_group(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Within the ``with`` block, mappings and parallel layers without a group of their own use ``group``."""
    token = _ENCLOSING.set(group)
    try:
        yield group
    finally:
        _ENCLOSING.reset(token)


def enclosing_group() -> dist.ProcessGroup | None:
    return _ENCLOSING.get()


def group_or_enclosing(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group``, or the enclosing one.

    Raises:
        RuntimeError: there is neither. A silent group of one would train replicas that drift apart.
    """
    found = group if group is not None else enclosing_group()
    if found is None:
        raise RuntimeError(
            "no tensor-parallel group: pass process_group, or call inside "
            "`with tensor_parallel_group(group):`"
        )
    return found


class Replicas:
    """The ranks of a group that hold a tensor alike; the engine uses it to keep a slice on each rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = group.size()

    def own_slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice along dim 0, in a storage of its own; dim 0 divides by `size`."""
        return own_part(tensor, 0, self._group)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the slices of all ranks along dim 0. Every rank must call it."""
        return gathered(part, 0, self._group)


def enclosing_replicas() -> Replicas | None:
    """Return the ranks of the enclosing group, or ``None`` outside of any."""
    group = enclosing_group()
    return None if group is None else Replicas(group)
