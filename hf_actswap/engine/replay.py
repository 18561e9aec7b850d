"""Saves and restores the state in which a call is made, to run it again: autocast and random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

_CPU = torch.device("cpu")
_AutocastState = tuple[str, bool, torch.dtype, bool]

RandomState = dict[torch.device, torch.Tensor]
"""State of the default generators, by device."""


class CallState:
    """The autocast and random state in which a call is made.

    Args:
        device: where the call computes.
        random: whether it may draw random numbers.
        values: its arguments as a flat list; the states of generators among them are saved too.
    """

    def __init__(self, device: torch.device, random: bool, values: Iterable[object]) -> None:
        self._autocast = [_autocast_state(kind) for kind in sorted({"cpu", device.type})]
        self._random = random_state(device) if random else None
        self._generators = [
            (value, value.get_state()) for value in values if isinstance(value, torch.Generator)
        ]

    @property
    def autocast(self) -> tuple[_AutocastState, ...]:
        """(Device type, whether on, dtype, whether casts are cached) for each kind of device."""
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
    """Set the default generators to ``states``."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def same_random_state(one: RandomState, other: RandomState) -> bool:
    """Whether no random number was drawn between the two states."""
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
