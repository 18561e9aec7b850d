"""Puts back what the calls of a model have changed in it, beside the values of tensors.

A forward may write to its model: BigBird replaces its attention for short sequences, a rotary embedding keeps
the longest length that it has seen, a router keeps its last logits. After a dry run all of that must be as it
was: it was done for an example, and the tensors are fake.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

PART_OF_THE_MODEL = "part_of_the_model"
"""Attribute of hooks that stay on in a dry run, because a patched model does not compute without them. Their
state, and that of the objects with this attribute that they share, belongs to the model's."""

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)


def is_part_of_the_model(hook: Any) -> bool:
    """Whether a hook has the attribute `PART_OF_THE_MODEL`, or is a method of an object that has it."""
    return hasattr(hook, PART_OF_THE_MODEL) or hasattr(getattr(hook, "__self__", None), PART_OF_THE_MODEL)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore at the end the attributes of all modules, the containers in them, and the configurations.

    So is the state of hooks that are a part of the model: what they have set in modules must agree with it.
    Containers (dicts, lists, sets) stay the same objects. Of tensors and other objects only the references
    are restored, not what is inside them.
    """
    before = [(place, place.copy()) for place in _places(model)]
    try:
        yield
    finally:
        for place, contents in before:
            put_back(place, contents)


def _places(model: nn.Module) -> Iterator[Any]:
    """Yield each dict of attributes and each container that can be reached from the model, once."""
    seen: set[int] = set()
    waiting: list[Any] = list(model.modules())
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in _MAPPINGS:
            held: Iterable[Any] = value.values()
        elif kind in _SEQUENCES or kind in (tuple, set):
            held = value
        elif kind is MethodType:  # a hook of an object with state
            waiting.append(value.__self__)
            continue
        elif isinstance(value, nn.Module) or _is_configuration(kind) or hasattr(kind, PART_OF_THE_MODEL):
            value = vars(value)
            held = value.values()
        else:
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if kind is not tuple:
            yield value
        waiting += held


def _is_configuration(kind: type) -> bool:
    """Whether objects of a class are configurations of transformers, which this package does not import."""
    return isinstance(getattr(kind, "model_type", None), str)


def put_back(place: Any, before: Any) -> None:
    """Give a dict, list or set the items of ``before``, if they are others now. Items count by identity."""
    if isinstance(place, dict):
        if list(place) != list(before):
            place.clear()
            place.update(before)
        elif any(place[name] is not value for name, value in before.items()):
            place.update(before)
    elif isinstance(place, set):
        if place != before:
            place.clear()
            place.update(before)
    elif len(place) != len(before) or any(now is not value for now, value in zip(place, before, strict=True)):
        place.clear()
        place.extend(before)
