"""Attention of a chunk of queries to keys and values that are given piece by piece.

**Forward.** For one query let the keys be divided into pieces. Attention to one piece alone gives
``o = sum_j exp(s_j) v_j / z`` with ``z = sum_j exp(s_j)``, over the scores ``s_j`` of that piece, and
``l = log z``. Attention to two pieces is ``(z_1 o_1 + z_2 o_2) / (z_1 + z_2)``, which is
``o_1 + w (o_2 - o_1)`` with ``w = z_2 / (z_1 + z_2) = sigmoid(l_2 - l_1)``, and ``log(exp(l_1) + exp(l_2))``
is the log of the sum of both: `merge` can then add the next piece. (Milakov and Gimelshein, "Online
normalizer calculation for softmax"; Dao et al., FlashAttention.)

**Backward.** With the final ``l`` and ``o`` the probability of each key is ``p_j = exp(s_j - l)``, so the
gradients from a piece do not depend on the other pieces: for the upstream gradient ``g``, ``dv_j = p_j g``,
``ds_j = p_j (g . v_j - g . o)``, and from it ``dq = sum_j ds_j k_j`` and ``dk_j = ds_j q``. This is what the
kernels of FlashAttention compute if they are given the final ``l`` and ``o`` in the place of their own.

A piece is computed by the flash kernel of the device where that supports it: no mask, no softcapping, a
supported dtype and head size. Otherwise a block of scores is computed for some queries at a time. Neither
repeats the keys and values of grouped heads. Sums over pieces are in fp32.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..engine.tiled_calls import product

_SCORES = 2**25
"""Elements of a block of scores, at most: 128 MiB in fp32."""
_ROWS = 1024
"""Queries in a block, at most: with fewer queries fewer masked scores are computed."""

_aten = torch.ops.aten


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: none after its own position, and fewer by these rules.

    Args:
        window: a sliding window: only the last ``window`` keys, the query's own position included.
        block: chunked attention: only keys in the query's own block of ``block`` positions.
        documents: first positions of the documents of a packed sequence, rising from 0. A query sees keys
            of its own document only, and blocks are counted from the start of the document.
    """

    window: int | None = None
    block: int | None = None
    documents: tuple[int, ...] = (0,)

    def first(self, position: int) -> int:
        """Return the first key that the query at ``position`` sees. It never falls with the position."""
        begin = self.documents[bisect_right(self.documents, position) - 1]
        if self.window is not None:
            return max(begin, position - self.window + 1)
        return begin + (position - begin) // self.block * self.block if self.block is not None else begin

    def by_document(self, queries: range) -> list[range]:
        """Return the queries of each document."""
        inside = bisect_right(self.documents, queries.start), bisect_left(self.documents, queries.stop)
        ends = [queries.start, *self.documents[slice(*inside)], queries.stop]
        return [range(start, stop) for start, stop in pairwise(ends)]

    def pairs(self, length: int) -> int:
        """Return the number of pairs of a query and a key that it sees in a sequence of ``length``."""
        if len(self.documents) > 1:
            one = replace(self, documents=(0,))
            return sum(one.pairs(len(document)) for document in self.by_document(range(length)))
        if self.block is not None:
            whole, rest = divmod(length, self.block)
            return whole * self.block * (self.block + 1) // 2 + rest * (rest + 1) // 2
        reach = length if self.window is None else min(self.window, length)
        return length * reach - reach * (reach - 1) // 2

    def mask(self, queries: range, keys: range, device: torch.device) -> torch.Tensor | None:
        """Return which query sees which key, bool, shape (queries, keys); ``None``: each sees all keys.

        Args:
            queries: positions in one document.
            keys: positions in the same document.
            device: where the mask is made.
        """
        if keys.stop - 1 <= queries.start and self.first(queries.stop - 1) <= keys.start:
            return None
        query = torch.arange(queries.start, queries.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        if self.block is not None:
            begin = self.documents[bisect_right(self.documents, queries.start) - 1]
            seen &= key >= begin + (query - begin) // self.block * self.block
        return seen


@dataclass(frozen=True)
class Scores:
    """How a layer computes its attention scores.

    Args:
        scale: factor of the products of queries and keys.
        softcap: a score ``s`` becomes ``softcap * tanh(s / softcap)``; ``None``: scores are not capped.
        visible: which keys a query sees.
    """

    scale: float
    softcap: float | None
    visible: Visibility


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, queries: range, keys: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to one piece, and the log of the sum of the exponentials of its scores.

    Args:
        query: ``[B, H, Q, D]``.
        key, value: ``[B, K, N, D]`` and ``[B, K, N, E]``; ``K`` divides ``H``.
        scores: scale, softcap and visible keys.
        queries, keys: the ``Q`` and ``N`` positions of both in the sequence.

    Returns:
        ``[B, H, Q, E]`` in the kernel's dtype or at least fp32, and ``[B, H, Q]`` in at least fp32; 0 and
        minus infinity for a query that sees no key.
    """
    parts = _by_document(scores.visible, queries, keys)
    if parts is None and _has_flash(query, key, value, scores, queries, keys):
        return _flash_forward(query, key, value, keys == queries, scores.scale)
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros((*query.shape[:3], value.shape[-1]), dtype=wide)
    total = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
    if parts is not None:
        for mine, theirs, document, there in parts:
            out[:, :, mine], total[:, :, mine] = attend(
                query[:, :, mine], key[:, :, theirs], value[:, :, theirs], scores, document, there
            )
        return out, total
    for rows, seen, mask in _blocks(query, key, scores.visible, queries, keys):
        made, _ = _scores_of(_grouped(query[:, :, rows], key), key[:, :, seen], mask, scores)
        part = torch.logsumexp(made, -1)
        weights = torch.where(part.isneginf()[..., None], 0.0, (made - part[..., None]).exp())
        shape = (query.shape[0], query.shape[1], rows.stop - rows.start)
        out[:, :, rows] = product(weights.to(value.dtype), value[:, :, seen]).view(*shape, -1)
        total[:, :, rows] = part.view(shape)
    return out, total


def merge(
    out: torch.Tensor, total: torch.Tensor, other: torch.Tensor, other_total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to two pieces together, in the dtype of ``total``, from those of `attend` for each.

    Each query must see a key of at least one of the two pieces.

    Args:
        out, total: from the pieces so far, ``[B, H, Q, E]`` and ``[B, H, Q]``; ``out`` may be overwritten.
        other, other_total: from the next piece, in the same shapes.
    """
    weight = (other_total - total).sigmoid_()[..., None]
    out = out.to(total.dtype).lerp_(other.to(total.dtype), weight)
    return out, torch.logaddexp(total, other_total)


def attend_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    scores: Scores,
    queries: range,
    keys: range,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values from attention to one piece.

    Args:
        upstream: gradient of ``out``.
        query, key, value, scores, queries, keys: as in `attend`.
        out: attention to all pieces together, in the dtype of the queries.
        total: the log of the sum of exponentials over all pieces together.

    Returns:
        Tensors of the shapes of ``query``, ``key`` and ``value``; the dtype is that of the kernel used.
    """
    wide = total.dtype
    parts = _by_document(scores.visible, queries, keys)
    if parts is not None:
        sums = [torch.zeros_like(item, dtype=wide) for item in (query, key, value)]
        for mine, theirs, document, there in parts:
            given, asking, made, ends = (x[:, :, mine].contiguous() for x in (upstream, query, out, total))
            piece = key[:, :, theirs], value[:, :, theirs]
            found = attend_backward(given, asking, *piece, made, ends, scores, document, there)
            for sum_, place, part in zip(sums, (mine, theirs, theirs), found, strict=True):
                sum_[:, :, place] = part
        return sums[0], sums[1], sums[2]
    if _has_flash(query, key, value, scores, queries, keys):
        return _flash_backward((upstream, query, key, value, out, total), keys == queries, scores.scale)
    of_query = torch.zeros_like(query)
    of_key = torch.zeros_like(key, dtype=wide)
    of_value = torch.zeros_like(value, dtype=wide)
    for rows, seen, mask in _blocks(query, key, scores.visible, queries, keys):
        some, seen_keys, seen_values = _grouped(query[:, :, rows], key), key[:, :, seen], value[:, :, seen]
        made, slope = _scores_of(some, seen_keys, mask, scores)
        given = _grouped(upstream[:, :, rows], key)
        weights = made.sub_(_grouped(total[:, :, rows, None], key)).exp_()
        shift = (given.to(wide) * _grouped(out[:, :, rows], key)).sum(-1, keepdim=True)
        of_value[:, :, seen] += product(weights.to(value.dtype).transpose(-1, -2), given)
        of_scores = product(given, seen_values.transpose(-1, -2)).sub_(shift).mul_(weights)
        if slope is not None:
            of_scores *= slope
        of_scores = (of_scores * scores.scale).to(query.dtype)
        of_query[:, :, rows] = (of_scores @ seen_keys).view_as(of_query[:, :, rows])
        of_key[:, :, seen] += product(of_scores.transpose(-1, -2), some)
    return of_query, of_key, of_value


def _blocks(
    query: torch.Tensor, key: torch.Tensor, visible: Visibility, queries: range, keys: range
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Yield blocks that cover all visible pairs, with few scores that are masked.

    Of each: the places of its queries in the chunk, those of its keys in the piece, and `Visibility.mask`.
    """
    step = min(_ROWS, max(1, _SCORES // (query.shape[0] * query.shape[1] * key.shape[2])))
    for first in range(0, len(queries), step):
        some = queries[first : first + step]
        seen = range(max(keys.start, visible.first(some.start)), min(keys.stop, some.stop))
        if seen:
            places = slice(seen.start - keys.start, seen.stop - keys.start)
            mask = visible.mask(some, seen, query.device)
            yield slice(first, first + len(some)), places, mask


def _by_document(
    visible: Visibility, queries: range, keys: range
) -> list[tuple[slice, slice, range, range]] | None:
    """Divide queries by document; ``None``: all queries belong to one document.

    Returns, for each document with a query that sees one of the keys, the slices of its queries and of the
    keys that they see, and the positions of both.
    """
    documents = visible.by_document(queries)
    if len(documents) == 1:
        return None
    found = []
    for some in documents:
        there = range(max(keys.start, visible.first(some.start)), min(keys.stop, some.stop))
        if there:
            rows = slice(some.start - queries.start, some.stop - queries.start)
            found.append((rows, slice(there.start - keys.start, there.stop - keys.start), some, there))
    return found


def _grouped(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, q, X]`` as ``[B, K, G * q, X]``: heads that share a key head become more rows of it."""
    return rows.reshape(rows.shape[0], key.shape[1], -1, rows.shape[-1])


def _scores_of(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a block's scores ``[B, K, G * q, n]``, and the derivative of the softcap where there is one."""
    made = product(query, key.transpose(-1, -2)).mul_(scores.scale)
    slope = None
    if scores.softcap is not None:
        bent = torch.tanh(made / scores.softcap)
        made, slope = bent * scores.softcap, 1 - bent * bent
    if mask is not None:
        shape = (*made.shape[:2], -1, *mask.shape)
        made = made.view(shape).masked_fill_(~mask, -torch.inf).view(made.shape)
    return made, slope


def _has_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, queries: range, keys: range
) -> bool:
    """Whether the device has a flash kernel for this piece; otherwise blocks of scores must do."""
    own = keys == queries  # then causal; any other piece must be seen whole by every query
    visible = scores.visible.first(queries.stop - 1) <= keys.start and (own or keys.stop <= queries.start)
    if not visible or scores.softcap is not None or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cpu":
        return query.dtype != torch.float16
    if query.device.type != "cuda" or query.shape[-1] % 8:
        return False
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, own, key.shape[1] != query.shape[1])
    return bool(torch.backends.cuda.can_use_flash_attention(asked))


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    forward = _aten._scaled_dot_product_flash_attention
    if query.device.type == "cpu":
        forward = _aten._scaled_dot_product_flash_attention_for_cpu
    out, total, *_ = forward(query, key, value, 0.0, causal, scale=scale)
    return out, total


def _flash_backward(
    saved: tuple[torch.Tensor, ...], causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients; ``saved``: upstream gradient, queries, keys, values, output and log-sum-exp."""
    _, query, key, *_ = saved
    if query.device.type == "cpu":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_query, of_key, of_value = backward(*saved, 0.0, causal, scale=scale)
    else:
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # without dropout it is not read
        lengths = None, None, query.shape[2], key.shape[2]
        backward = _aten._scaled_dot_product_flash_attention_backward
        of_query, of_key, of_value = backward(*saved, *lengths, 0.0, causal, state, state, scale=scale)
    return of_query, of_key, of_value
