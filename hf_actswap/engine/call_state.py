"""Saves the state of the process in which a call is made, and restores it to make the call again.

* **Autocast**, with its cache, and **random numbers** of PyTorch's default generators.
* **Settings** by which PyTorch chooses kernels (`sdpa_kernel`, deterministic algorithms), function modes
  (``with torch.device(...)``) and context variables, which a ``with`` around the forward alone has set.

What modules hold is `module_state`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ..plan.program_state import PACKAGE

_CPU = torch.device("cpu")

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]

RandomState = dict[torch.device, torch.Tensor]
"""State of the default generators, by device."""


def _matmul_precision() -> str | None:
    """Return the precision for all devices; ``None`` if the settings of single ones say otherwise."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _precision(backend: str, ops: str) -> _Setting:
    """Return how to read and to set in which precision a backend computes in fp32."""
    return (
        partial(torch._C._get_fp32_precision_getter, backend, ops),
        partial(torch._C._set_fp32_precision_setter, backend, ops),
    )


_MATRIX = torch.backends.cuda
_SETTINGS: tuple[_Setting, ...] = (
    (_MATRIX.flash_sdp_enabled, _MATRIX.enable_flash_sdp),
    (_MATRIX.mem_efficient_sdp_enabled, _MATRIX.enable_mem_efficient_sdp),
    (_MATRIX.math_sdp_enabled, _MATRIX.enable_math_sdp),
    (_MATRIX.cudnn_sdp_enabled, _MATRIX.enable_cudnn_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_matmul_precision, _set_matmul_precision),
    *(_precision(backend, "all") for backend in ("generic", "cuda", "mkldnn")),
    *(_precision(backend, ops) for backend in ("cuda", "mkldnn") for ops in ("matmul", "conv", "rnn")),
)
"""Settings of the process by which PyTorch chooses kernels or types: how to read and to set each.

The precision of all devices comes before those of single ones, which it sets too.
"""


def _put_settings(values: Sequence[Any]) -> None:
    for (read, put), value in zip(_SETTINGS, values, strict=True):
        if read() != value:
            put(value)


def _modes_of_the_program() -> list[TorchFunctionMode]:
    """Return the function modes that are on, as ``with torch.device(...)`` is, but those of this package."""
    stack: list[TorchFunctionMode] = _get_current_function_mode_stack()
    return [mode for mode in stack if type(mode).__module__.partition(".")[0] != PACKAGE]


class CallState:
    """The autocast, the settings of the process, the context and the random state in which a call is made.

    Args:
        random: whether it may draw random numbers.
        values: its arguments as a flat list; the states of generators among them are saved too.
    """

    def __init__(self, device: torch.device, random: bool, values: Iterable[object]) -> None:
        cached = torch.is_autocast_cache_enabled()
        self._autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in sorted({"cpu", device.type})
        )
        # Tuples: a list each for every recomputed call would have Python's garbage collector run more often.
        self._settings = tuple([read() for read, _ in _SETTINGS])
        self._modes = tuple(_modes_of_the_program())
        self._context = copy_context()
        self._device = device
        self._random = random_state(device) if random else None
        self._generators = tuple(
            [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
        )

    @contextmanager
    def autocast_restored(self) -> Iterator[None]:
        """Run under the autocast of this state."""
        with ExitStack() as stack:
            for kind, enabled, dtype, cached in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            yield

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``call`` with the context variables of this state."""
        return self._context.copy().run(call, *args, **kwargs)

    @contextmanager
    def settings_restored(self) -> Iterator[None]:
        """Run under the settings of the process, and the function modes, of this state."""
        with ExitStack() as stack:
            now = tuple([read() for read, _ in _SETTINGS])
            if now != self._settings:
                stack.callback(_put_settings, now)
                _put_settings(self._settings)
            present = _modes_of_the_program() if self._modes else []
            for mode in self._modes:
                if not any(mode is one for one in present):
                    _push_mode(mode)  # its own `__enter__` would begin it anew
                    stack.callback(_pop_mode)
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under this state; random numbers go on afterwards as if nothing had been drawn."""
        with ExitStack() as stack:
            stack.enter_context(self.settings_restored())
            stack.enter_context(self.autocast_restored())
            if self._random is not None:
                stack.callback(set_random_state, random_state(self._device))
                set_random_state(self._random)
            for generator, before in self._generators:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(before)
            yield


def random_state(device: torch.device) -> RandomState:
    """Return the state of the generators that work on ``device`` draws from: its own and the CPU's."""
    states = {_CPU: torch.get_rng_state()}
    if device.type != "cpu":
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(states: RandomState) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def same_random_state(one: RandomState, other: RandomState) -> bool:
    """Whether no random number was drawn between the two states."""
    return all(torch.equal(state, other[device]) for device, state in one.items())
