"""Sizes of batches, and a recorded step scaled to another batch size.

A scaled profile predicts no less memory than the new size needs, as far as a profile can tell:

* a saved storage grows with the batch's tokens if its size is a multiple of them, attention scores with the
  pairs of tokens; others keep their size. The saved storages of a profile contain no weights;
* of an op event's base bytes (`OpEvent`), these parts keep their size: what was there before the step,
  gradients that backward has made so far, what stays from some moment on (casts of weights), and temporary
  memory as large as the op's weights (`ModuleWeights.passing_bytes`). The rest grows;
* times grow with tokens, except the time outside forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from math import prod

from ..plan.actions import Scope, is_layer
from ..plan.opnames import ATTENTION_CORE
from ..plan.saved_bytes import OpCall, SavedBytes, SavedStorage
from .profile import Places, Profile
from .record.adjusted import with_link_beside_weights

ModuleName = tuple[Scope | None, str]
"""The name of a module: its scope, and its path inside the scope."""


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """Device memory that a module's own weights (not its children's) need in a step, beside themselves.

    Args:
        new_gradient_bytes: gradients that its backward allocates, and that stay.
        passing_bytes: memory in use only while it runs, whatever the batch: gathered or dequantised weights,
            gradients that are added to existing ones.
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
        tokens = prod(shape)
        return BatchSize(tokens, tokens * shape[-1] if scores else 0) if shape and tokens else None

    def covers(self, other: BatchSize) -> bool:
        return self.tokens >= other.tokens and self.pairs >= other.pairs

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether a batch of (batch, sequence) is no larger, or its size is not known."""
        size = BatchSize.of(shape, self.pairs > 0)
        return size is None or self.covers(size)

    def joined(self, other: BatchSize | None) -> BatchSize:
        """Return the least size that covers both."""
        if other is None:
            return self
        return BatchSize(max(self.tokens, other.tokens), max(self.pairs, other.pairs))


def beside_others(profile: Profile, others_bytes: int) -> Profile:
    """Return the profile of the same step on a device where something else takes memory all the time.

    Fewer than 0 bytes: where something that the profile counts is gone.
    """
    op_events = tuple(
        replace(
            item,
            forward_base_bytes=item.forward_base_bytes + others_bytes,
            backward_base_bytes=item.backward_base_bytes + (item.backward_place >= 0) * others_bytes,
        )
        for item in profile.op_events
    )
    outside_base_bytes = profile.outside_base_bytes + others_bytes
    return replace(profile, op_events=op_events, outside_base_bytes=outside_base_bytes)


def beside_old_gradients(profile: Profile, old_bytes: int) -> Profile:
    """Return the profile of a step whose forward runs beside gradients that are gone before its backward."""
    op_events = (
        replace(item, forward_base_bytes=item.forward_base_bytes + old_bytes) for item in profile.op_events
    )
    return replace(profile, op_events=tuple(op_events))


@dataclass(frozen=True)
class RecordedStep:
    """A recorded profile, and what scaling it to other batch sizes needs.

    Args:
        profile: the recorded profile.
        weights: memory that the weights of each module need.
        baseline_bytes: device memory in use before the forward; 0: not known.
        streamed_bytes: bytes of each layer's frozen weights on the host; the profile has the waits for their
            copies, and the whole link.
    """

    profile: Profile
    weights: Mapping[ModuleName, ModuleWeights] = field(default_factory=dict)
    baseline_bytes: int = 0
    streamed_bytes: Mapping[Scope, int] = field(default_factory=dict)

    @property
    def size(self) -> BatchSize | None:
        """Size of the recorded batch; ``None``: its shape was not known."""
        return BatchSize.of(self.profile.batch_shape, bool(scores_of(self.profile)))

    def without_states(self, resident_bytes: int) -> RecordedStep:
        """Return the same step with the states on the host; ``resident_bytes`` of them are there in the
        optimizer's.
        """
        states_bytes = self.profile.optimizer_state_bytes
        left = beside_others(self.profile, -states_bytes)
        outside_base_bytes = left.outside_base_bytes + resident_bytes
        moved = replace(left, outside_base_bytes=outside_base_bytes, optimizer_state_bytes=0)
        return replace(self, profile=moved, baseline_bytes=max(self.baseline_bytes - states_bytes, 0))

    def at(self, size: BatchSize | None) -> Profile:
        """Return the profile of a batch of another size, with what frozen weights leave of the link.

        If it has fewer tokens but more pairs, or the reverse, the larger number of each counts. ``None``: the
        size of the recorded batch.

        Raises:
            ValueError: the shape of the recorded batch is not known.
        """
        profile = self.profile if size is None else self._scaled_to(size)
        return with_link_beside_weights(profile, self.streamed_bytes)

    def _scaled_to(self, size: BatchSize) -> Profile:
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
        bases = _BaseBytesScaler(self, max(by_tokens, by_pairs))
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
            batch_shape=_shape_of(size.tokens, profile.batch_shape),
        )


def _shape_of(tokens: int, recorded: tuple[int, ...]) -> tuple[int, ...]:
    # for display, with as many sequences as were recorded where possible
    return (1, tokens) if tokens % recorded[0] else (recorded[0], tokens // recorded[0])


def scores_of(profile: Profile) -> frozenset[int]:
    """Return the numbers of the saved storages that hold attention scores: they grow with pairs of tokens.

    The attention core makes them, their size is a multiple of batch x sequence x sequence, and no storage
    made elsewhere has the same size (such a size would grow with tokens).
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
    scores, tokens = scores_of(profile), prod(profile.batch_shape)
    multiples = {tokens, tokens - profile.batch_shape[0]} - {0}  # shifted labels have one position less
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


class _BaseBytesScaler:
    """Scales the base bytes of op events: device memory in use beside saved storages.

    ``factor`` is the new size over the recorded one. Below 1 as many bytes as possible count as fixed, above
    1 as few as possible.
    """

    def __init__(self, step: RecordedStep, factor: Fraction) -> None:
        self._step, self._factor, self._op_events = step, factor, step.profile.op_events

    def forward(self) -> dict[int, int]:
        bases = [op_event.forward_base_bytes for op_event in self._op_events]
        return self._scaled(range(len(bases)), bases, [0] * len(bases))

    def backward(self) -> dict[int, int]:
        back = Places(self._op_events).order
        bases = [self._op_events[at].backward_base_bytes for at in back]
        seen: set[ModuleName] = set()
        gradients = []
        for at in back:
            module = self._module(self._op_events[at].call)
            new = module is not None and module not in seen
            gradients.append(self._step.weights[module].new_gradient_bytes if new and module else 0)
            seen |= {module} if module else set()
        return self._scaled(back, bases, list(accumulate(gradients)))

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

    def _module(self, call: OpCall) -> ModuleName | None:
        """Return the innermost module with weights that runs ``call``; ``None``: there is none."""
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
    """Return, for each base, by how much the floor has risen since the first layer.

    A layer's floor is the least base in it and in all layers after it: memory below it belongs to no op.
    """
    least: dict[Scope | None, int] = {}
    for scope, base in zip(scopes, bases, strict=True):
        if is_layer(scope):
            least[scope] = min(base, least.get(scope, base))
    floors = list(accumulate(reversed(least.values()), min))[::-1]
    risen = {scope: floor - floors[0] for scope, floor in zip(least, floors, strict=True)}
    found, now = [], 0
    for scope in scopes:
        now = risen.get(scope, now)
        found.append(now)
    return found
