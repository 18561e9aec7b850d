"""Numbers on axes and in words: round steps, one unit for a whole axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Scale:
    """Values onto px.

    Args:
        most: the largest value.
        start_px, end_px: where ``least`` and ``most`` lie.
        least: the smallest value.
    """

    most: float
    start_px: float
    end_px: float
    least: float = 0.0

    def __call__(self, value: float) -> float:
        """Return where a value lies."""
        span = self.most - self.least
        share = (value - self.least) / span if span else 0.0
        return self.start_px + share * (self.end_px - self.start_px)

    def ticks(self, count: int) -> list[float]:
        """Return about ``count`` round values from ``least`` to ``most``."""
        step = round_step((self.most - self.least) / max(count, 1))
        first = math.ceil(self.least / step - 1e-9)
        return [step * number for number in range(first, int(self.most / step + 1e-9) + 1)]


def round_step(least: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is not below ``least``."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def byte_unit(most_bytes: float) -> tuple[str, float]:
    """Return the unit for values up to ``most_bytes``, and its bytes."""
    number = 0
    while number + 1 < len(_UNITS) and most_bytes >= 1024 ** (number + 1):
        number += 1
    return _UNITS[number], 1024.0**number


def size_text(size_bytes: float) -> str:
    """Return bytes in the largest unit of which there is at least one."""
    unit, unit_bytes = byte_unit(abs(size_bytes))
    value = size_bytes / unit_bytes
    return f"{value:.0f} B" if unit == "B" else f"{_rounded(value)} {unit}"


def ms_text(milliseconds: float) -> str:
    """Return a time."""
    if abs(milliseconds) >= 10_000:
        return f"{milliseconds / 1e3:,.1f} s"
    return f"{_rounded(milliseconds)} ms" if milliseconds else "0 ms"


def tick_text(value: float) -> str:
    """Return a round value for an axis."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _rounded(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
