"""Logits of the whole vocabulary that are gathered when somebody reads them.

While a model trains on labels its loss is computed from each rank's part of the logits, and the whole
vocabulary on every rank would be the largest tensor of the step. The output must have logits all the same,
of the shape that everybody expects: a trainer may look at them (TRL computes accuracy and entropy). So the
output holds a tensor that knows its shape, and gathers at the first operation on it.

**Every rank of the group must read it, or none**: reading is a collective. Detaching and changing the dtype
(what Accelerate does to every output) are no reading.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from .collectives import gathered, own_part
from .mappings import gather_from_tensor_model_parallel_region

_aten = torch.ops.aten


def full_logits(shard: torch.Tensor, vocabulary_size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather logits ``[.., V / tp]`` to ``[.., vocabulary_size]``; every rank goes on with them alike."""
    return gather_from_tensor_model_parallel_region(shard, group)[..., :vocabulary_size]


def lazy_full_logits(shard: torch.Tensor, vocabulary_size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what `full_logits` does, gathered when it is read."""
    shown: torch.Tensor = _Show.apply(shard, vocabulary_size, group)
    return shown


class _Source:
    """This rank's part of logits, and the whole ones once they are gathered."""

    def __init__(self, shard: torch.Tensor, vocabulary_size: int, group: dist.ProcessGroup) -> None:
        self.shard, self.vocabulary_size, self.group = shard, vocabulary_size, group
        self._full: torch.Tensor | None = None

    def full(self) -> torch.Tensor:
        if self._full is None:
            self._full = gathered(self.shard, -1, self.group)[..., : self.vocabulary_size]
        return self._full


class LazyLogits(torch.Tensor):
    """A tensor ``[.., vocabulary_size]`` that holds ``[.., V / tp]`` until it is read."""

    _source: _Source

    @staticmethod
    def __new__(cls, source: _Source, dtype: torch.dtype) -> LazyLogits:
        shape = (*source.shard.shape[:-1], source.vocabulary_size)
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=source.shard.device
        )
        made._source = source
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            return LazyLogits(args[0]._source, args[0].dtype)
        if func is _aten._to_copy.default and not kwargs.keys() - {"dtype"}:
            return LazyLogits(args[0]._source, kwargs.get("dtype") or args[0].dtype)
        args, kwargs = tree_map_only(LazyLogits, _read, (args, kwargs))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={list(self.shape)}, dtype={self.dtype}, gathered when read)"


def _read(logits: LazyLogits) -> torch.Tensor:
    return logits._source.full().to(logits.dtype)


class _Show(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, vocabulary_size: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group, ctx.columns = group, shard.shape[-1]
        return LazyLogits(_Source(shard.detach(), vocabulary_size, group), shard.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        padding = ctx.columns * ctx.group.size() - gradient.shape[-1]
        return own_part(F.pad(gradient, (0, padding)), -1, ctx.group), None, None
