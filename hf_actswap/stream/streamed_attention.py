"""The attention function that `transformers` calls, in place of its own, while a sequence is streamed.

A chunk's queries attend to its own keys, which are on the device, and to those of earlier chunks. These are
copied from the host one chunk at a time; the next is copied while the present one is computed with. A layer
stores on the host, for each chunk:

* ``("keys", layer, chunk)``: the keys and values that later chunks see: all of them, or under a sliding
  window the last ``window - 1`` tokens;
* ``("output", layer, chunk)``: attention's output ``[B, C, H, E]`` and log-sum-exp from the first pass. The
  second reads them, so that neither its forward nor the recomputation of a layer computes attention again;
* ``("gradients", layer, chunk)``: in the second pass, the gradients of the keys and values that later chunks
  have added up, in fp32, or if asked for rounded to bf16 after each addition.

The model's own mask function says which keys a layer sees. `transformers` gives it to `mask_rule`, which
recognises the rule and returns a `Visibility`; the model passes that to its attention as the mask. So no mask
is made, and an unknown rule is an error. Documents that are packed into the sequence are recognised by their
positions, as in `transformers`; keys that no later chunk sees are not stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from ..engine.host_pool import HostPool, PageableSlabs
from ..engine.stats import Counters
from ..engine.transfer import BlockingTransfer
from ..errors import PlanError, Problem
from .host_sequence import AttentionShapes, HostSequence, chunk_bounds, first_visible_chunk, stored_positions
from .piecewise_attention import Scores, Visibility, attend, attend_backward, merge

_NAME = "hf_actswap_streamed"
"""Name under which the attention is registered with `transformers`."""

_UNKNOWN = ("s_aux", "position_bias", "cache", "head_mask", "cu_seq_lens_q", "block_table")
"""Arguments of attention functions that would change the result and are not supported."""


class ChunkAttention:
    """The attention of one sequence.

    Args:
        bounds: first positions of the chunks, and the length of the sequence.
        host: stores tensors of one chunk for others.
        documents: first positions of the documents of the sequence.
        grad_accum_dtype: dtype of the gradient sums on the host; ``fp32`` means at least fp32.
        again: layers that are recomputed; ``None``: all.

    Attributes:
        layers: shapes of the attention of each layer that was called, by layer index, in order of calls.
    """

    def __init__(
        self,
        bounds: list[int],
        host: HostSequence,
        documents: tuple[int, ...] = (0,),
        grad_accum_dtype: Literal["fp32", "bf16"] = "fp32",
        again: Container[object] | None = None,
    ) -> None:
        self.bounds, self.host, self._documents = bounds, host, documents
        self._rounded = torch.bfloat16 if grad_accum_dtype == "bf16" else None
        self._again = again
        self.chunk, self.second = 0, False
        self.layers: dict[int, AttentionShapes] = {}
        self._masks: dict[int | None, Visibility] = {}
        self._given: set[int] = set()
        self._nodes: list[weakref.ref[Any]] = []

    def begin(self, chunk: int, second: bool) -> None:
        """Note which chunk runs next, and whether in the ``second`` pass, with gradients."""
        self.chunk, self.second = chunk, second
        self._given.clear()
        self._nodes.clear()
        if second:
            self.host.prefetch(("output", min(self.layers), chunk))

    def nodes(self) -> list[weakref.ref[Any]]:
        """Return autograd's nodes of the attention of the chunk that runs: dead when its graph is."""
        return [*self._nodes]

    def positions_of(self, chunk: int) -> range:
        """Return the positions of a chunk's tokens."""
        return range(self.bounds[chunk], self.bounds[chunk + 1])

    def forget(self, chunk: int) -> None:
        """Free the host memory of a chunk, after its backward."""
        for layer in self.layers:
            for kind in ("keys", "output", "gradients"):
                self.host.drop((kind, layer, chunk))

    def mask_rule(self, *_: Any, **kwargs: Any) -> Visibility:
        """Return the rule of a layer's mask in its place (transformers' ``AttentionMaskInterface``)."""
        size, rule = kwargs.get("local_size"), kwargs["mask_function"]
        if size not in self._masks:
            with _disable_current_modes():  # fake tensors have no values to compare
                found = _visibility(rule, size, kwargs.get("device") or torch.device("cpu"))
            self._masks[size] = replace(found, documents=self._documents)
        return self._masks[size]

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of a chunk to all tokens so far (transformers' ``AttentionInterface``).

        Args:
            module: the attention module; its ``layer_idx`` is read.
            query: ``[B, H, C, D]``, of the chunk that runs.
            key, value: ``[B, K, C, D]`` and ``[B, K, C, E]``, of the same tokens.
            attention_mask: the `Visibility` that `mask_rule` returned.
            dropout: must be 0.
            scaling: factor of the scores; ``None``: ``D ** -0.5``.
            softcap: limit of the scores (`Scores`); ``None``: they are not capped.
            kwargs: further arguments of the model's call; those that change attention are rejected.

        Returns:
            ``[B, C, H, E]``, and ``None`` for the attention weights.
        """
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # as scaled_dot_product_attention does
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        _check(module, attention_mask, dropout, kwargs)
        layer = int(module.layer_idx)
        if layer not in self.layers:
            again = self._again is None or layer in self._again
            self.layers[layer] = _trace(attention_mask, query, key, value, self._rounded, again)
        if type(query) is not torch.Tensor:  # a run on fake tensors: only shapes and saved tensors matter
            grouped = key.shape[1] != query.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
            )
            return out.transpose(1, 2).contiguous(), None  # of flash attention, and below, no copy
        scores = Scores(scaling, softcap, attention_mask)
        with torch.autocast(kind, enabled=False):
            if self.second:
                out = _Attention.apply(self, layer, scores, query, key, value)
            else:
                out = self._first_pass(layer, scores, query, key, value)
        return out.transpose(1, 2).contiguous(), None

    def _first_pass(
        self, layer: int, scores: Scores, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        own = self.positions_of(self.chunk)
        if ("output", layer, self.chunk) in self.host:
            raise PlanError([Problem("model", "one attention per layer", f"two in layer {layer}")])
        earlier = self._seen(scores.visible)
        coming = [("keys", layer, chunk) for chunk in earlier]
        if earlier and layer + 1 in self.layers:  # the next layer's first piece comes with this one's last
            coming += [("keys", layer + 1, chunk) for chunk in self._seen(self.layers[layer + 1].visible)[:1]]
        elif earlier:  # after the last layer: the first piece of the next chunk
            coming.append(("keys", min(self.layers), self.chunk))
        for piece in coming[:1]:
            self.host.prefetch(piece)
        if left := len(stored_positions(self.bounds, self.chunk, scores.visible)):
            ends = (item[:, :, -left:].contiguous() for item in (key, value))
            self.host.put(("keys", layer, self.chunk), *ends)
        out, total = attend(query, key, value, scores, own, own)
        for place, chunk in enumerate(earlier):
            for piece in coming[place + 1 : place + 2]:
                self.host.prefetch(piece)
            keys, values = self.host.fetch(("keys", layer, chunk))
            there = stored_positions(self.bounds, chunk, scores.visible)
            out, total = merge(out, total, *attend(query, keys, values, scores, own, there))
        # Flash attention leaves its output in this layout, and the model reads it so: then nothing is copied.
        by_token = out.to(query.dtype).transpose(1, 2).contiguous()
        self.host.put(("output", layer, self.chunk), by_token, total.contiguous())
        return by_token.transpose(1, 2)

    def _seen(self, visible: Visibility) -> list[int]:
        """Return the earlier chunks with keys that the present chunk sees, the nearest first."""
        return [*reversed(range(first_visible_chunk(self.bounds, self.chunk, visible), self.chunk))]

    def output(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's output and log-sum-exp from the first pass, and start the next copies.

        In the forward of the second pass the layer above is next. When layers are recomputed in backward,
        from the last to the first, the layer below is next, and after the first layer the chunk before.
        """
        (by_token, total), again = self.host.fetch(("output", layer, self.chunk)), layer in self._given
        above = [] if again else [item for item in self.layers if item > layer]
        below = [item for item, trace in self.layers.items() if trace.again and (item < layer or not again)]
        following = (*above, *reversed(below))
        coming = (following[0], self.chunk) if following else (min(self.layers), self.chunk - 1)
        self.host.prefetch(("output", *coming))
        if again or not (above or self.layers[layer].again):  # backward through its MLP or the head is ahead
            self._expect_piece(layer, self._seen(self.layers[layer].visible)[:1])
        self._given.add(layer)
        return by_token.transpose(1, 2), total

    def backward(
        self,
        layer: int,
        scores: Scores,
        upstream: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        keys_need_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the chunk's queries, keys and values; add to earlier chunks' on the host.

        ``upstream`` is the gradient of the output, ``[B, H, C, E]``.
        """
        query, key, value, out, total = saved
        own, host = self.positions_of(self.chunk), self.host
        earlier = self._seen(scores.visible)
        self._expect_piece(layer, earlier[:1])
        wide = total.dtype
        upstream = upstream.contiguous()
        found = attend_backward(upstream, query, key, value, out, total, scores, own, own)
        of_query, of_key, of_value = (item.to(wide) for item in found)
        for place, chunk in enumerate(earlier):
            self._expect_piece(layer, earlier[place + 1 : place + 2])
            keys, values = host.fetch(("keys", layer, chunk))
            there = stored_positions(self.bounds, chunk, scores.visible)
            found = attend_backward(upstream, query, keys, values, out, total, scores, own, there)
            of_query += found[0]
            if keys_need_grad:
                self._add_gradients(("gradients", layer, chunk), self._rounded or wide, *found[1:])
        below = self.layers.get(layer - 1)
        if below is not None and not below.again:  # backward through its MLP comes next
            self._expect_piece(layer - 1, self._seen(below.visible)[:1])
        if not keys_need_grad:
            return of_query.to(query.dtype), None, None
        later = ("gradients", layer, self.chunk)
        if later in host:
            for mine, theirs in zip((of_key, of_value), host.fetch(later), strict=True):
                mine[:, :, -theirs.shape[2] :] += theirs
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)

    def _expect_piece(self, layer: int, chunks: list[int]) -> None:
        """Start copying in the next piece with its gradients; without one, the chunk's own gradients."""
        for chunk in chunks:
            self.host.prefetch(("keys", layer, chunk))
        for chunk in chunks or [self.chunk]:
            self.host.prefetch(("gradients", layer, chunk))

    def _add_gradients(self, key: tuple[str, int, int], dtype: torch.dtype, *found: torch.Tensor) -> None:
        if key in self.host:  # the kernel of the addition computes in fp32, and rounds to the sum's dtype
            found = tuple(sum_.add_(item) for sum_, item in zip(self.host.fetch(key), found, strict=True))
        self.host.put(key, *(item.to(dtype).contiguous() for item in found))


@contextmanager
def attending(root: nn.Module, attention: ChunkAttention) -> Iterator[None]:
    """Within the block the layers of a model call ``attention``, with its mask rule in place of masks."""
    # With a transformers model this is imported already; without one the import would cost seconds.
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTION

    found = {id(item.config): item.config for item in root.modules() if hasattr(item, "config")}
    # Not the stand-ins that read from a configuration (`parallel`: a rank's own number of heads).
    configs: list[Any] = [item for item in found.values() if hasattr(type(item), "_attn_implementation")]
    before = [config._attn_implementation for config in configs]
    ATTENTION.register(_NAME, attention)
    MASKS.register(_NAME, attention.mask_rule)
    try:
        for config in configs:
            config._attn_implementation = _NAME
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation = own
        ATTENTION._global_mapping.pop(_NAME, None)
        MASKS._global_mapping.pop(_NAME, None)


def host_of_no_plan(device: torch.device) -> HostSequence:
    """Return host memory of its own, that no statistics count, for a few tokens on ``device``."""
    return HostSequence(HostPool(PageableSlabs()), BlockingTransfer(device), Counters())


@contextmanager
def traced(
    root: nn.Module, tokens: int, grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
) -> Iterator[Mapping[int, AttentionShapes]]:
    """Within the block a call of the model on fake tensors fills in the shapes of its layers' attention.

    Args:
        root: a model that `rejections.problems_of_model` does not reject.
        tokens: length of the chunk.
        grad_accum_dtype: as in `SequenceChunks`.
    """
    bounds, nowhere = chunk_bounds(tokens, tokens), host_of_no_plan(torch.device("cpu"))
    attention = ChunkAttention(bounds, nowhere, grad_accum_dtype=grad_accum_dtype)
    with attending(root, attention):
        yield attention.layers


class _Attention(torch.autograd.Function):
    """Attention of one layer in the second pass: its forward returns the stored output of the first pass."""

    @staticmethod
    def forward(
        ctx: Any,
        attention: ChunkAttention,
        layer: int,
        scores: Scores,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        out, total = attention.output(layer)
        attention._nodes.append(weakref.ref(ctx))
        ctx.attention, ctx.layer, ctx.scores = attention, layer, scores
        ctx.save_for_backward(query, key, value, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        attention: ChunkAttention = ctx.attention
        keys_need_grad = any(ctx.needs_input_grad[4:])
        with torch.autocast(upstream.device.type, enabled=False):
            found = attention.backward(ctx.layer, ctx.scores, upstream, ctx.saved_tensors, keys_need_grad)
        return None, None, None, *found


def _trace(
    visible: Visibility,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rounded: torch.dtype | None,
    again: bool,
) -> AttentionShapes:
    rows, heads, _, size = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    sizes = size, value.shape[-1], query.dtype.itemsize, wide.itemsize
    return AttentionShapes(
        visible, rows * heads, rows * key.shape[1], *sizes, (rounded or wide).itemsize, again
    )


def _check(module: Any, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    problems = []
    if getattr(module, "layer_idx", None) is None:
        problems.append(Problem("model", "attention modules with a layer_idx", type(module).__name__))
    if not isinstance(mask, Visibility):
        masks = "a model whose masks are made by transformers' masking functions"
        problems.append(Problem("model", masks, "a mask of its own"))
    if dropout:
        problems.append(Problem("model.config.attention_dropout", "0", str(dropout)))
    problems += [
        Problem("model", "attention of queries, keys and values alone", f"attention with `{name}`")
        for name in _UNKNOWN
        if kwargs.get(name) is not None
    ]
    if problems:
        raise PlanError(problems, "stream_config")


def _visibility(rule: Callable[..., torch.Tensor], size: int | None, device: torch.device) -> Visibility:
    """Return the rule that a mask function computes, compared at several queries; raise if it is unknown."""
    known = [Visibility()] if size is None else [Visibility(window=size), Visibility(block=size)]
    last = 64 if size is None else 2 * size + 1
    keys, none = torch.arange(last + 2, device=device), torch.zeros((), dtype=torch.long, device=device)
    for visible in known:
        asked = {0, last // 2 - 1, last // 2, last - 1, last}
        if all(
            torch.equal(
                rule(none, none, keys[position], keys).expand(len(keys)),
                (keys >= visible.first(position)) & (keys <= position),
            )
            for position in asked
        ):
            return visible
    known_rules, hint = "a causal mask, a sliding window or blocks", "Train it without stream_config."
    raise PlanError([Problem("model", known_rules, "another mask", hint)], "stream_config")
