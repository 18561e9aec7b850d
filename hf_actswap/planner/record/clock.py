"""Compute's time in a recorded step: asked of the device, or added up op by op where nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...engine.transfer import Stamp, Transfer


class Clock(Protocol):
    """Marks places in compute's order of work, which are read when the step is over."""

    def stamp(self) -> Stamp:
        """Mark the present place."""

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """An aten op ran."""

    def synchronize(self) -> None:
        """Wait until all places have been passed."""


class DeviceClock:
    """The device's own time.

    Args:
        transfer: of the device.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def stamp(self) -> Stamp:
        """Mark the present place."""
        return self._transfer.stamp()

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """The device knows."""

    def synchronize(self) -> None:
        """Wait until all places have been passed."""
        self._transfer.synchronize()
