"""Saves random generator states, so that an op that runs again draws the same random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch


class RandomStates:
    """Saves the state of the generator that an op on one device draws from.

    Args:
        device: the device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._default: torch.Generator | None = torch.default_generator if device.type == "cpu" else None

    def capturing(self) -> bool:
        """Return whether a CUDA graph is being captured: its generator has no state to save meanwhile."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def saved(self, generator: torch.Generator | None) -> Callable[[], None] | None:
        """Return a function that restores the present state; ``None`` while a graph is captured.

        Args:
            generator: the generator that the op was given; ``None``: the device's default one.
        """
        if self.capturing():
            return None
        chosen = generator or self._of_device()
        state = chosen.get_state()

        def restore() -> None:
            chosen.set_state(state)

        return restore

    def _of_device(self) -> torch.Generator:
        if self._default is None:
            module = torch.get_device_module(self._device)
            index = self._device.index
            self._default = module.default_generators[module.current_device() if index is None else index]
        return self._default
