"""Layers that are alike: a run on fake tensors calls a few of them, and its record is repeated for the rest.

Most decoders repeat one layer, or a few in turn (sliding and full attention). Such a *repeat* is a period of
layers that follows itself several times. `without_layers` takes most of its periods out of the model while it
runs. The first stay, at least `_LEAD` layers, as what comes before them frees memory while they run; so does
the last; and before it a *sample* and its *example*. The example's record must be the sample's, one period
later: else `NotAlikeError`, and the model has to run whole. It is what the others get.

Layers count as alike by their classes, their weights' shapes and types, the plain values among the
attributes and hooks of their modules, and what lists in the configuration say of them: an entry for each
layer, or the numbers of some. These must say the same of the place that a layer has among the few. A model
whose code treats a layer by its number alone, which neither says, is not understood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .actions import OpCall, Scope, Tile
from .program_state import put_back
from .record import SavedStorage, Use

_LEAD = 2
_LONGEST = 12
"""The most layers in a period that is looked for."""

_OWN_NUMBER = frozenset({"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "idx"})
"""Attributes in which a layer's modules keep its number."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_DEPTH = 3
"""How far into objects plain values are looked for."""


class NotAlikeError(Exception):
    """Layers that look alike left different records."""


@dataclass(frozen=True)
class Repeat:
    """``count`` periods of ``period`` layers each, from layer ``first`` on.

    ``stack`` is the path of their stack; empty: the decoder's.
    """

    first: int
    period: int
    count: int
    stack: str = ""

    def scope(self, layer: int) -> Scope:
        return f"{self.stack}.{layer}" if self.stack else layer

    @property
    def sample(self) -> int:
        """First layer of the period with which the example must agree."""
        return self.first + -(-_LEAD // self.period) * self.period

    @property
    def example(self) -> int:
        """First layer of the period whose record others get."""
        return self.sample + self.period

    @property
    def last(self) -> int:
        """First layer of the last period."""
        return self.first + (self.count - 1) * self.period

    @property
    def left_out(self) -> range:
        """The layers that need not run: all between the example and the last period."""
        return range(self.example + self.period, self.last)

    @property
    def copies(self) -> int:
        """How many periods are left out."""
        return max(len(self.left_out) // self.period, 0)

    def moved(self, call: OpCall, periods: int) -> OpCall:
        """Return a call in the sample or the example, some periods later; other calls as they are."""
        scope, path, ordinal = call
        layer = self._layer(scope)
        if layer is None or not self.sample <= layer < self.example + self.period:
            return call
        return self.scope(layer + periods * self.period), path, ordinal

    def _layer(self, scope: Scope | None) -> int | None:
        if not isinstance(scope, str):
            return None if self.stack else scope
        stack, dot, number = scope.rpartition(".")
        return int(number) if dot and stack == self.stack else None

    def example_of(self, layer: int) -> int:
        """Return the layer whose record a layer that was left out gets."""
        return self.example + (layer - self.first) % self.period


def repeat_of(layers: Sequence[nn.Module], configuration: Any) -> Repeat | None:
    """Return the repeat that leaves most of a stack's layers out; ``None``: none does, or none may."""
    configured = _configured(configuration, len(layers))
    kinds = _kinds(layers, configured)
    found: Repeat | None = None
    for first in range(len(kinds)):
        for period in range(1, _LONGEST + 1):
            one = Repeat(first, period, _count(kinds, first, period))
            if len(one.left_out) > (0 if found is None else len(found.left_out)):
                found = one
    if found is None:
        return None
    kept = [layer for layer in range(len(layers)) if layer not in found.left_out]
    moved = any(configured[place] != configured[layer] for place, layer in enumerate(kept))
    return None if moved else found


def _configured(configuration: Any, layers: int) -> list[list[object]]:
    """Return for each layer what lists in a configuration say of it."""
    text = configuration.get_text_config() if hasattr(configuration, "get_text_config") else configuration
    named = vars(text).items() if hasattr(text, "__dict__") else ()
    lists = [(name, value) for name, value in named if isinstance(value, list | tuple)]
    entries = [value for _, value in lists if len(value) == layers]
    numbers = [value for name, value in lists if len(value) != layers and "layer" in name]
    return [[*(value[at] for value in entries), *(at in value for value in numbers)] for at in range(layers)]


def _count(kinds: Sequence[int], first: int, period: int) -> int:
    same = 0
    while first + same + period < len(kinds) and kinds[first + same] == kinds[first + same + period]:
        same += 1
    return same // period + 1


def _kinds(layers: Sequence[nn.Module], configured: Sequence[list[object]]) -> list[int]:
    """Return a number for each layer: layers that are alike have the same."""
    parts = [{*layer.modules(), *layer.parameters()} for layer in layers]
    users = Counter(id(part) for own in parts for part in own)
    numbers: dict[object, int] = {}
    kinds = []
    for at, layer in enumerate(layers):
        shared = any(users[id(part)] > 1 for part in parts[at])
        facts: object = at if shared else (str(configured[at]), *_facts(layer, at))
        kinds.append(numbers.setdefault(facts, len(numbers)))
    return kinds


def _facts(layer: nn.Module, number: int) -> Iterator[object]:
    described = _Description(number)
    for path, module in layer.named_modules():
        yield path, type(module)
        own = vars(module)
        for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
            yield name, *_form(tensor)
        for name in _HOOKS:
            yield described.of([*own[name].values()])
        yield described.of({name: value for name, value in own.items() if name[0] != "_"})


def _form(tensor: torch.Tensor | None) -> Iterator[object]:
    yield type(tensor)
    if tensor is not None and not is_lazy(tensor):
        yield from (tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad)
        yield tensor.stride() if tensor.layout == torch.strided else None


@dataclass(frozen=True)
class _Description:
    """Describes attributes and hooks by the plain values in them, and other objects by their type.

    ``number``: the layer's own; names of its modules count as those of other layers.
    """

    number: int

    def of(self, value: Any, depth: int = _DEPTH) -> object:
        kind = type(value)
        if kind is str:
            return value.replace(f".{self.number}.", ".")
        if isinstance(value, _PLAIN):
            return value
        if kind is Tile:
            return replace(value, scope=0)
        if kind is FunctionType:
            return value.__module__, value.__qualname__
        if depth == 0:
            return kind
        if kind is partial:
            return self.of([value.func, *value.args, value.keywords], depth - 1)
        if kind is MethodType:
            return self.of(value.__func__), self.of(getattr(value.__self__, "__dict__", {}), depth - 1)
        if isinstance(value, dict):
            return kind, tuple(
                (str(name), self.of(item, depth - 1))
                for name, item in value.items()
                if name not in _OWN_NUMBER
            )
        if isinstance(value, list | tuple):
            return kind, tuple(self.of(item, depth - 1) for item in value)
        return kind


@contextmanager
def without_layers(layers: nn.Module, left_out: Iterable[int]) -> Iterator[None]:
    """Leave layers out of a list of layers (``nn.ModuleList``); at the end they are back, in their order."""
    places = layers._modules
    before = dict(places)
    with ExitStack() as stack:
        stack.callback(put_back, places, before)
        for layer in left_out:
            del places[str(layer)]
        yield


def repeated_uses(storages: Sequence[SavedStorage], repeat: Repeat) -> tuple[SavedStorage, ...]:
    """Return what all layers save, from a record of those that `Repeat.left_out` leaves.

    A use belongs to a period by its order. A storage that a period makes may be used in it and in the next;
    one that is made before the sample may be used in all.

    Raises:
        NotAlikeError: the example's record is not that of the sample.
    """
    periods = map(repeat.scope, (repeat.sample, repeat.example, repeat.last))
    starts = (_first_order(storages, layer) for layer in periods)
    splice = _Splice(repeat, *starts)
    groups: list[list[SavedStorage]] = [[], [], [], []]
    reached = 0
    for storage in storages:
        number = splice.period(storage.uses[0])
        if number < reached:
            raise NotAlikeError("storages of periods in another order")
        reached = number
        groups[number].append(storage)
    before, sample, example, after = groups
    return (
        *map(splice.used_throughout, before),
        *map(splice.made_in_sample, sample),
        *splice.made_in_each(sample, example),
        *map(splice.made_after, after),
    )


def _first_order(storages: Sequence[SavedStorage], layer: Scope) -> int:
    orders = (use.order for storage in storages for use in storage.uses if use.at[0] == layer)
    found = min(orders, default=None)
    if found is None:
        raise NotAlikeError(f"layer {layer} uses nothing")
    return found


@dataclass(frozen=True)
class _Splice:
    """Puts copies of a repeat's example between this and the last period; they begin at these orders."""

    repeat: Repeat
    sample: int
    example: int
    last: int

    def __post_init__(self) -> None:
        if self.last - self.example != self.length:
            raise NotAlikeError("periods with other numbers of uses")

    @property
    def length(self) -> int:
        return self.example - self.sample

    def period(self, use: Use) -> int:
        """Return 0 before the sample, 1 in it, 2 in the example, 3 after it."""
        return sum(use.order >= start for start in (self.sample, self.example, self.last))

    def moved(self, use: Use, periods: int) -> Use:
        at, producer = (self.repeat.moved(call, periods) for call in (use.at, use.producer))
        return replace(use, at=at, producer=producer, order=use.order + periods * self.length)

    def _later(self, use: Use) -> Use:
        return replace(use, order=use.order + self.repeat.copies * self.length)

    def _split(self, storage: SavedStorage) -> list[list[Use]]:
        found: list[list[Use]] = [[], [], [], []]
        for use in storage.uses:
            found[self.period(use)].append(use)
        return found

    def _must_agree(self, sample: Sequence[Use], example: Sequence[Use]) -> None:
        if [self.moved(use, 1) for use in sample] != list(example):
            raise NotAlikeError("periods with other uses")

    def used_throughout(self, storage: SavedStorage) -> SavedStorage:
        before, sample, example, after = self._split(storage)
        if example:
            self._must_agree(sample, example)
        copies = [self.moved(use, number) for number in range(1, self.repeat.copies + 1) for use in example]
        return replace(storage, uses=(*before, *sample, *example, *copies, *map(self._later, after)))

    def made_in_sample(self, storage: SavedStorage) -> SavedStorage:
        if self.period(storage.uses[-1]) > 2:
            raise NotAlikeError("a tensor of a layer is used long after it")
        return storage

    def made_after(self, storage: SavedStorage) -> SavedStorage:
        return replace(storage, uses=tuple(map(self._later, storage.uses)))

    def made_in_each(
        self, sample: Sequence[SavedStorage], example: Sequence[SavedStorage]
    ) -> Iterator[SavedStorage]:
        """Yield the storages of the example and of its copies, given those of the sample."""
        if [storage.size_bytes for storage in sample] != [storage.size_bytes for storage in example]:
            raise NotAlikeError("periods that make other storages")
        pairs = list(zip(map(self._split, sample), map(self._split, example), strict=True))
        for before, now in pairs:
            self._must_agree(before[1], now[2])
            if any(use.order >= self.last + self.length for use in now[3]):
                raise NotAlikeError("a tensor of a layer is used long after it")
        copies = self.repeat.copies
        for number in range(copies + 1):
            for storage, (before, now) in zip(example, pairs, strict=True):
                uses = [self.moved(use, number) for use in now[2]]
                if number < copies:
                    uses += [self.moved(use, number + 1) for use in before[2]]
                else:  # in the last period, which is where it was
                    uses += [replace(self.moved(use, copies), at=use.at) for use in now[3]]
                yield replace(storage, uses=tuple(uses))
