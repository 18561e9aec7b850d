"""The attention of a streamed model: what `transformers` calls in the place of its own attention functions.

A chunk's queries attend to its own keys, which are on the device, and to those of earlier chunks, which are
brought from the host one chunk at a time, the next one while this one is computed with. A layer leaves on
the host, for each chunk:

* ``("keys", layer, chunk)``: its keys and values, as far as later chunks see them: all of them, or under a
  sliding window its last ``window - 1`` tokens;
* ``("output", layer, chunk)``: its attention's output and the log-sum-exp, of the first pass. With these the
  second pass need not attend again: neither its forward nor the recomputation of a layer computes a score;
* ``("gradients", layer, chunk)``: in the second pass, the sum of what later chunks give the gradients of its
  keys and values, in fp32 or by choice rounded to bf16 whenever a chunk has been added.

The model's own mask function says which keys a layer sees. It is handed to `mask_rule`, which finds out what
it means and returns a `Visibility`; the model passes that on to its attention as its mask. So no mask is
made, and a rule that is not known here is an error and not another result. Documents that are packed into the
sequence are told by its positions, as in `transformers`; what no later chunk's document sees is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import PlanError, Problem
from .host_sequence import HostSequence
from .on_paper import LayerTrace, first_seen, left_by
from .piecewise_attention import Scores, Visibility, attend, attend_backward, merge

_UNKNOWN = ("s_aux", "position_bias", "cache", "head_mask", "cu_seq_lens_q", "block_table")
"""Arguments of attention functions that change the result, and are not known here."""


class ChunkAttention:
    """The attention of one sequence.

    Args:
        bounds: positions where chunks begin, and where the last one ends.
        host: what chunks leave for each other.
        documents: positions where the documents of the sequence begin.
        grad_accum_dtype: of sums of gradients on the host; ``fp32`` stands for at least that.
        again: layers that are recomputed; ``None``: all.

    Attributes:
        chunk: that runs.
        second: whether it runs with gradients.
        layers: that were called, in order.
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
        self.layers: dict[int, LayerTrace] = {}
        self._masks: dict[int | None, Visibility] = {}
        self._given: set[int] = set()

    def begin(self, chunk: int, second: bool) -> None:
        """A chunk runs: without gradients, or for the second time with them."""
        self.chunk, self.second = chunk, second
        self._given.clear()
        if second:
            self.host.expect(("output", min(self.layers), chunk))

    @property
    def positions(self) -> range:
        """Of the chunk that runs."""
        return self.positions_of(self.chunk)

    def positions_of(self, chunk: int) -> range:
        """Return the positions of a chunk's tokens."""
        return range(self.bounds[chunk], self.bounds[chunk + 1])

    def left_by(self, chunk: int, visible: Visibility) -> range:
        """Return the positions of a chunk whose keys a later one sees."""
        return left_by(self.bounds, chunk, visible)

    def forget(self, chunk: int) -> None:
        """Nobody will ask for what a chunk has left."""
        for layer in self.layers:
            for kind in ("keys", "output", "gradients"):
                self.host.drop((kind, layer, chunk))

    def mask_rule(self, *_: Any, **kwargs: Any) -> Visibility:
        """Stand in the place of `transformers`' mask functions (``AttentionMaskInterface``).

        Raises:
            PlanError: the model's mask is neither causal, nor a causal sliding window or blocks.
        """
        size, rule = kwargs.get("local_size"), kwargs["mask_function"]
        if size not in self._masks:
            with _disable_current_modes():  # on fake tensors nothing can be found out
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
        """Stand in the place of `transformers`' attention functions (``AttentionInterface``).

        Args:
            module: the attention, which knows its ``layer_idx``.
            query: ``[B, H, C, D]``, of the chunk that runs.
            key, value: ``[B, K, C, D]`` and ``[B, K, C, E]``, of the same tokens.
            attention_mask: what `mask_rule` returned.
            dropout, scaling, softcap: see `Scores`.
            kwargs: of the model's call and of other attention functions.

        Returns:
            ``[B, C, H, E]``.

        Raises:
            PlanError: the attention is of a kind that is not known here.
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
        if type(query) is not torch.Tensor:  # a run on fake tensors: what is saved, not what is computed
            grouped = key.shape[1] != query.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
            )
            return out.transpose(1, 2).clone(memory_format=torch.contiguous_format), None  # as below
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
        own = self.positions
        if ("output", layer, self.chunk) in self.host:
            raise PlanError([Problem("model", "one attention per layer", f"two in layer {layer}")])
        earlier = self._seen(scores.visible)
        coming = [("keys", layer, chunk) for chunk in earlier]
        if earlier and layer + 1 in self.layers:  # the next layer's first piece comes with this one's last
            coming += [("keys", layer + 1, chunk) for chunk in self._seen(self.layers[layer + 1].visible)[:1]]
        elif earlier:  # and behind the last layer that of the next chunk
            coming.append(("keys", min(self.layers), self.chunk))
        for piece in coming[:1]:
            self.host.expect(piece)
        left = len(self.left_by(self.chunk, scores.visible))
        if left:
            ends = (item[:, :, -left:].contiguous() for item in (key, value))
            self.host.put(("keys", layer, self.chunk), *ends)
        out, total = attend(query, key, value, scores, own, own)
        for place, chunk in enumerate(earlier):
            for piece in coming[place + 1 : place + 2]:
                self.host.expect(piece)
            keys, values = self.host.bring(("keys", layer, chunk))
            there = self.left_by(chunk, scores.visible)
            out, total = merge(out, total, *attend(query, keys, values, scores, own, there))
        out = out.to(query.dtype)
        self.host.put(("output", layer, self.chunk), out, total)
        return out

    def _seen(self, visible: Visibility) -> list[int]:
        """Return the earlier chunks that the present one sees, the nearest first."""
        return [*reversed(range(first_seen(self.bounds, self.chunk, visible), self.chunk))]

    def output(self, layer: int) -> list[torch.Tensor]:
        """Return a layer's output and log-sum-exp of the first pass; those of the next are on their way.

        The next are those of the layer above in forward, and of the one below where layers run again, which
        begins with the last one; behind the first one comes the chunk before.
        """
        found, again = self.host.bring(("output", layer, self.chunk)), layer in self._given
        above = [] if again else [item for item in self.layers if item > layer]
        below = [item for item, trace in self.layers.items() if trace.again and (item < layer or not again)]
        following = (*above, *reversed(below))
        coming = (following[0], self.chunk) if following else (min(self.layers), self.chunk - 1)
        self.host.expect(("output", *coming))
        if again or not (above or self.layers[layer].again):  # backward through its MLP or the head is ahead
            self._expect_piece(layer, self._seen(self.layers[layer].visible)[:1])
        self._given.add(layer)
        return found

    def backward(
        self,
        layer: int,
        scores: Scores,
        upstream: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        learns_keys: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the chunk's queries, keys and values; earlier chunks' go to the host.

        Args:
            layer: of the attention.
            scores: how they are made.
            upstream: gradient of the output, ``[B, H, C, E]``.
            saved: queries, keys, values, output, log-sum-exp.
            learns_keys: whether keys and values get gradients.
        """
        query, key, value, out, total = saved
        own, host = self.positions, self.host
        earlier = self._seen(scores.visible)
        self._expect_piece(layer, earlier[:1])
        wide = total.dtype
        upstream = upstream.contiguous()
        found = attend_backward(upstream, query, key, value, out, total, scores, own, own)
        of_query, of_key, of_value = (item.to(wide) for item in found)
        for place, chunk in enumerate(earlier):
            self._expect_piece(layer, earlier[place + 1 : place + 2])
            keys, values = host.bring(("keys", layer, chunk))
            there = self.left_by(chunk, scores.visible)
            found = attend_backward(upstream, query, keys, values, out, total, scores, own, there)
            of_query += found[0]
            if learns_keys:
                self._add_gradients(("gradients", layer, chunk), self._rounded or wide, *found[1:])
        below = self.layers.get(layer - 1)
        if below is not None and not below.again:  # backward through its MLP comes next
            self._expect_piece(layer - 1, self._seen(below.visible)[:1])
        if not learns_keys:
            return of_query.to(query.dtype), None, None
        later = ("gradients", layer, self.chunk)
        if later in host:
            for mine, theirs in zip((of_key, of_value), host.bring(later), strict=True):
                mine[:, :, -theirs.shape[2] :] += theirs
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)

    def _expect_piece(self, layer: int, chunks: list[int]) -> None:
        """Start the copies of what backward through a piece reads; without one, of its own gradients."""
        for chunk in chunks:
            self.host.expect(("keys", layer, chunk))
        for chunk in chunks or [self.chunk]:
            self.host.expect(("gradients", layer, chunk))

    def _add_gradients(self, key: tuple[str, int, int], dtype: torch.dtype, *found: torch.Tensor) -> None:
        if key in self.host:  # the kernel of the addition computes in fp32, and rounds to the sum's dtype
            found = tuple(sum_.add_(item) for sum_, item in zip(self.host.bring(key), found, strict=True))
        self.host.put(key, *(item.to(dtype).contiguous() for item in found))


class _Attention(torch.autograd.Function):
    """The second pass of one layer: forward gives what the first pass found."""

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
        ctx.attention, ctx.layer, ctx.scores = attention, layer, scores
        ctx.save_for_backward(query, key, value, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        attention: ChunkAttention = ctx.attention
        learns_keys = any(ctx.needs_input_grad[4:])
        with torch.autocast(upstream.device.type, enabled=False):
            found = attention.backward(ctx.layer, ctx.scores, upstream, ctx.saved_tensors, learns_keys)
        return None, None, None, *found


def _trace(
    visible: Visibility,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rounded: torch.dtype | None,
    again: bool,
) -> LayerTrace:
    rows, heads, _, size = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    sizes = size, value.shape[-1], query.dtype.itemsize, wide.itemsize
    return LayerTrace(visible, rows * heads, rows * key.shape[1], *sizes, (rounded or wide).itemsize, again)


def _check(module: Any, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    problems = []
    if getattr(module, "layer_idx", None) is None:
        problems.append(Problem("model", "attention modules with a layer_idx", type(module).__name__))
    if not isinstance(mask, Visibility):
        expected = "a model whose masks are made by transformers' masking functions"
        problems.append(Problem("model", expected, "a mask of its own"))
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
    """Find out what a mask function means: of what is known here it must be one, wherever it is asked."""
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
    hint = "Train it without stream_config."
    raise PlanError(
        [Problem("model", "a causal mask, a sliding window or blocks", "another mask", hint)], "stream_config"
    )
