"""States of generators of random numbers: Python's and NumPy's default ones, and those of a program's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

GeneratorState = tuple[Callable[[Any], object], Any]
"""How to set the state of a generator, and the state that it had."""

_CONTAINERS = (list, tuple, set, Mapping)
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def is_generator(value: Any) -> bool:
    """Whether ``value`` generates random numbers from a state that can be read and set."""
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def held_generators(value: Any) -> Iterator[Any]:
    """Yield ``value``, or what a list, tuple, set or dict holds, as far as it generates random numbers."""
    held = value.values() if isinstance(value, Mapping) else value
    for one in held if isinstance(value, _CONTAINERS) else (value,):
        if is_generator(one):
            yield one


def state_of(generator: Any) -> GeneratorState:
    """Return the present state of one that `held_generators` yields."""
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if isinstance(generator, np.random.Generator):
        source = generator.bit_generator
        return partial(setattr, source, "state"), source.state
    return generator.set_state, generator.get_state()


def default_states() -> list[GeneratorState]:
    """Return the present states of the generators that the functions of Python and NumPy draw from."""
    return [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
