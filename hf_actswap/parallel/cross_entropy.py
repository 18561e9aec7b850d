"""Cross entropy of logits whose vocabulary is split over the ranks: no rank ever holds a whole row of them.

Forward has two all-reduces, of one number per token and then of two (three with label smoothing): the maximum
first, because every exponential is taken relative to it, then the target's logit, the sum of exponentials
and the sum of logits in one buffer. NxD and Megatron need three. Backward has no communication.

Saved for backward are the given logits, in their own dtype, and two numbers per token (maximum and sum of
exponentials). The softmax is computed again from them: one pass over the shard, bitwise what forward
computed. So fp32 logits cost nothing beyond themselves, and bf16 logits cost half of what a saved fp32
softmax would; forward and backward each make one fp32 buffer of the size of the shard.

Unlike ``neuronx_distributed.parallel_layers.loss_functions`` the caller's logits are not written into, the
arithmetic is never below fp32, ignored tokens count neither in loss nor in gradient, and label smoothing is
that of `torch.nn.functional.cross_entropy` over the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from .collectives import reduce_in_place
from .group import group_or_enclosing

REDUCTIONS = ("none", "mean", "sum")


def parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "none",
    process_group: dist.ProcessGroup | None = None,
    vocabulary_size: int | None = None,
) -> torch.Tensor:
    """Return the cross entropy, the same on every rank.

    Args:
        vocab_parallel_logits: ``[.., V / tp]``, this rank's part of the vocabulary in rank order.
        target: ``[..]``, ids of the whole vocabulary, the same on every rank.
        label_smoothing: as in `torch.nn.functional.cross_entropy`, over the whole vocabulary.
        ignore_index: tokens with this target have zero loss and zero gradient.
        reduction: ``none`` (NxD's), ``mean`` over the tokens that are not ignored, or ``sum``.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.
        vocabulary_size: number of ids. Columns of larger ids are padding: they count as minus infinity, get
            no gradient, and take no part in the smoothing. ``None``: there is no padding.

    Returns:
        ``[..]`` in fp32 (fp64 for fp64 logits), or a scalar.

    Raises:
        ValueError: the shapes, the reduction, the smoothing or the vocabulary's size do not fit, or (on the
            CPU) a target is not in the vocabulary. On other devices such a target's loss is NaN instead: to
            look would make the host wait for the device.
    """
    group = group_or_enclosing(process_group)
    if has_torch_function_unary(vocab_parallel_logits):
        settings = (target, label_smoothing, ignore_index, reduction, group, vocabulary_size)
        computed: torch.Tensor = handle_torch_function(
            parallel_cross_entropy, (vocab_parallel_logits,), vocab_parallel_logits, *settings
        )
        return computed
    shard = _shard_of(vocab_parallel_logits, vocabulary_size, group)
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {list(vocab_parallel_logits.shape)} are for targets "
            f"{list(vocab_parallel_logits.shape[:-1])}, found {list(target.shape)}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, found {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: expected a number from 0 to 1, found {label_smoothing}")
    loss: torch.Tensor = _ParallelCrossEntropy.apply(
        vocab_parallel_logits, target, label_smoothing, ignore_index, shard
    )
    if reduction == "none":
        return loss
    total = loss.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    inference: bool = True,
    process_group: dist.ProcessGroup | None = None,
    vocabulary_size: int | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the log-probability of each next token, as NxD's function of this name.

    Args:
        vocab_parallel_logits: ``[B, S, V / tp]``.
        target: ``[B, S]``, not shifted: the logits of position s are for ``target[:, s + 1]``.
        inference: whether nothing is kept for backward.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.
        vocabulary_size: as in `parallel_cross_entropy`.
        ignore_index: tokens with this target have log-probability zero.

    Returns:
        ``[B, S - 1]`` in fp32.

    Raises:
        ValueError: as in `parallel_cross_entropy`.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference):
        return -parallel_cross_entropy(
            vocab_parallel_logits[:, :-1],
            target[:, 1:],
            ignore_index=ignore_index,
            process_group=process_group,
            vocabulary_size=vocabulary_size,
        )


def parallel_causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return what ``transformers.loss.loss_utils.ForCausalLMLoss`` (5.17 to 5.23) returns for whole logits.

    It can be assigned to ``model.loss_function``; other keyword arguments are ignored, as in transformers.
    The logits are not copied to fp32.

    Args:
        logits: ``[B, S, V / tp]``, V at least ``vocab_size``.
        labels: ``[B, S]``, not shifted; read only without ``shift_labels``.
        vocab_size: the model's vocabulary without padding.
        num_items_in_batch: number by which the sum is divided; ``None``: mean over the tokens not ignored.
        ignore_index: label of tokens without loss.
        shift_labels: labels that are shifted already, as many as there are tokens.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.

    Returns:
        Scalar, the same on every rank.

    Raises:
        ValueError: neither labels nor shifted labels are given, or as in `parallel_cross_entropy`.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("expected labels or shift_labels, found neither")
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = parallel_cross_entropy(
        logits,
        shift_labels.reshape(logits.shape[:-1]).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        process_group=process_group,
        vocabulary_size=vocab_size,
    )
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


@dataclass(frozen=True)
class _Shard:
    """Which ids of the vocabulary this rank holds.

    Args:
        group: tensor-parallel group.
        first: id of the first column.
        columns: number of columns that are no padding.
        vocabulary_size: number of ids of all ranks, without padding.
    """

    group: dist.ProcessGroup
    first: int
    columns: int
    vocabulary_size: int

    def owned(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each target is one of this rank's ids, and its column (any column if it is not)."""
        column = target - self.first
        mine = (column >= 0) & (column < self.columns)
        return mine, column.clamp(0, max(self.columns - 1, 0))


def _shard_of(logits: torch.Tensor, vocabulary_size: int | None, group: dist.ProcessGroup) -> _Shard:
    width, size = logits.shape[-1], group.size()
    vocabulary = width * size if vocabulary_size is None else vocabulary_size
    if vocabulary > width * size:
        raise ValueError(
            f"vocabulary_size: expected at most {size} x {width}, what the ranks' logits hold together, "
            f"found {vocabulary}"
        )
    if size > 1 and width >= vocabulary > 1:
        raise ValueError(
            f"logits {list(logits.shape)} hold the whole vocabulary of {vocabulary}; expected the part of "
            f"one of {size} ranks. Give gather_output=False to the layer that makes them"
        )
    first = width * group.rank()
    return _Shard(group, first, min(max(vocabulary - first, 0), width), vocabulary)


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float,
        ignore_index: int,
        shard: _Shard,
    ) -> torch.Tensor:
        ignored = target == ignore_index
        outside = ((target < 0) | (target >= shard.vocabulary_size)) & ~ignored
        _reject_on_cpu(outside, target, shard)
        maximum = _maximum(logits, shard)
        shifted = _shifted(logits, maximum, shard)
        sums = [_own_targets(shifted, target, shard)]
        if label_smoothing:
            sums.append(shifted.sum(-1))
        sums.insert(1, shifted.exp_().sum(-1))
        totals = _all_reduced(torch.stack(sums), dist.ReduceOp.SUM, shard.group)
        sum_exp = totals[1].clone()  # a view would keep all of the buffer
        log_sum_exp = sum_exp.log()
        loss = log_sum_exp - totals[0]
        if label_smoothing:
            spread = log_sum_exp - totals[2] / shard.vocabulary_size
            loss = (1.0 - label_smoothing) * loss + label_smoothing * spread
        ctx.label_smoothing, ctx.ignore_index, ctx.shard = label_smoothing, ignore_index, shard
        ctx.save_for_backward(logits, target, maximum, sum_exp)
        return loss.masked_fill(outside, torch.nan).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # `once_differentiable` looks at the incoming gradient, that of the loss
            raise RuntimeError("create_graph=True: parallel_cross_entropy cannot be differentiated twice.")
        logits, target, maximum, sum_exp = ctx.saved_tensors
        shard: _Shard = ctx.shard
        ignored = target == ctx.ignore_index
        weight = loss_gradient.masked_fill(ignored, 0.0)
        gradient = _shifted(logits, maximum, shard).exp_().mul_((weight / sum_exp).unsqueeze(-1))
        if ctx.label_smoothing:
            gradient.sub_((weight * (ctx.label_smoothing / shard.vocabulary_size)).unsqueeze(-1))
        if shard.columns:
            mine, column = shard.owned(target)
            taken = torch.where(mine, weight * (ctx.label_smoothing - 1.0), 0.0)
            gradient.scatter_add_(-1, column.unsqueeze(-1), taken.unsqueeze(-1))
        gradient.masked_fill_(ignored.unsqueeze(-1), 0.0)  # logits that are not finite times zero are NaN
        padding = logits.shape[-1] - shard.columns
        gradient = gradient.to(logits.dtype)
        return functional.pad(gradient, (0, padding)) if padding else gradient, None, None, None, None


def _reject_on_cpu(outside: torch.Tensor, target: torch.Tensor, shard: _Shard) -> None:
    if outside.device.type != "cpu" or isinstance(outside, FakeTensor) or not bool(outside.any()):
        return
    raise ValueError(
        f"target: expected ids from 0 to {shard.vocabulary_size - 1}, found {int(target[outside][0])}"
    )


def _maximum(logits: torch.Tensor, shard: _Shard) -> torch.Tensor:
    """Return the largest logit of the whole vocabulary, ``[..]``, in the dtype of the arithmetic."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if shard.columns:
        own = logits[..., : shard.columns].amax(-1).to(dtype)
    else:
        own = logits.new_full(logits.shape[:-1], -torch.inf, dtype=dtype)
    return _all_reduced(own, dist.ReduceOp.MAX, shard.group)


def _shifted(logits: torch.Tensor, maximum: torch.Tensor, shard: _Shard) -> torch.Tensor:
    """Return the logits that are no padding, less the maximum: a new tensor, promoted in the same kernel."""
    return logits[..., : shard.columns] - maximum.unsqueeze(-1)


def _own_targets(shifted: torch.Tensor, target: torch.Tensor, shard: _Shard) -> torch.Tensor:
    """Return the target's entry of ``shifted`` if this rank holds it, else zero: ``[..]``."""
    if not shard.columns:
        return shifted.new_zeros(target.shape)
    mine, column = shard.owned(target)
    return torch.where(mine, shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)


def _all_reduced(own: torch.Tensor, operation: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce ``own`` in place over the group; a fake tensor is returned as it is."""
    if group.size() > 1 and not isinstance(own, FakeTensor):
        reduce_in_place(own, group, operation)
    return own
