"""Pictures made of a few shapes: written as SVG for the page, drawn by matplotlib for files (`write_report`).

A shape has a meaning (``means``) in place of a colour; `COLOURS` gives each meaning a light and a dark one.

After the shapes come parts that several charts share (time axis, legend, band of layers), and functions that
write numbers: in round steps, with one unit for a whole axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from ..engine.step_watch import ComputePart

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]

COLOURS = {
    "surface": ("#fcfcfb", "#1a1a19"),
    "ink": ("#0b0b0b", "#ffffff"),
    "muted": ("#52514e", "#c3c2b7"),
    "grid": ("#e4e3df", "#383835"),
    "base": ("#bab8b0", "#64625c"),
    "keep": ("#2a78d6", "#3987e5"),
    "swap": ("#1baf7a", "#199e70"),
    "recompute": ("#eda100", "#c98500"),
    "forward": ("#6da7ec", "#2a78d6"),
    "backward": ("#9085e9", "#6a5bd0"),
    "outside": ("#cfcdc5", "#4c4b46"),
    "out": ("#1baf7a", "#199e70"),
    "in": ("#e87ba4", "#d55181"),
    "stall": ("#d03b3b", "#e66767"),
}
"""The meanings of shapes, each with its colour on a light and on a dark surface."""

TEXT_PX = 12.0
_CHARACTER = 0.56
"""Width of a character relative to its height, on average."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; ``title`` is shown when the mouse is on it."""

    x: float
    y: float
    width: float
    height: float
    means: str
    title: str = ""
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon."""

    points: Sequence[Point]
    means: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line through points."""

    points: Sequence[Point]
    means: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text; ``y`` is its baseline."""

    x: float
    y: float
    text: str
    means: str = "muted"
    anchor: Anchor = "start"
    size: float = TEXT_PX
    bold: bool = False


Shape = Box | Area | Stroke | Label


@dataclass
class Drawing:
    """Shapes, later ones above earlier ones.

    Args:
        width, height: size in px; y grows downwards.
        title: what the picture shows, for those who cannot see it.
        shapes: the shapes of the picture.
    """

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Add shapes on top of the others."""
        self.shapes += shapes

    @property
    def titles(self) -> list[str]:
        """The titles of the shapes that have one, in order."""
        return [shape.title for shape in self.shapes if isinstance(shape, Box | Area) and shape.title]

    def svg(self, css_class: str = "") -> str:
        """Return an SVG element whose colours are the CSS classes ``c-<meaning>`` (`colour_rules`)."""
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}"'
        head = f'<svg class="{css_class}" {size} role="img" aria-label="{escape(self.title)}">'
        return "\n".join([head, *map(_svg, self.shapes), "</svg>"])


def text_width(text: str, size: float = TEXT_PX) -> float:
    """Return about how wide a text is, in px."""
    return len(text) * size * _CHARACTER


def colour_rules() -> str:
    """Return the CSS that gives meanings their colours, by the reader's preference or ``data-theme``."""
    light, dark = (
        "".join(f"--c-{name}:{shades[which]};" for name, shades in COLOURS.items()) for which in (0, 1)
    )
    rules = [
        f":root{{color-scheme:light;{light}}}",
        f"@media (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}",
        f":root[data-theme=light]{{color-scheme:light;{light}}}",
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}",
    ]
    for name in COLOURS:
        rules.append(f".c-{name}{{fill:var(--c-{name})}}.s-{name}{{stroke:var(--c-{name});fill:none}}")
    return "\n".join(rules)


def _svg(shape: Shape) -> str:
    match shape:
        case Box():
            faint = "" if shape.opacity == 1 else f' opacity="{_n(shape.opacity)}"'
            place = f'x="{_n(shape.x)}" y="{_n(shape.y)}"'
            size = f'width="{_n(shape.width)}" height="{_n(shape.height)}"'
            return _titled(f'rect class="c-{shape.means}" {place} {size}{faint}', "rect", shape.title)
        case Area():
            return _titled(
                f'polygon class="c-{shape.means}" points="{_points(shape.points)}"', "polygon", shape.title
            )
        case Stroke():
            dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
            look = f'class="s-{shape.means}" stroke-width="{_n(shape.width)}"{dashes}'
            return f'<polyline {look} points="{_points(shape.points)}"/>'
        case Label():
            weight = ' font-weight="600"' if shape.bold else ""
            look = f'class="c-{shape.means}" text-anchor="{shape.anchor}" font-size="{_n(shape.size)}"'
            place = f'x="{_n(shape.x)}" y="{_n(shape.y)}"'
            return f"<text {look} {place}{weight}>{escape(shape.text)}</text>"


def _titled(opening: str, tag: str, title: str) -> str:
    return f"<{opening}><title>{escape(title)}</title></{tag}>" if title else f"<{opening}/>"


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


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
    """Draw the entries (meaning, text) of a legend side by side, in as many rows as needed."""
    for row, line in enumerate(_placed(entries, width)):
        at = x
        for means, text in line:
            top = y + row * LEGEND_ROW
            drawing.add(Box(at, top, _SWATCH, _SWATCH, means))
            drawing.add(Label(at + _SWATCH + 5, top + 10, text))
            at += _entry_width(text)


def add_parts(drawing: Drawing, parts: Iterable[ComputePart], scale: Scale, y: float, height: float) -> None:
    """Draw the parts of compute as boxes, with a colour for the phase and the number of the layer."""
    for part in parts:
        if part.phase == "waiting":
            continue
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


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Scale:
    """Maps values to positions in px.

    Args:
        most: the largest value.
        start_px, end_px: positions of ``least`` and ``most``.
        least: the smallest value.
    """

    most: float
    start_px: float
    end_px: float
    least: float = 0.0

    def __call__(self, value: float) -> float:
        """Return the position of a value, in px."""
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
    """Return bytes as text, in the largest unit in which the number is at least 1."""
    unit, unit_bytes = byte_unit(abs(size_bytes))
    value = size_bytes / unit_bytes
    return f"{value:.0f} B" if unit == "B" else f"{_rounded(value)} {unit}"


def ms_text(milliseconds: float) -> str:
    """Return a time as text: in ms, from 10 seconds on in s."""
    if abs(milliseconds) >= 10_000:
        return f"{milliseconds / 1e3:,.1f} s"
    return f"{_rounded(milliseconds)} ms" if milliseconds else "0 ms"


def tick_text(value: float) -> str:
    """Return a round value as text, for an axis."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _rounded(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
