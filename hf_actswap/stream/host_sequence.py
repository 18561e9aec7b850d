"""Host memory for the tensors that one chunk of a sequence stores and other chunks read.

`HostSequence` stores tensors under a key and copies them to the device and back. No other module knows
where they are: a second tier behind host memory would be added here.

**Order.** Copies follow the contract of `engine.transfer`. `put` starts a copy to the host and keeps its
source; compute waits for that copy after `_MAX_PENDING_OFFLOADS` later calls of `put`. So device memory holds
the sources of a few copies only, and compute never waits for a copy that was started just before. `prefetch`
starts a copy to the device, which the transfer orders after the copy that wrote the host block; callers start
it for the next tensors before they compute with the present ones. `fetch` makes compute wait for that copy.
A `put` under the same key may then overwrite the block, because its last reader is done: gradients of keys
and values are brought, added to, and put back. `drop` waits for copies that still run, then returns the block
to the pool.

All methods are called from one thread at a time: first that of the forward, later that of the backward.

Predicts host memory, copies and FLOP of a streamed sequence from the shapes in one chunk of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..config.sizes import gib_text
from ..engine.host_pool import HostPool
from ..engine.moving_block import MovingBlock
from ..engine.stats import Counters
from ..engine.transfer import Transfer
from ..errors import PlanError, Problem
from ..plan import MemoryPlan
from ..plan.actions import Scope
from ..plan.model_structure import ModelStructure
from .piecewise_attention import Visibility

_MAX_PENDING_OFFLOADS = 4
"""How many entries may have unfinished copies to the host."""

Key = Hashable


Blocks = list[MovingBlock]
"""The tensors of one key, a block for each."""


class HostSequence:
    """Stores tensors of the chunks of one sequence in host memory, and copies them back for other chunks.

    Args:
        pool: where host blocks are taken from.
        transfer: copies between device and host.
        counters: counters of the plan, to which copies, their bytes and waits are added.
    """

    def __init__(self, pool: HostPool, transfer: Transfer, counters: Counters) -> None:
        self._pool, self._transfer, self._counters = pool, transfer, counters
        self._blocks: dict[Key, Blocks] = {}
        self._leaving: deque[Blocks] = deque()

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def make_ready(self, size_bytes: int, longest: Callable[[int], int]) -> None:
        """Start page-locking the host memory that the sequence needs; `PlanError` if that is over the limit.

        Args:
            size_bytes: the most host memory that the sequence takes.
            longest: returns the number of tokens that fit in a number of bytes; for the error message.
        """
        most_bytes = self._pool.limit_bytes
        if most_bytes is not None and size_bytes > most_bytes:
            needed, allowed = gib_text(size_bytes), gib_text(most_bytes)
            fit = f"enough for {longest(max(most_bytes, 0)):,} tokens"
            raise _no_host_memory(f"{needed} needed, and this rank may take {allowed}, {fit}")
        if self._transfer.overlaps:
            self._pool.reserve(size_bytes)

    def put(self, key: Key, *tensors: torch.Tensor) -> None:
        """Start copying device tensors to the host; tensors stored under the same key are overwritten.

        Args:
            key: under which `fetch` returns them.
            tensors: contiguous, not written to afterwards, of the same sizes as those that they overwrite.
        """
        if not all(tensor.is_contiguous() for tensor in tensors):
            layouts = ", ".join(f"{list(item.shape)} with strides {list(item.stride())}" for item in tensors)
            raise ValueError(f"host memory for {key}: expected contiguous tensors, found shapes {layouts}.")
        blocks = self._blocks.get(key)
        if blocks is None:
            blocks = self._blocks[key] = []
            for tensor in tensors:
                if (host := self._pool.take(tensor.nbytes)) is None:
                    raise _no_host_memory(f"no {tensor.nbytes:,} bytes more")
                blocks.append(MovingBlock(host, self._transfer, self._counters))
        _release(blocks)
        for block, tensor in zip(blocks, tensors, strict=True):
            block.leave(tensor)
        self._leaving.append(blocks)
        while len(self._leaving) > _MAX_PENDING_OFFLOADS:
            _release(self._leaving.popleft())

    def prefetch(self, key: Key) -> None:
        """Start the copies of a key to the device, unless the key is unknown or they were started already."""
        for block in self._blocks.get(key, ()):
            if block.target is None:
                block.reload()  # behind the copy out, which may still run

    def fetch(self, key: Key) -> list[torch.Tensor]:
        """Return the tensors of a key on the device, after compute waits for their copies."""
        blocks = self._blocks[key]
        self._counters.late_prefetches += sum(block.target is None for block in blocks)
        self.prefetch(key)
        return [block.take() for block in blocks]

    def drop(self, key: Key) -> None:
        """Free the host memory of a key, after its copies; unknown keys are ignored."""
        for block in self._blocks.pop(key, ()):
            block.end()
            self._pool.give_back(block.host)

    def close(self) -> None:
        """Drop everything. Safe to call again."""
        for key in list(self._blocks):
            self.drop(key)
        self._leaving.clear()

    def __del__(self) -> None:
        self.close()  # the graph has died without a backward


def _release(blocks: Blocks) -> None:
    for block in blocks:
        block.release()


def _no_host_memory(found: str) -> PlanError:
    hint = "Shorten the sequence, raise memory.host_memory_gib if it is set, or start fewer ranks here."
    return PlanError([Problem("stream_config", "host memory for the whole sequence", found, hint)])


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
        """Device bytes per token of a chunk, at most, that backward in pieces adds.

        On top of `moving_bytes` and of what attention over a whole sequence needs. For queries: the sum of
        their gradients, the gradients from one piece, and a contiguous upstream gradient. For keys and
        values: the present piece, the next and the last; the gradients from one piece; and in the dtype of
        sums the chunk's own gradients, a piece's new ones, those brought from the host and those being
        copied; less the piece and the gradients that `moving_bytes` counts.
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

    ``bounds`` are those of `chunk_bounds`.
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
    """Return the longest sequence, up to ``length``, that takes at most ``most_bytes`` of host memory.

    ``tokens`` is the length of a chunk.
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
