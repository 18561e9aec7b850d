"""How large a batch is, the few sizes that are distinguished, and a recorded step scaled to another size.

Pure functions. A **bucket** is named by its upper edge: sizes are rounded up on a geometric grid below the
largest one that is planned for, at most `MOST_BUCKETS` of them, so that what is found for the edge fits every
batch of the bucket. A batch of the recorded shape is in the top bucket.

A scaled profile predicts no less than is true at the new size, to within what a profile cannot tell apart:

* saved storages grow with the batch's tokens where their size is a multiple of them, attention scores with
  its pairs of tokens; others stay as large as they are. Weights are no saved storages of a profile;
* of the base bytes, what was there before the step is fixed, and so are the gradients that backward has made
  so far, what lies on the device from some moment on (casts of weights), and what an op needs that is as
  large as its weights (`ModuleWeights.passing_bytes`). The rest grows;
* times grow with tokens. What is outside forward and backward stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate

from ..plan.actions import Scope
from ..plan.mindformers_names import ATTENTION_CORE
from ..plan.saved_bytes import OpCall, SavedBytes, SavedStorage
from .profile import Profile

MOST_BUCKETS = 6
_RATIO = 0.5**0.5
"""From one edge to the next: a batch is served by a plan for at most 1.42 times its tokens."""

Module = tuple[Scope | None, str]
"""Scope, and path of a module in it."""


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """What the weights of one module, those of its children apart, need on the device for a while.

    Args:
        new_gradient_bytes: gradients that its backward allocates, and that stay.
        passing_bytes: what is there only while it runs, and does not depend on the batch: weights that were
            gathered or dequantised, gradients that are added to others.
    """

    new_gradient_bytes: int = 0
    passing_bytes: int = 0


@dataclass(frozen=True, slots=True, order=True)
class BatchSize:
    """How large a batch is, as far as memory depends on it.

    Args:
        tokens: batch x sequence.
        pairs: tokens x sequence where autograd saves attention scores; else 0.
    """

    tokens: int
    pairs: int = 0

    @staticmethod
    def of(shape: tuple[int, ...], scores: bool) -> BatchSize | None:
        """Return the size of a batch of (batch, sequence); ``None``: the shape is not known."""
        tokens = tokens_of(shape)
        return BatchSize(tokens, tokens * shape[-1] if scores else 0) if shape and tokens else None

    def covers(self, other: BatchSize) -> bool:
        """Whether what fits this size fits ``other``."""
        return self.tokens >= other.tokens and self.pairs >= other.pairs

    def joined(self, other: BatchSize | None) -> BatchSize:
        """Return the least size that covers both."""
        if other is None:
            return self
        return BatchSize(max(self.tokens, other.tokens), max(self.pairs, other.pairs))


def tokens_of(shape: tuple[int, ...]) -> int:
    """Return how many tokens a batch of this shape has."""
    tokens = 1
    for length in shape:
        tokens *= length
    return tokens


def bucket_of(size: BatchSize, top: BatchSize) -> BatchSize:
    """Return the upper edge of the bucket of a size that ``top`` covers.

    The grid of pairs is that of tokens squared: batches that differ in sequence alone fall on its diagonal.
    """
    return BatchSize(_edge(size.tokens, top.tokens, _RATIO), _edge(size.pairs, top.pairs, _RATIO**2))


def _edge(value: int, top: int, ratio: float) -> int:
    edges = (int(top * ratio**number) for number in reversed(range(MOST_BUCKETS)))
    return next((edge for edge in edges if edge >= value), top)


@dataclass(frozen=True)
class RecordedStep:
    """A profile, and what is known of the model that trained.

    Args:
        profile: recorded.
        weights: of its modules.
        baseline_bytes: on the device before the forward; 0: not known.
    """

    profile: Profile
    weights: Mapping[Module, ModuleWeights] = field(default_factory=dict)
    baseline_bytes: int = 0

    @property
    def size(self) -> BatchSize | None:
        """Of the batch; ``None``: its shape was not known."""
        return BatchSize.of(self.profile.batch_shape, bool(scores_of(self.profile)))

    def at(self, size: BatchSize) -> Profile:
        """Return the profile of a batch of another size.

        Where that has fewer tokens and more pairs, or the other way round, the larger of both counts.

        Raises:
            ValueError: the shape of the recorded batch is not known.
        """
        own = self.size
        if own is None:
            raise ValueError("the shape of the recorded batch is not known")
        if not (own.covers(size) or size.covers(own)):
            size = own.joined(size)
        if size == own:
            return self.profile
        profile = self.profile
        by_tokens = Fraction(size.tokens, own.tokens)
        by_pairs = Fraction(size.pairs, own.pairs) if own.pairs else by_tokens
        bases = _Bases(self, max(by_tokens, by_pairs))
        forward, backward = bases.forward(), bases.backward()
        op_events = [
            replace(
                op_event,
                forward_ms=op_event.forward_ms * float(by_tokens),
                backward_ms=op_event.backward_ms * float(by_tokens),
                forward_base_bytes=forward[number],
                backward_base_bytes=backward.get(number, op_event.backward_base_bytes),
            )
            for number, op_event in enumerate(profile.op_events)
        ]
        return replace(
            profile,
            saved=_scaled_saved(profile, by_tokens, by_pairs),
            op_events=tuple(op_events),
            signature=f"{profile.signature}@{size.tokens},{size.pairs}",
            batch_shape=_shape_of(size.tokens, profile.batch_shape),
        )


def _shape_of(tokens: int, recorded: tuple[int, ...]) -> tuple[int, ...]:
    """For people: as many sequences as were recorded, where that is possible."""
    return (1, tokens) if tokens % recorded[0] else (recorded[0], tokens // recorded[0])


def scores_of(profile: Profile) -> frozenset[int]:
    """Return the numbers of the saved storages that hold attention scores: they grow with pairs of tokens.

    What the attention core makes, a multiple of batch x sequence x sequence, and as large as nothing that is
    made elsewhere: that would grow with tokens.
    """
    if len(profile.batch_shape) != 2:
        return frozenset()
    batch, sequence = profile.batch_shape
    pairs = batch * sequence * sequence
    storages = profile.saved.storages
    elsewhere = {item.size_bytes for item in storages if not _in_attention_core(item.uses[0].producer)}
    return frozenset(
        number
        for number, item in enumerate(storages)
        if _in_attention_core(item.uses[0].producer)
        and item.size_bytes % pairs == 0
        and item.size_bytes not in elsewhere
    )


def _in_attention_core(call: OpCall) -> bool:
    return call[1].rpartition(".")[2] == ATTENTION_CORE


def _scaled_saved(profile: Profile, by_tokens: Fraction, by_pairs: Fraction) -> SavedBytes:
    scores, tokens = scores_of(profile), tokens_of(profile.batch_shape)
    multiples = {tokens, tokens - profile.batch_shape[0]} - {0}  # labels are shifted: one position less
    storages = []
    for number, storage in enumerate(profile.saved.storages):
        if number in scores:
            storage = _scaled_storage(storage, by_pairs)
        elif any(storage.size_bytes % multiple == 0 for multiple in multiples):
            storage = _scaled_storage(storage, by_tokens)
        storages.append(storage)
    return replace(profile.saved, storages=tuple(storages))


def _scaled_storage(storage: SavedStorage, factor: Fraction) -> SavedStorage:
    uses = tuple(
        replace(
            use,
            start_bytes=use.start_bytes * factor.numerator // factor.denominator,
            stop_bytes=_up(use.stop_bytes, factor),
            size_bytes=_up(use.size_bytes, factor),
        )
        for use in storage.uses
    )
    return SavedStorage(_up(storage.size_bytes, factor), uses)


def _up(value: int, factor: Fraction) -> int:
    return -(-value * factor.numerator // factor.denominator)


class _Bases:
    """Scales what is on the device in an op event beside saved storages.

    Args:
        step: recorded.
        factor: new size over recorded one. Where the size shrinks, fixed is the most that can be; where it
            grows, the least.
    """

    def __init__(self, step: RecordedStep, factor: Fraction) -> None:
        self._step, self._factor = step, factor
        op_events = step.profile.op_events
        back = sorted(
            (item.backward_place, at) for at, item in enumerate(op_events) if item.backward_place >= 0
        )
        self._ahead = range(len(op_events))
        self._back = [at for _, at in back]
        self._op_events = op_events

    def forward(self) -> dict[int, int]:
        """By number of the op event."""
        bases = [op_event.forward_base_bytes for op_event in self._op_events]
        return self._scaled(self._ahead, bases, [0] * len(bases))

    def backward(self) -> dict[int, int]:
        """By number of the op event, of those that backward visits."""
        bases = [self._op_events[at].backward_base_bytes for at in self._back]
        seen: set[Module] = set()
        gradients = []
        for at in self._back:
            module = self._module(self._op_events[at].call)
            new = module is not None and module not in seen
            gradients.append(self._step.weights[module].new_gradient_bytes if new and module else 0)
            seen |= {module} if module else set()
        return self._scaled(self._back, bases, list(accumulate(gradients)))

    def _scaled(
        self, numbers: Sequence[int], bases: Sequence[int], gradients: Sequence[int]
    ) -> dict[int, int]:
        found = {}
        rises = _rises([self._op_events[at].call[0] for at in numbers], bases)
        for at, base, risen, gradient in zip(numbers, bases, rises, gradients, strict=True):
            fixed = self._step.baseline_bytes
            if self._factor < 1:
                fixed = (fixed or min(bases)) + max(risen, gradient) + self._passing(self._op_events[at].call)
            fixed = min(fixed, base)
            found[at] = fixed + _up(base - fixed, self._factor)
        return found

    def _module(self, call: OpCall) -> Module | None:
        """The nearest one that has weights which a call is, or is in."""
        scope, path, _ = call
        while (scope, path) not in self._step.weights:
            if not path:
                return None
            path = path.rpartition(".")[0]
        return scope, path

    def _passing(self, call: OpCall) -> int:
        module = self._module(call)
        return self._step.weights[module].passing_bytes if module else 0


def _rises(scopes: Sequence[Scope | None], bases: Sequence[int]) -> list[int]:
    """By how much the floor has risen from layer to layer: what is never less from then on is no op's own."""
    least: dict[Scope | None, int] = {}
    for scope, base in zip(scopes, bases, strict=True):
        if isinstance(scope, int):
            least[scope] = min(base, least.get(scope, base))
    floors = list(accumulate(reversed(least.values()), min))[::-1]
    risen = {scope: floor - floors[0] for scope, floor in zip(least, floors, strict=True)}
    found, now = [], 0
    for scope in scopes:
        now = risen.get(scope, now)
        found.append(now)
    return found
