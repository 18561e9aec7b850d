"""Pictures as a few shapes: written as SVG for the page, painted by matplotlib for files (`write_report`).

A shape says what it means, not how it looks: colours belong to `COLOURS`, in a light and a dark version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

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
"""What a shape means, and its colour on a light and on a dark surface."""

TEXT_PX = 12.0
_CHARACTER = 0.56
"""Width of a character relative to its height, on average."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; ``title`` is shown when pointed at."""

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
        width, height: in px; y grows downwards.
        title: what the picture shows, for those who cannot see it.
        shapes: that it consists of.
    """

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Put shapes above what is there."""
        self.shapes += shapes

    @property
    def titles(self) -> list[str]:
        """What shapes say when they are pointed at, in order."""
        return [shape.title for shape in self.shapes if isinstance(shape, Box | Area) and shape.title]

    def svg(self, css_class: str = "") -> str:
        """Return it as an SVG element whose colours are classes ``c-<meaning>`` (`colour_rules`)."""
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
