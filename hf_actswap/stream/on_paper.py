"""What a streamed sequence takes, by arithmetic on what its layers show in one chunk."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .piecewise_attention import Visibility


@dataclass(frozen=True)
class LayerTrace:
    """What the attention of one layer leaves on the host, as its first call shows it.

    Args:
        visible: which keys it sees.
        key_bytes: of keys and values of one token of the batch.
        gradient_bytes: of their gradients.
        output_bytes: of the output and the log-sum-exp of one token of the batch.
    """

    visible: Visibility
    key_bytes: int
    gradient_bytes: int
    output_bytes: int


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
        left = [0, *accumulate(len(left_by(bounds, chunk, layer.visible)) for chunk in range(len(at_end)))]
        for chunk in range(len(at_end)):
            outputs, keys = bounds[chunk + 1] * layer.output_bytes, left[chunk + 1] * layer.key_bytes
            seen = left[chunk + 1] - left[first_seen(bounds, chunk, layer.visible)]
            at_end[chunk] += count * (outputs + keys + seen * layer.gradient_bytes)
    return max(at_end)


def longest_on_host(layers: Sequence[LayerTrace], tokens: int, most_bytes: int) -> int:
    """Return the length of the longest sequence that takes ``most_bytes`` of host memory or less.

    Args:
        layers: of the model, at least one.
        tokens: of a chunk.
        most_bytes: at least 0.
    """
    most = most_bytes // sum(layer.output_bytes for layer in layers)
    fits = range(1, most + 1)
    return bisect_right(fits, most_bytes, key=lambda length: host_bytes(layers, chunk_bounds(length, tokens)))
