"""Embedding, head and loss of a causal language model whose vocabulary is divided among the ranks.

The head's output is this rank's part of the logits, ``[B, S, V / tp]``. The model's own forward hands them
to its loss function, which is replaced by one that takes parts. The logits that leave the model have the
whole vocabulary: gathered at once, or, while the model trains on labels, when they are read (`LazyLogits`).

If your code needs the head, call it: ``model.lm_head(hidden)`` returns whole logits. Its ``weight`` has only
this rank's rows, and so has the embedding's; `Patched.full_state_dict` has the whole weights.

**Logits.** Whole logits on every rank would be the largest tensor of the step, and the loss does not need
them. But a trainer may look at the output's logits (TRL computes accuracy and entropy). So the output holds a
tensor that knows its shape, and gathers at the first operation on it. That is a collective: **every rank of
the group must read it, or none**. Detaching and changing the dtype (what Accelerate does to every output) are
no reading.

**Cross entropy.** No rank ever holds a whole row of logits. Forward has two all-reduces, of one number per
token and then of two (three with label smoothing): the maximum first, because every exponential is taken
relative to it, then the target's logit, the sum of exponentials and the sum of logits in one buffer. NxD and
Megatron need three. Backward has no communication.

Saved for backward are the given logits, in their own dtype, and two numbers per token (maximum and sum of
exponentials), from which the softmax is computed again, bitwise as in forward. So fp32 logits cost nothing
beyond themselves, and bf16 logits cost half of what a saved fp32 softmax would; forward and backward each
make one fp32 buffer of the size of the shard.

Unlike ``neuronx_distributed.parallel_layers.loss_functions`` the caller's logits are not written into, the
arithmetic is never below fp32, ignored tokens count neither in loss nor in gradient, and label smoothing is
that of `torch.nn.functional.cross_entropy` over the whole vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_map_only

from ..errors import Problem
from .collectives import gathered, group_or_enclosing, own_part, reduce_in_place
from .layers import ColumnParallelLinear, ParallelEmbedding
from .mappings import gather_from_tensor_model_parallel_region
from .sequence_region import (
    SEQUENCE_DIM,
    ModelHook,
    SequenceForward,
    SequenceRegion,
    cut_masked_rows,
    without_padding,
)

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
    """Return the cross entropy, the same on every rank: ``[..]`` in fp32 (fp64 for fp64 logits), or a scalar.

    Args:
        vocab_parallel_logits: ``[.., V / tp]``, this rank's part of the vocabulary in rank order.
        target: ``[..]``, ids of the whole vocabulary, the same on every rank.
        label_smoothing: as in `torch.nn.functional.cross_entropy`, over the whole vocabulary.
        ignore_index: tokens with this target have zero loss and zero gradient.
        reduction: ``none`` (NxD's), ``mean`` over the tokens that are not ignored, or ``sum``.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.
        vocabulary_size: number of ids. Columns of larger ids are padding: they count as minus infinity, get
            no gradient, and take no part in the smoothing. ``None``: there is no padding.

    Raises:
        ValueError: the shapes, the reduction, the smoothing or the vocabulary's size do not fit, or (on the
            CPU) a target is not in the vocabulary. On other devices such a target's loss is NaN instead: to
            look would make the host wait for the device.
    """
    group = group_or_enclosing(process_group)
    if has_torch_function_unary(vocab_parallel_logits):
        settings = (target, label_smoothing, ignore_index, reduction, group, vocabulary_size)
        return handle_torch_function(
            parallel_cross_entropy, (vocab_parallel_logits,), vocab_parallel_logits, *settings
        )
    shard = shard_of(vocab_parallel_logits, vocabulary_size, group)
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
    """Return the log-probability of each next token, ``[B, S - 1]`` in fp32, as NxD's function of this name.

    Other arguments and errors are those of `parallel_cross_entropy`.

    Args:
        vocab_parallel_logits: ``[B, S, V / tp]``.
        target: ``[B, S]``, not shifted: the logits of position s are for ``target[:, s + 1]``.
        inference: whether nothing is kept for backward.
        ignore_index: tokens with this target have log-probability zero.
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

    The scalar is the same on every rank. It can be assigned to ``model.loss_function``; other keyword
    arguments are ignored, as in transformers. The logits are not copied to fp32.

    Args:
        logits: ``[B, S, V / tp]``, V at least ``vocab_size``.
        labels: ``[B, S]``, not shifted; read only without ``shift_labels``.
        vocab_size: the model's vocabulary without padding.
        num_items_in_batch: number by which the sum is divided; ``None``: mean over the tokens not ignored.
        ignore_index: label of tokens without loss.
        shift_labels: labels that are shifted already, as many as there are tokens.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.

    Raises:
        ValueError: neither labels nor shifted labels are given, or as in `parallel_cross_entropy`.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("expected labels or shift_labels, found neither")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
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


def shard_of(logits: torch.Tensor, vocabulary_size: int | None, group: dist.ProcessGroup) -> _Shard:
    width, size = logits.shape[-1], group.size()
    vocabulary = width * size if vocabulary_size is None else vocabulary_size
    if vocabulary > width * size:
        held = f"{size} x {width}, what the ranks' logits hold together"
        raise ValueError(f"vocabulary_size: expected at most {held}, found {vocabulary}")
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
        if outside.device.type == "cpu" and not isinstance(outside, FakeTensor) and bool(outside.any()):
            expected = f"ids from 0 to {shard.vocabulary_size - 1}"
            raise ValueError(f"target: expected {expected}, found {int(target[outside][0])}")
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if shard.columns:
            own = logits[..., : shard.columns].amax(-1).to(dtype)
        else:
            own = logits.new_full(logits.shape[:-1], -torch.inf, dtype=dtype)
        maximum = reduce_in_place(own, shard.group, dist.ReduceOp.MAX)
        shifted = _shifted(logits, maximum, shard)
        sums = [_own_targets(shifted, target, shard)]
        if label_smoothing:
            sums.append(shifted.sum(-1))
        sums.insert(1, shifted.exp_().sum(-1))
        totals = reduce_in_place(torch.stack(sums), shard.group)
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
        return F.pad(gradient, (0, padding)) if padding else gradient, None, None, None, None


def _shifted(logits: torch.Tensor, maximum: torch.Tensor, shard: _Shard) -> torch.Tensor:
    """Return the logits that are no padding, less the maximum: a new tensor, promoted in the same kernel."""
    return logits[..., : shard.columns] - maximum.unsqueeze(-1)


def _own_targets(shifted: torch.Tensor, target: torch.Tensor, shard: _Shard) -> torch.Tensor:
    """Return the target's entry of ``shifted`` if this rank holds it, else zero: ``[..]``."""
    if not shard.columns:
        return shifted.new_zeros(target.shape)
    mine, column = shard.owned(target)  # a function of its own frees them
    return torch.where(mine, shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)


_CAUSAL_LM_LOSS = "ForCausalLMLoss"
"""Name of the transformers loss that `VocabularyLoss` computes."""

_LOSS = "loss_function"
"""Attribute by which transformers' models call their loss."""

_NO_ADAPTERS = "Adapters on it are not supported: take it out of target_modules and modules_to_save."


class ScaledParallelEmbedding(ParallelEmbedding):
    """An embedding whose result is multiplied by ``embed_scale``, as Gemma's."""

    embed_scale: torch.Tensor | float

    def take_scale(self, full: Any) -> None:
        self.scalar_embed_scale = getattr(full, "scalar_embed_scale", None)
        if isinstance(full.embed_scale, torch.Tensor):
            self.register_buffer("embed_scale", full.embed_scale.clone(), persistent=False)
        else:
            self.embed_scale = full.embed_scale

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        scale = self.embed_scale
        if isinstance(scale, torch.Tensor):
            scale = scale.to(self.weight.dtype)
        return super().forward(input_) * scale


def problems_of_vocabulary(model: Any) -> Iterator[Problem]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        yield Problem("embedding", "nn.Embedding", type(embedding).__name__, _NO_ADAPTERS)
    elif embedding.max_norm is not None or embedding.scale_grad_by_freq:
        yield Problem("embedding", "neither max_norm nor scale_grad_by_freq", "one of them")
    if head is not None and type(head) is not nn.Linear and any(True for _ in head.parameters()):
        yield Problem("head", "nn.Linear", type(head).__name__, _NO_ADAPTERS)


def divide_vocabulary(model: Any, region: SequenceRegion) -> None:
    """Divide embedding and head in place; tied ones stay tied.

    An embedding that does more than to look up and scale stays whole, and so does a head that is tied to it.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear:
        head = None
    tied = head is not None and head.weight is embedding.weight
    model.resize_token_embeddings = reject_resizing
    is_scaled = isinstance(getattr(embedding, "embed_scale", None), torch.Tensor | float | int)
    if type(embedding) is nn.Embedding or is_scaled:
        kind = ScaledParallelEmbedding if is_scaled else ParallelEmbedding
        divided = kind.from_embedding(embedding, tensor_model_parallel_group=region.group)
        if isinstance(divided, ScaledParallelEmbedding):
            divided.take_scale(embedding)
        replace(model, embedding, divided)
        embedding = divided
    elif tied:
        return
    if head is not None:
        _divide_head(model, head, embedding.weight if tied else None, region)


def _divide_head(model: Any, head: nn.Linear, tied_to: nn.Parameter | None, region: SequenceRegion) -> None:
    settings: dict[str, Any] = {
        "pad_output": True,
        "sequence_dimension": SEQUENCE_DIM,
        "tensor_model_parallel_group": region.group,
        "reduce_dtype": region.reduce_dtype,
    }
    region.head = ColumnParallelLinear.from_linear(head, **settings)
    if tied_to is not None:
        region.head.weight = tied_to
    replace(model, head, region.head)
    # A forward without `_LOSS` needs whole logits.
    region.head_returns_parts = _LOSS in inspect.unwrap(type(model).forward).__code__.co_names
    region.head.register_forward_hook(_HeadHook(region, head.out_features))
    if region.head_returns_parts:
        model.loss_function = VocabularyLoss(region, head.out_features, model.loss_function)
    model.register_forward_hook(_ModelExitHook(region, head.out_features), always_call=True)


def reject_resizing(*_: Any, **__: Any) -> None:
    """Replaces ``model.resize_token_embeddings``, because a rank holds only some rows of each table."""
    raise RuntimeError(
        "resize_token_embeddings: the embedding and the head of a patched model are divided among the ranks, "
        "each of which has a part of the vocabulary. Resize the whole model, then patch it"
    )


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in model.modules():
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


class VocabularyLoss:
    """Replaces ``model.loss_function``: computes the loss from this rank's part of the logits.

    Args:
        vocabulary_size: number of ids, without padding.
        own: the model's own loss. If it is not transformers' for causal language models it gets whole logits.
    """

    def __init__(self, region: SequenceRegion, vocabulary_size: int, own: Callable[..., Any]) -> None:
        self._region, self._vocabulary_size, self._own = region, vocabulary_size, own
        self.__name__ = getattr(own, "__name__", "")

    def __call__(self, logits: torch.Tensor, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        """Return the loss of logits ``[B, S, V / tp]``, or of whole ones, alike on all ranks."""
        region, group = self._region, self._region.group
        if region.current is not None:
            region.current.loss_computed = True
        if logits.shape[-1] == self._vocabulary_size:
            return self._own(logits, labels, vocab_size, **kwargs)
        if self.__name__ != _CAUSAL_LM_LOSS:
            return self._own(full_logits(logits, self._vocabulary_size, group), labels, vocab_size, **kwargs)
        return parallel_causal_lm_loss(logits, labels, self._vocabulary_size, process_group=group, **kwargs)


class _LogitsHook(ModelHook):
    def __init__(self, region: SequenceRegion, vocabulary_size: int) -> None:
        self._region, self._vocabulary_size = region, vocabulary_size


class _HeadHook(_LogitsHook):
    """Hook of the head: if the caller is not the model's own forward, gathers the whole vocabulary."""

    def __call__(self, _head: nn.Module, _args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        current = self._region.current
        if current is not None:
            if self._region.head_returns_parts:
                return output
            current.loss_computed = True  # the model's own loss gets whole logits
        return full_logits(output, self._vocabulary_size, self._region.group)


class _ModelExitHook(_LogitsHook):
    """Hook of the model: ends the forward and makes its logits whole."""

    def __call__(self, model: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        region, current, root = self._region, self._region.current, cast(Any, model)
        try:
            if output is None or current is None or current.owner is not model:
                return None
            if root.get_output_embeddings() is not region.head:
                return None  # an earlier stage of a pipeline: the head is on another
            if current.labelled and not current.loss_computed:
                raise RuntimeError(
                    "the forward of a patched model computed its loss without model.loss_function (a fused "
                    "loss, such as Liger's?): it has seen this rank's part of the vocabulary only. Switch "
                    "the fused loss off; the patched model's own never makes whole logits either"
                )
            if not region.head_returns_parts:  # the logits are whole already
                if current.length and not isinstance(output, tuple):
                    output.logits = without_padding(output.logits, SEQUENCE_DIM, current.length)
                return output
            if isinstance(output, tuple):
                place = 1 if current.labelled else 0
                return (*output[:place], self._whole(output[place], current), *output[place + 1 :])
            cut_masked_rows(output, current)
            output.logits = self._whole(output.logits, current)
            return output
        finally:
            region.end(model)

    def _whole(self, logits: torch.Tensor, current: SequenceForward) -> torch.Tensor:
        if current.length:
            logits = without_padding(logits, SEQUENCE_DIM, current.length)
        reads_later = current.labelled and torch.is_grad_enabled()
        return full_logits(logits, self._vocabulary_size, self._region.group, reads_later)


_aten = torch.ops.aten


def full_logits(
    shard: torch.Tensor, vocabulary_size: int, group: dist.ProcessGroup, when_read: bool = False
) -> torch.Tensor:
    """Gather logits ``[.., V / tp]`` to ``[.., vocabulary_size]``; every rank must do the same with them.

    With ``when_read`` the result gathers at the first operation that reads it (`LazyLogits`).
    """
    made: torch.Tensor
    if has_torch_function_unary(shard):
        made = handle_torch_function(full_logits, (shard,), shard, vocabulary_size, group, when_read)
    elif when_read:
        made = _GatheredLogits.apply(shard, vocabulary_size, group)
    else:
        made = gather_from_tensor_model_parallel_region(shard, group)[..., :vocabulary_size]
    return made


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


class _GatheredLogits(torch.autograd.Function):
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
