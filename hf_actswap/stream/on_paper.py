"""What a streamed sequence takes, by arithmetic on the shapes that its layers show in one chunk."""

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
"""On the device for each token of a row: its id, its label, its shifted label and its position."""


@dataclass(frozen=True)
class LayerTrace:
    """Shapes of one layer's attention.

    Args:
        visible: which keys it sees.
        heads, key_heads: of queries, and of keys and values, of all rows of the batch together.
        key_size, value_size: numbers of a head of queries and keys, and of values.
        item_bytes, wide_bytes: of a number, and of one of a sum.
        gradient_bytes: of a number of the sums of gradients on the host.
        again: whether it is called again when the layer is recomputed.
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
        """Of keys and values of one token."""
        return self.key_heads * (self.key_size + self.value_size)

    @property
    def output_bytes(self) -> int:
        """Of the output and the log-sum-exp of one token."""
        return self.heads * (self.value_size * self.item_bytes + self.wide_bytes)

    @property
    def forward_flop(self) -> int:
        """Of a query and a key in forward: two products."""
        return 2 * self.heads * (self.key_size + self.value_size)

    @property
    def backward_flop(self) -> int:
        """Of a query and a key in backward: five products, as the scores are made again."""
        return 2 * self.heads * (3 * self.key_size + 2 * self.value_size)

    @property
    def moving_bytes(self) -> int:
        """On the device in backward for each token of a chunk: what leaves for the host, and what comes.

        Gradients of keys and values of four pieces (`host_sequence`), the output of the next layer, and the
        first piece of this one with its gradients.
        """
        pieces = self.item_bytes + 5 * self.gradient_bytes
        return self.key_numbers * pieces + self.output_bytes

    @property
    def pieces_bytes(self) -> int:
        """While attention runs backward beside those that move, and beyond a whole sequence's, at most.

        Of queries: the sum of gradients, those of one piece more, and upstream in one piece. Of keys and
        values: two pieces and one that ends; gradients that a piece has found; the chunk's own in the dtype
        of sums; and sums that are brought and coming. Less the piece that `moving_bytes` has, and its sum.
        """
        queries = self.heads * self.key_size * (self.wide_bytes + self.item_bytes)
        upstream = self.heads * self.value_size * self.item_bytes
        pieces = 3 * self.item_bytes + self.wide_bytes + self.gradient_bytes
        return queries + upstream + self.key_numbers * pieces


@dataclass(frozen=True)
class PassWork:
    """What one pass over the chunks does for attention.

    Args:
        flop: arithmetic of attention.
        merged_bytes: that compute reads and writes to add up what it finds in pieces.
        out_bytes, in_bytes: that are copied to the host, and back.
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
    """Return the positions where chunks of ``tokens`` begin, and ``length``."""
    return [*range(0, length, tokens), length]


def left_by(bounds: Sequence[int], chunk: int, visible: Visibility) -> range:
    """Return the positions of a chunk whose keys a later one sees."""
    start, stop = bounds[chunk : chunk + 2]
    return range(stop if stop == bounds[-1] else min(max(start, visible.first(stop)), stop), stop)


def first_seen(bounds: Sequence[int], chunk: int, visible: Visibility) -> int:
    """Return the first chunk of which ``chunk`` sees a key."""
    return bisect_right(bounds, visible.first(bounds[chunk])) - 1


def host_bytes(layers: Iterable[LayerTrace], bounds: Sequence[int]) -> int:
    """Return the most bytes of host memory that a sequence takes at once.

    When a chunk has run backward there are outputs, keys and values of it and of those before it, and
    gradients of the keys and values that it sees and of its own. If keys and values of a layer need no
    gradients, it is less.

    Args:
        layers: of the model.
        bounds: see `chunk_bounds`.
    """
    at_end = [0] * (len(bounds) - 1)
    for layer, count in Counter(layers).items():
        left = _left_until(bounds, layer.visible)
        for chunk in range(len(at_end)):
            outputs, keys = bounds[chunk + 1] * layer.output_bytes, left[chunk + 1] * layer.item_bytes
            seen = left[chunk + 1] - left[first_seen(bounds, chunk, layer.visible)]
            at_end[chunk] += count * (outputs + layer.key_numbers * (keys + seen * layer.gradient_bytes))
    return max(at_end)


def longest_on_host(layers: Sequence[LayerTrace], tokens: int, most_bytes: int, length: int) -> int:
    """Return how long a sequence may be, up to ``length``, to take ``most_bytes`` of host memory or less.

    Args:
        layers: of the model, at least one.
        tokens: of a chunk.
        most_bytes, length: at least 0.
    """
    most = min(most_bytes // sum(layer.output_bytes for layer in layers), length)
    fits = range(1, most + 1)
    return bisect_right(fits, most_bytes, key=lambda stop: host_bytes(layers, chunk_bounds(stop, tokens)))


def passes(layers: Iterable[LayerTrace], bounds: Sequence[int]) -> tuple[PassWork, PassWork]:
    """Return what both passes do for attention.

    Pieces of keys and values come to each chunk that sees them. In the second pass their gradients come too,
    but to the chunk that is the first to have some, and leave, and come at last to their own chunk; the
    output comes to forward, and again to a layer that is recomputed. In the first pass a piece's output is
    converted to the dtype of sums, and merged, which reads both and writes one; in the second its gradients
    are added to that of the queries, and to the sums of keys and values.

    Args:
        layers: of the model.
        bounds: see `chunk_bounds`.
    """
    first, second = [0] * 4, [0] * 4
    for layer, count in Counter(layers).items():
        left = _left_until(bounds, layer.visible)
        pieces = merged = 0  # tokens of keys that chunks bring, and of queries, once for each piece
        for chunk, start in enumerate(bounds[:-1]):
            seen = first_seen(bounds, chunk, layer.visible)
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
    """Tokens whose keys the chunks before each bound leave."""
    chunks = range(len(bounds) - 1)
    return [0, *accumulate(len(left_by(bounds, chunk, visible)) for chunk in chunks)]
