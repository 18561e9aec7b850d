"""Embedding, head and loss of a causal language model whose vocabulary is divided among the ranks.

The head's output is this rank's part of the logits, ``[B, S, V / tp]``. The model's own forward hands them
to its loss function, which is replaced by one that takes parts. The logits that leave the model have the
whole vocabulary: gathered at once, or, while the model trains on labels, when they are read (`LazyLogits`).

If your code needs the head, call it: ``model.lm_head(hidden)`` returns whole logits. Its ``weight`` has only
this rank's rows, and so has the embedding's; `Patched.full_state_dict` has the whole weights.

While a model trains on labels its loss is computed from each rank's part of the logits, and the whole
vocabulary on every rank would be the largest tensor of the step. The output must have logits all the same,
of the shape that everybody expects: a trainer may look at them (TRL computes accuracy and entropy). So the
output holds a tensor that knows its shape, and gathers at the first operation on it.

**Every rank of the group must read it, or none**: reading is a collective. Detaching and changing the dtype
(what Accelerate does to every output) are no reading.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_map_only

from ..errors import Problem
from .collectives import gathered, own_part
from .cross_entropy import parallel_causal_lm_loss
from .embedding import ParallelEmbedding
from .layers import ColumnParallelLinear
from .mappings import gather_from_tensor_model_parallel_region
from .sequence_region import SEQUENCE_DIM, SequenceForward, SequenceRegion, cut_masked_rows, without_padding

_CAUSAL_LM_LOSS = "ForCausalLMLoss"
"""Name of the transformers loss that `VocabularyLoss` computes."""


_LOSS = "loss_function"
"""Attribute by which transformers' models call their loss."""


class ScaledParallelEmbedding(ParallelEmbedding):
    """An embedding whose result is multiplied by ``embed_scale``, as Gemma's."""

    embed_scale: torch.Tensor | float

    def take_scale(self, full: Any) -> None:
        """Take the scale from the full embedding."""
        self.scalar_embed_scale = getattr(full, "scalar_embed_scale", None)
        if isinstance(full.embed_scale, torch.Tensor):
            self.register_buffer("embed_scale", full.embed_scale.clone(), persistent=False)
        else:
            self.embed_scale = full.embed_scale

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Look ``[B, S]`` ids up: ``[B, S, H]``."""
        scale = self.embed_scale
        if isinstance(scale, torch.Tensor):
            scale = scale.to(self.weight.dtype)
        return super().forward(input_) * scale


def problems_of_vocabulary(model: Any) -> Iterator[Problem]:
    """Yield a problem for an embedding or a head that is not supported."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        hint = "Adapters on it are not supported: take it out of target_modules and modules_to_save."
        yield Problem("embedding", "nn.Embedding", type(embedding).__name__, hint)
    elif embedding.max_norm is not None or embedding.scale_grad_by_freq:
        yield Problem("embedding", "neither max_norm nor scale_grad_by_freq", "one of them")
    if head is not None and type(head) is not nn.Linear and any(True for _ in head.parameters()):
        hint = "Adapters on it are not supported: take it out of target_modules and modules_to_save."
        yield Problem("head", "nn.Linear", type(head).__name__, hint)


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
    region.head_returns_parts = _LOSS in _names_in_forward(model)
    region.head.register_forward_hook(_HeadHook(region, head.out_features))
    if region.head_returns_parts:
        model.loss_function = VocabularyLoss(region, head.out_features, model.loss_function)
    model.register_forward_hook(_ModelExitHook(region, head.out_features), always_call=True)


def _names_in_forward(model: nn.Module) -> tuple[str, ...]:
    """Return the names that a model's forward uses (a forward without `_LOSS` needs whole logits)."""
    forward = inspect.unwrap(type(model).forward)
    return forward.__code__.co_names


def reject_resizing(*_: Any, **__: Any) -> None:
    """Replaces ``model.resize_token_embeddings``, because a rank holds only some rows of each table.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "resize_token_embeddings: the embedding and the head of a patched model are divided among the ranks, "
        "each of which has a part of the vocabulary. Resize the whole model, then patch it"
    )


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace the module ``old`` by ``new`` wherever it is registered in ``model``."""
    for module in model.modules():
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


class VocabularyLoss:
    """Replaces ``model.loss_function``: computes the loss from this rank's part of the logits.

    Args:
        region: says where the model's hidden states are parts of the sequence.
        vocabulary_size: number of ids, without padding.
        own: the model's own loss. If it is not transformers' for causal language models it gets whole logits.

    Attributes:
        __name__: name of the model's own loss.
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


class _HeadHook:
    """Hook of the head: if the caller is not the model's own forward, gathers the whole vocabulary."""

    part_of_the_model = True

    def __init__(self, region: SequenceRegion, vocabulary_size: int) -> None:
        self._region, self._vocabulary_size = region, vocabulary_size

    def __call__(self, _head: nn.Module, _args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        current = self._region.current
        if current is not None and self._region.head_returns_parts:
            return output
        if current is not None:
            current.loss_computed = True  # the model's own loss gets whole logits
        return full_logits(output, self._vocabulary_size, self._region.group)


class _ModelExitHook:
    """Hook of the model: ends the forward and makes its logits whole."""

    part_of_the_model = True

    def __init__(self, region: SequenceRegion, vocabulary_size: int) -> None:
        self._region, self._vocabulary_size = region, vocabulary_size

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
            if not region.head_returns_parts:
                return self._without_padding(output, current)
            if isinstance(output, tuple):
                place = 1 if current.labelled else 0
                return (*output[:place], self._whole(output[place]), *output[place + 1 :])
            cut_masked_rows(output, current)
            output.logits = self._whole(output.logits)
            return output
        finally:
            region.end(model)

    def _without_padding(self, output: Any, current: SequenceForward) -> Any:
        """Cut the padding off an output whose logits are whole already."""
        if current.length and not isinstance(output, tuple):
            output.logits = without_padding(output.logits, SEQUENCE_DIM, current.length)
        return output

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        region, current = self._region, self._region.current
        assert current is not None
        if current.length:
            logits = without_padding(logits, SEQUENCE_DIM, current.length)
        reads_later = current.labelled and torch.is_grad_enabled()
        return full_logits(logits, self._vocabulary_size, region.group, reads_later)


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
