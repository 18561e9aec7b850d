"""The state around a call that must be as it was when the call is run again: autocast, random numbers.

And which functions cannot be run again, or only with the random state of their first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch

from ..plan.opnames import RANDOM_FUNCTIONS, UNREPEATABLE_FUNCTIONS
from ..plan.user_functions import UserFunction

_CPU = torch.device("cpu")
_IN_PLACE_OPERATORS = frozenset(
    f"__{name}__"
    for name in [
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "imatmul",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
        "setitem",
    ]
)

_AutocastState = tuple[str, bool, torch.dtype, bool]

RandomState = dict[torch.device, torch.Tensor]
"""State of the default generators, by device."""


class CallState:
    """What a call was made under.

    Args:
        device: where it computes.
        random: whether it may draw random numbers.
        values: of its arguments; generators among them are part of the state.
    """

    def __init__(self, device: torch.device, random: bool, values: Iterable[object]) -> None:
        self._autocast = [_autocast_state(kind) for kind in sorted({"cpu", device.type})]
        self._random = random_state(device) if random else None
        self._generators = [
            (value, value.get_state()) for value in values if isinstance(value, torch.Generator)
        ]

    @property
    def autocast(self) -> tuple[_AutocastState, ...]:
        """Device type, whether on, dtype, whether casts are cached; one for each kind of device."""
        return tuple(self._autocast)

    @contextmanager
    def autocast_restored(self) -> Iterator[None]:
        """Run under the autocast of this state."""
        with ExitStack() as stack:
            for state in self._autocast:
                stack.enter_context(_autocast(state))
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under this state; random numbers go on afterwards as if nothing had been drawn."""
        with ExitStack() as stack:
            stack.enter_context(self.autocast_restored())
            if self._random is not None:
                stack.enter_context(_replayed(self._random))
            for generator, before in self._generators:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(before)
            yield


def draws_random_numbers(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function may draw random numbers; of operators and functions that nobody knows: yes."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags
    if isinstance(func, torch._ops.OpOverloadPacket | UserFunction):
        return True
    return name in RANDOM_FUNCTIONS or bool(kwargs.get("dropout_p"))


def op_draws(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an aten op draws random numbers. Attention without dropout carries the tag, and draws none."""
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


def can_run_again(func: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function gives the same again: not if it writes into what it reads, nor by its nature."""
    own = getattr(func, "__name__", "").partition(".")[0]
    in_place = own in _IN_PLACE_OPERATORS or (own.endswith("_") and not own.endswith("__"))
    writes = in_place or bool(kwargs.get("inplace")) or kwargs.get("out") is not None
    return not writes and name not in UNREPEATABLE_FUNCTIONS


def _autocast_state(device_type: str) -> _AutocastState:
    return (
        device_type,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


def _autocast(state: _AutocastState) -> torch.autocast:
    device_type, enabled, dtype, cache = state
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache)


def random_state(device: torch.device) -> RandomState:
    """Return the state of the generators that work on ``device`` draws from: its own and the CPU's."""
    states = {_CPU: torch.get_rng_state()}
    if device.type != "cpu":
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(states: RandomState) -> None:
    """Let the generators go on from ``states``."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def same_random_state(one: RandomState, other: RandomState) -> bool:
    """Whether nothing was drawn between the two."""
    return all(torch.equal(state, other[device]) for device, state in one.items())


@contextmanager
def _replayed(states: RandomState) -> Iterator[None]:
    """Run with the random state of the forward, and leave the present one as it was."""
    present = {device: random_state(device)[device] for device in states}
    try:
        set_random_state(states)
        yield
    finally:
        set_random_state(present)
