"""What charts over the time of a step share: the time axis, the legend, the band of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..engine.step_watch import ComputePart
from .drawing import Box, Drawing, Label, Stroke, text_width
from .scales import Scale, ms_text, tick_text

LEGEND_ROW = 20.0
_SWATCH = 11.0
_LEAST_LABEL = 4.0
"""Px that must remain beside a number in a box."""


def add_time_axis(drawing: Drawing, scale: Scale, top: float, bottom: float, label: str) -> None:
    """Draw grid lines from ``top`` to ``bottom``, and the numbers below."""
    room = abs(scale.end_px - scale.start_px)
    for value in scale.ticks(max(4, int(room // 110))):
        x = scale(value)
        drawing.add(Stroke([(x, top), (x, bottom)], "grid"))
        text = tick_text(value)
        inside = min(x, drawing.width - text_width(text, 11) / 2)
        drawing.add(Label(inside, bottom + 15, text, anchor="middle", size=11))
    drawing.add(Label(scale.end_px, bottom + 30, label, anchor="end", size=11))


def legend_rows(entries: Sequence[tuple[str, str]], width: float) -> int:
    """Return how many rows a legend takes."""
    return len(_placed(entries, width))


def add_legend(
    drawing: Drawing, entries: Sequence[tuple[str, str]], x: float, y: float, width: float
) -> None:
    """Draw (meaning, text) side by side, in as many rows as it takes."""
    for row, line in enumerate(_placed(entries, width)):
        at = x
        for means, text in line:
            top = y + row * LEGEND_ROW
            drawing.add(Box(at, top, _SWATCH, _SWATCH, means))
            drawing.add(Label(at + _SWATCH + 5, top + 10, text))
            at += _entry_width(text)


def add_parts(drawing: Drawing, parts: Iterable[ComputePart], scale: Scale, y: float, height: float) -> None:
    """Draw what compute does as boxes: phases by colour, layers by number."""
    for part in parts:
        left, right = scale(part.start_ms), scale(part.end_ms)
        where = "outside the layers" if part.layer is None else f"layer {part.layer}"
        title = f"{part.phase}, {where}: {ms_text(part.end_ms - part.start_ms)}"
        if part.phase == "outside":
            title = f"optimizer and the rest: {ms_text(part.end_ms - part.start_ms)}"
        gap = 0.5 if right - left > 3 else 0.0
        width = max(right - left - gap, 0.3)
        drawing.add(Box(left, y, width, height, part.phase, title, 1.0 if part.layer is not None else 0.55))
        if part.layer is None:
            continue
        number = str(part.layer)
        if text_width(number, 10) + _LEAST_LABEL <= width:
            drawing.add(Label((left + right) / 2, y + height / 2 + 3.5, number, "ink", "middle", 10))


def _entry_width(text: str) -> float:
    return _SWATCH + 5 + text_width(text) + 18


def _placed(entries: Sequence[tuple[str, str]], width: float) -> list[list[tuple[str, str]]]:
    rows: list[list[tuple[str, str]]] = [[]]
    used = 0.0
    for entry in entries:
        wanted = _entry_width(entry[1])
        if rows[-1] and used + wanted - 18 > width:
            rows.append([])
            used = 0.0
        rows[-1].append(entry)
        used += wanted
    return rows
