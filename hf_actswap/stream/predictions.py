"""Predicts host memory, copies and FLOP of a streamed sequence from the shapes in one chunk of it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..plan import MemoryPlan
from ..plan.actions import Scope
from ..plan.model_structure import ModelStructure
from .piecewise_attention import Visibility

TOKEN_BYTES = 4 * 8
"""Device bytes per token of a row: id, label, shifted label and position, int64 each."""


@dataclass(frozen=True)
class AttentionShapes:
    """Shapes of one layer's attention.

    Args:
        visible: which keys a query may see.
        heads, key_heads: number of heads of queries, and of keys and values, times the rows of the batch.
        key_size, value_size: head size of queries and keys, and of values.
        item_bytes, wide_bytes: size of an element of the activations, and of the sums in at least fp32.
        gradient_bytes: size of an element of the gradient sums on the host.
        again: whether attention is called again because the layer is recomputed.
    """

    visible: Visibility
    heads: int
    key_heads: int
    key_size: int
    value_size: int
    item_bytes: int
    wide_bytes: int
    gradient_bytes: int
    again: bool = True

    @property
    def key_numbers(self) -> int:
        """Elements of the keys and values of one token."""
        return self.key_heads * (self.key_size + self.value_size)

    @property
    def output_bytes(self) -> int:
        """Bytes of attention's output and log-sum-exp for one token."""
        return self.heads * (self.value_size * self.item_bytes + self.wide_bytes)

    @property
    def forward_flop(self) -> int:
        """FLOP in forward for one pair of a query and a key: two matrix products."""
        return 2 * self.heads * (self.key_size + self.value_size)

    @property
    def backward_flop(self) -> int:
        """FLOP in backward for one pair of a query and a key: five products, one to recompute the scores."""
        return 2 * self.heads * (3 * self.key_size + 2 * self.value_size)

    @property
    def moving_bytes(self) -> int:
        """Device bytes in backward, per token of a chunk, of tensors that are being copied.

        To the host: the gradients of keys and values of four pieces (`host_sequence._MAX_PENDING_OFFLOADS`).
        To the device: the output of the next layer, and this layer's first piece with its gradients.
        """
        pieces = self.item_bytes + 5 * self.gradient_bytes
        return self.key_numbers * pieces + self.output_bytes

    @property
    def pieces_bytes(self) -> int:
        """Further device bytes per token of a chunk, at most, while attention runs backward in pieces.

        They come on top of `moving_bytes` and of what attention over a whole sequence needs. For queries:
        the sum of their gradients, the gradients from one piece, and a contiguous upstream gradient. For keys
        and values: the present piece, the next and the last; the gradients from one piece; and in the dtype
        of sums the chunk's own gradients, a piece's new ones, those brought from the host and those that are
        being copied. The piece and the gradients that `moving_bytes` counts are subtracted.
        """
        queries = self.heads * self.key_size * (self.wide_bytes + self.item_bytes)
        upstream = self.heads * self.value_size * self.item_bytes
        pieces = 3 * self.item_bytes + self.wide_bytes + self.gradient_bytes
        return queries + upstream + self.key_numbers * pieces


@dataclass(frozen=True)
class PassWork:
    """Work of attention in one pass over all chunks.

    Args:
        flop: floating-point operations of attention.
        merged_bytes: read and written on the device to add up results of pieces.
        out_bytes, in_bytes: copied to the host, and back to the device.
    """

    flop: int
    merged_bytes: int
    out_bytes: int
    in_bytes: int


def recomputed_attention(plan: MemoryPlan, structure: ModelStructure) -> frozenset[Scope]:
    """Return the layers whose attention runs again in the backward of a chunk."""
    return frozenset(
        layer.index
        for layer in structure.layers
        if any(plan.fate(layer.index, path) == "recompute" for path in layer.attention_paths)
    )


def chunk_bounds(length: int, tokens: int) -> list[int]:
    """Return the first position of each chunk of ``tokens`` tokens, and at the end ``length``."""
    return [*range(0, length, tokens), length]


def stored_positions(bounds: Sequence[int], chunk: int, visible: Visibility) -> range:
    """Return the positions in a chunk whose keys a later chunk sees: these are stored on the host."""
    start, stop = bounds[chunk : chunk + 2]
    return range(stop if stop == bounds[-1] else min(max(start, visible.first(stop)), stop), stop)


def first_visible_chunk(bounds: Sequence[int], chunk: int, visible: Visibility) -> int:
    """Return the first chunk that has a key which ``chunk`` sees."""
    return bisect_right(bounds, visible.first(bounds[chunk])) - 1


def host_bytes(layers: Iterable[AttentionShapes], bounds: Sequence[int]) -> int:
    """Return the peak of the host memory that a sequence takes, in bytes.

    It is reached in the second pass, at the end of some chunk's backward. By then the host holds outputs,
    keys and values of that chunk and of all before it, and gradients of its own keys and values and of those
    that it sees. Layers whose keys and values need no gradients take less than is counted.

    Args:
        layers: the attention of each layer of the model.
        bounds: first position of each chunk, and the length of the sequence.
    """
    at_end = [0] * (len(bounds) - 1)
    for layer, count in Counter(layers).items():
        left = _left_until(bounds, layer.visible)
        for chunk in range(len(at_end)):
            outputs, keys = bounds[chunk + 1] * layer.output_bytes, left[chunk + 1] * layer.item_bytes
            seen = left[chunk + 1] - left[first_visible_chunk(bounds, chunk, layer.visible)]
            at_end[chunk] += count * (outputs + layer.key_numbers * (keys + seen * layer.gradient_bytes))
    return max(at_end)


def longest_on_host(layers: Sequence[AttentionShapes], tokens: int, most_bytes: int, length: int) -> int:
    """Return the longest sequence, in tokens, that takes at most ``most_bytes`` of host memory.

    Args:
        layers: the attention of each layer of the model; at least one.
        tokens: length of a chunk.
        most_bytes: at least 0.
        length: the most tokens to return, at least 0.
    """
    most = min(most_bytes // sum(layer.output_bytes for layer in layers), length)
    fits = range(1, most + 1)
    return bisect_right(fits, most_bytes, key=lambda stop: host_bytes(layers, chunk_bounds(stop, tokens)))


def passes(layers: Iterable[AttentionShapes], bounds: Sequence[int]) -> tuple[PassWork, PassWork]:
    """Return the work of attention in the first pass and in the second.

    A piece is the keys and values that an earlier chunk has stored; each chunk that sees it copies it in. In
    the second pass each of these chunks also adds to the gradients of the piece and copies them out; all but
    the first of them copy them in before, and so does the chunk that the piece belongs to. Attention's output
    is copied in for the forward, and again for a layer that is recomputed. In the first pass the output for a
    piece is converted to the dtype of sums and merged: both are read, one is written. In the second pass the
    gradients from a piece are added to that of the queries, and to the sums of keys and values.

    Args:
        layers: the attention of each layer of the model.
        bounds: first position of each chunk, and the length of the sequence.
    """
    first, second = [0] * 4, [0] * 4
    for layer, count in Counter(layers).items():
        left = _left_until(bounds, layer.visible)
        pieces = merged = 0  # tokens of keys that chunks copy in; tokens of queries, counted once per piece
        for chunk, start in enumerate(bounds[:-1]):
            seen = first_visible_chunk(bounds, chunk, layer.visible)
            pieces += left[chunk] - left[seen]
            merged += (bounds[chunk + 1] - start) * (chunk - seen)
        pairs, outputs = layer.visible.pairs(bounds[-1]), bounds[-1] * layer.output_bytes
        item, wide = layer.item_bytes, layer.wide_bytes
        keys, gradients = layer.key_numbers * item, layer.key_numbers * layer.gradient_bytes
        forward = (
            layer.forward_flop * pairs,
            merged * layer.heads * layer.value_size * (3 * wide + (wide + item) * (wide > item)),
            left[-1] * keys + outputs,
            pieces * keys,
        )
        backward = (
            layer.backward_flop * pairs,
            merged * layer.heads * layer.key_size * (2 * wide + item) + pieces * (keys + 2 * gradients),
            pieces * gradients,
            (1 + layer.again) * outputs + pieces * (keys + gradients),
        )
        first = [total + count * part for total, part in zip(first, forward, strict=True)]
        second = [total + count * part for total, part in zip(second, backward, strict=True)]
    return PassWork(*first), PassWork(*second)


def _left_until(bounds: Sequence[int], visible: Visibility) -> list[int]:
    """Return, for each bound, the number of tokens whose keys the chunks before it store on the host."""
    chunks = range(len(bounds) - 1)
    return [0, *accumulate(len(stored_positions(bounds, chunk, visible)) for chunk in chunks)]
