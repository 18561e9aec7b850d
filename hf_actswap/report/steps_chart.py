"""The time of a step over the training, the planner's stages told apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .drawing import Box, Drawing, Label, Stroke, text_width
from .run_files import LoggedStep
from .scales import Scale, tick_text

_CUT = 4.0
"""Longer than this many medians is cut off, so that a first step of a minute leaves something to see."""


def steps_chart(steps: Sequence[LoggedStep], width: float) -> Drawing:
    """Draw it.

    Args:
        steps: lines of the record, at least one.
        width: in px.
    """
    times = [float(line["step_ms"]) for line in steps]
    numbers = [float(line["step"]) for line in steps]
    seconds = median(times) > 10_000
    unit_ms, unit = (1e3, "s") if seconds else (1.0, "ms")
    most_ms = min(max(times), _CUT * median(times))
    left, right, top, bottom = 52.0, width - 8, 24.0, 150.0
    drawing = Drawing(width, bottom + 34, "Time of a step over the training")
    x = _Between(min(numbers), max(numbers), left + 6, right - 6)
    y = Scale(most_ms / unit_ms * 1.1, bottom, top)
    for value in y.ticks(4):
        drawing.add(Stroke([(left, y(value)), (right, y(value))], "grid"))
        drawing.add(Label(left - 6, y(value) + 4, tick_text(value), anchor="end", size=11))
    drawing.add(Label(left - 6, top - 8, unit, anchor="end", size=11))
    shown = max(2, int((right - left) // 70))
    for number in numbers[:: max(1, -(-len(numbers) // shown))]:
        drawing.add(Label(x(number), bottom + 15, tick_text(number), anchor="middle", size=11))
    drawing.add(Label(right, bottom + 30, "step", anchor="end", size=11))
    _add_stages(drawing, steps, x, top, bottom)
    points = [(x(number), y(min(ms, most_ms) / unit_ms)) for number, ms in zip(numbers, times, strict=True)]
    drawing.add(Stroke(points, "keep", 2))
    for (at, height), line, ms in zip(points, steps, times, strict=True):
        cut = " (beyond the picture)" if ms > most_ms else ""
        title = f"step {line['step']}: {ms / unit_ms:,.1f} {unit}{cut}"
        drawing.add(Box(at - 2.5, height - 2.5, 5, 5, "stall" if cut else "keep", title))
    return drawing


class _Between:
    """Steps onto px."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = low, max(high - low, 1.0)
        self._start, self._room = start, end - start

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) / self._span * self._room


def _add_stages(
    drawing: Drawing, steps: Sequence[LoggedStep], x: _Between, top: float, bottom: float
) -> None:
    phase, free = "", 0.0
    for line in steps:
        if line.get("phase", "") == phase:
            continue
        phase = str(line.get("phase", ""))
        at = x(float(line["step"]))
        drawing.add(Stroke([(at, top - 4), (at, bottom)], "muted", dashed=True))
        if phase and at >= free:
            drawing.add(Label(at + 3, top - 8, phase, "ink", size=11))
            free = at + text_width(phase, 11) + 8
