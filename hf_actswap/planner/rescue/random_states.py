"""The random numbers that an op draws, drawn again when it runs again."""

from __future__ import annotations

from collections.abc import Callable

import torch


class RandomStates:
    """Saves the state of the generator that an op on one device draws from.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._default: torch.Generator | None = torch.default_generator if device.type == "cpu" else None

    def capturing(self) -> bool:
        """Whether a graph of the accelerator is being captured: its generator has no state to save then."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def saved(self, generator: torch.Generator | None) -> Callable[[], None] | None:
        """Return what restores the present state.

        Args:
            generator: that the op was given; ``None``: the device's own.
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
