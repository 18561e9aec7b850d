"""Measures compute time in a recorded step: by the device's events, or as a sum over ops on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...engine.transfer import Stamp, Transfer


class Clock(Protocol):
    """Makes time stamps in compute's order of work; their times are read when the step is over."""

    def stamp(self) -> Stamp:
        """Return a stamp of the present place in compute's order of work."""

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note that an aten op ran; a clock that computes times adds the op's."""

    def synchronize(self) -> None:
        """Wait until compute has passed all stamps."""


class DeviceClock:
    """A clock that reads the device's own time.

    Args:
        transfer: makes stamps on the device.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def stamp(self) -> Stamp:
        """Return a stamp of the present place in compute's order of work."""
        return self._transfer.stamp()

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Do nothing: the device measures the op's time itself."""

    def synchronize(self) -> None:
        """Wait until compute has passed all stamps."""
        self._transfer.synchronize()
