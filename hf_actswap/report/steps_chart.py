"""What a training logs of its steps: their time and their loss, the planner's stages told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from .drawing import Box, Drawing, Label, Stroke, text_width
from .run_files import LoggedStep
from .scales import Scale, tick_text

_CUT = 4.0
"""Longer than this many medians is cut off, so that a first step of a minute leaves something to see."""


def steps_chart(steps: Sequence[LoggedStep], width: float) -> Drawing:
    """Draw the time of a step.

    Args:
        steps: lines of the record, at least one.
        width: in px.
    """
    times = [float(line["step_ms"]) for line in steps]
    seconds = median(times) > 10_000
    unit_ms, unit = (1e3, "s") if seconds else (1.0, "ms")
    most_ms = min(max(times), _CUT * median(times))
    drawing = Drawing(width, 184.0, "Time of a step over the training")
    values = [ms / unit_ms for ms in times]
    _add_curve(drawing, steps, values, (0.0, most_ms / unit_ms), [f"{value:,.1f} {unit}" for value in values])
    drawing.add(Label(46.0, 16.0, unit, anchor="end", size=11))
    return drawing


def with_loss(steps: Sequence[LoggedStep]) -> list[tuple[LoggedStep, float]]:
    """Return the lines that hold a loss, and the loss; what is no number counts as not finite."""
    found = ((line, line.get("loss")) for line in steps if "loss" in line)
    return [(line, float(loss) if isinstance(loss, int | float) else math.nan) for line, loss in found]


def loss_chart(steps: Sequence[LoggedStep], width: float) -> Drawing:
    """Draw the loss.

    Args:
        steps: lines of the record, one at least with a finite loss (`with_loss`).
        width: in px.
    """
    lines, losses = zip(*with_loss(steps), strict=True)
    finite = [loss for loss in losses if math.isfinite(loss)]
    title = f"Loss over the training: from {losses[0]:.4g} to {losses[-1]:.4g}"
    drawing = Drawing(width, 184.0, title)
    _add_curve(drawing, lines, losses, (min(finite), max(finite)), [f"loss {loss:.4g}" for loss in losses])
    return drawing


def _add_curve(
    drawing: Drawing,
    steps: Sequence[LoggedStep],
    values: Sequence[float],
    ends: tuple[float, float],
    texts: Sequence[str],
) -> None:
    """A line with a point for each step; what is above the second of the ends, or no number, is red."""
    least, most = ends
    left, right, top, bottom = 52.0, drawing.width - 8, 24.0, 150.0
    numbers = [float(line["step"]) for line in steps]
    x = Scale(max(numbers), left + 6, right - 6, min(numbers))
    y = Scale(most + (most - least) * 0.1, bottom, top, least)
    for value in y.ticks(4):
        drawing.add(Stroke([(left, y(value)), (right, y(value))], "grid"))
        drawing.add(Label(left - 6, y(value) + 4, tick_text(value), anchor="end", size=11))
    shown = max(2, int((right - left) // 70))
    for number in numbers[:: max(1, -(-len(numbers) // shown))]:
        drawing.add(Label(x(number), bottom + 15, tick_text(number), anchor="middle", size=11))
    drawing.add(Label(right, bottom + 30, "step", anchor="end", size=11))
    _add_stages(drawing, steps, x, top, bottom)
    within = [math.isfinite(value) and value <= most for value in values]
    heights = [y(value if fits else most) for value, fits in zip(values, within, strict=True)]
    points = list(zip(map(x, numbers), heights, strict=True))
    drawing.add(Stroke(points, "keep", 2))
    for (at, height), number, fits, text in zip(points, numbers, within, texts, strict=True):
        title = f"step {number:,.0f}: {text}{'' if fits else ' (beyond the picture)'}"
        drawing.add(Box(at - 2.5, height - 2.5, 5, 5, "keep" if fits else "stall", title))


def _add_stages(drawing: Drawing, steps: Sequence[LoggedStep], x: Scale, top: float, bottom: float) -> None:
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
