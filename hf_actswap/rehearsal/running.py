"""What a process on the rehearsal's device can ask it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from .launch import SETTINGS, Order


@dataclass(frozen=True, slots=True)
class RehearsedDevice:
    """The device that this process runs on.

    Args:
        library: the symbols of the process, with those of the device's libraries.
        settings: what the device was made with.
    """

    library: ctypes.CDLL
    settings: dict[str, str]

    @classmethod
    def found(cls) -> RehearsedDevice | None:
        """Return the device of this process; ``None``: it is no rehearsal."""
        text = os.environ.get(SETTINGS)
        library = ctypes.CDLL(None)
        if not text or not hasattr(library, "rehearsal_races"):
            return None
        library.rehearsal_races.restype = ctypes.c_size_t
        return cls(library, dict(pair.split("=", 1) for pair in text.split(";")))

    def races(self) -> list[str]:
        """Return each pair of accesses, one of them a write, that nothing orders."""
        text, found = ctypes.create_string_buffer(1024), []
        for number in range(self.library.rehearsal_races()):
            self.library.rehearsal_race(ctypes.c_size_t(number), text, ctypes.c_size_t(1024))
            found.append(text.value.decode())
        return found

    def choose_order(self, order: Order, seed: int = 0) -> None:
        """Carry copies out in another order from now on."""
        self.library.rehearsal_choose_order(order.encode(), ctypes.c_uint64(seed))

    def forget_registered(self) -> None:
        """Forget host memory that was page-locked, and unmapped without being unlocked."""
        self.library.rehearsal_forget_registered()

    def clear_races(self) -> None:
        """Forget the races that were found until now."""
        self.library.rehearsal_clear_races()
