"""The aten ops of a step: which of them do anything, and what they tell of the span in which they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ...engine.autograd_state import running_node_number
from ..meter import runs_its_own_dispatch
from .clock import Clock

_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})
_WITHOUT_ALIAS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"})
"""Views whose schema does not say so."""


@lru_cache(maxsize=4096)
def computes(func: Callable[..., Any]) -> bool:
    """Whether an op does more than to look at its arguments in another way."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    if schema.name in _WITHOUT_ALIAS or func.__module__.endswith("prim"):
        return False
    returned = [item.alias_info for item in schema.returns]
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return True
    return not returned or any(alias is None for alias in returned)


def is_collective(func: Callable[..., Any]) -> bool:
    """Whether an op communicates with other ranks."""
    return getattr(func, "namespace", "") in _COLLECTIVES


def draws(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers. Attention without dropout carries the tag, and draws none."""
    position = _random_and_dropout_at(func)
    if position is None:
        return False
    name, at = position
    if not name:
        return True
    dropout = kwargs.get(name, args[at] if at < len(args) else 0.0)
    return bool(dropout)


@lru_cache(maxsize=4096)
def _random_and_dropout_at(func: Callable[..., Any]) -> tuple[str, int] | None:
    """Name and position of the dropout argument; ``("", 0)`` where there is none; ``None``: never random."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return None
    arguments = func._schema.arguments  # type: ignore[attr-defined]
    return next(
        ((item.name, at) for at, item in enumerate(arguments) if item.name == "dropout_p"),
        ("", 0),
    )


class SpanKeeper(Protocol):
    """Who wants to know what runs."""

    def reached(self, node: int) -> None:
        """Backward runs this node."""

    def ran(self, communicates: bool, random: bool) -> None:
        """An op that does something has run."""


class OpWatch(TorchDispatchMode):
    """Tells of each aten op, in forward and in backward.

    Args:
        spans: is told.
        clock: is told too.
    """

    def __init__(self, spans: SpanKeeper, clock: Clock) -> None:
        super().__init__()
        self._spans, self._clock = spans, clock

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled: else what first runs under the mode would never be compiled."""
        return True

    def is_innermost(self) -> bool:
        """Whether it can be left now."""
        stack = _get_current_dispatch_mode_stack()
        return bool(stack) and stack[-1] is self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if runs_its_own_dispatch(types):
            return NotImplemented  # and the ops that the subclass makes of it are seen
        if not computes(func):
            return func(*args, **kwargs)
        node = running_node_number()
        if node is not None:
            self._spans.reached(node)
        result = func(*args, **kwargs)
        self._spans.ran(is_collective(func), draws(func, args, kwargs))
        self._clock.ran(func, args, kwargs, result)
        return result
