"""A picture on matplotlib's axes: boxes and texts that have a meaning, and its SVG for the page.

Everything is drawn in the light colours of `COLOURS`; the SVG has a CSS variable in place of each, so that
the reader's theme decides. Matplotlib is imported when the first picture is drawn, and not by a training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from ..errors import Problem
from .run_files import ReportError

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
    "in": ("#e87ba4", "#d55181"),
    "stall": ("#d03b3b", "#e66767"),
}
"""The meanings of shapes, each with its colour on a light and on a dark surface."""

_DPI = 72  # of a figure: a px of the page is a point, so sizes of fonts and lines are px too
_PNG_DPI = 2 * _DPI
TEXT_PX = 11.0
_CHARACTER = 0.62
"""Width of a character relative to its height, on average, in matplotlib's font; the page's are narrower."""
_LEGEND_ROW = 20.0
_EDGE_ABOVE_PX = 3.0
"""Boxes that are wider than this are set apart by an edge, which would hide thinner ones."""
_LOOK = {"svg.fonttype": "none", "svg.hashsalt": "hf_actswap", "text.parse_math": False}

Entry = tuple[str, str]
"""Meaning and text of an entry of a legend."""


def _matplotlib() -> Any:
    try:
        for name in ("collections", "figure", "lines", "patches"):
            import_module(f"matplotlib.{name}")
        return import_module("matplotlib")
    except ImportError:
        hint = "pip install 'hf_actswap[report]'"
        raise ReportError([Problem("report", "matplotlib", "it is not installed", hint)]) from None


def text_width(text: str, size: float = TEXT_PX) -> float:
    """Return about how wide a text is, in px."""
    return len(text) * size * _CHARACTER


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle in the data's coordinates.

    Args:
        x, y, width, height: place and size.
        means: one of `COLOURS`.
        title: text that is shown when the mouse is on it, and in the list below the picture.
        opacity: 0 to 1.
    """

    x: float
    y: float
    width: float
    height: float
    means: str
    title: str = ""
    opacity: float = 1.0

    @property
    def corners(self) -> list[tuple[float, float]]:
        """The four corners, counter-clockwise."""
        right, top = self.x + self.width, self.y + self.height
        return [(self.x, self.y), (right, self.y), (right, top), (self.x, top)]


class Chart:
    """A picture with a legend above one pair of axes.

    Args:
        width: width of the picture in px.
        height: height of the axes in px.
        title: what the picture shows, for those who cannot see it.
        entries: the legend's areas; ``lines``: its dashed lines.
        left, right, above, below: px around the axes, without the legend.

    Attributes:
        axes: matplotlib's axes; shapes are drawn in the light colours of `COLOURS`.
        titles: the titles of the shapes that have one, in order.
    """

    def __init__(
        self,
        width: float,
        height: float,
        title: str,
        entries: Sequence[Entry] = (),
        lines: Sequence[Entry] = (),
        left: float = 60.0,
        right: float = 20.0,
        above: float = 26.0,
        below: float = 38.0,
    ) -> None:
        self._library, self.title, self.titles = _matplotlib(), title, list[str]()
        texts = [text for _, text in (*entries, *lines)]
        widest = max((text_width(text) + 36 for text in texts), default=1.0)
        columns = max(1, min(len(texts), int(width / widest)))
        top = above + -(-len(texts) // columns) * _LEGEND_ROW
        self.width, self.height = width, top + height + below
        self.px = width - left - right
        size = (width / _DPI, self.height / _DPI)
        with self._library.rc_context(_LOOK):
            self.figure = self._library.figure.Figure(size, _DPI)
            place = (left / width, below / self.height, self.px / width, height / self.height)
            self.axes = self.figure.add_axes(place)
            self._prepare_axes()
            patch, line = self._library.patches.Patch, self._library.lines.Line2D
            handles = [patch(color=light(means), label=text) for means, text in entries]
            handles += [line([], [], color=light(m), ls="--", lw=1.5, label=text) for m, text in lines]
            if handles:
                look = {"fontsize": TEXT_PX, "labelcolor": light("muted"), "frameon": False}
                spaces = {"handlelength": 1.4, "handleheight": 0.9, "borderpad": 0.2, "borderaxespad": 0.0}
                self.figure.legend(handles=handles, loc="upper left", ncols=columns, **look, **spaces)

    def _prepare_axes(self) -> None:
        axes = self.axes
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=TEXT_PX, labelcolor=light("muted"), pad=5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: tick_text(value))

    def ranges(self, x: tuple[float, float], y: tuple[float, float], grid: str) -> None:
        """Set the least and most value of both axes, and which of them have grid lines (``x``, ``y``)."""
        (left, right), (bottom, top) = x, y
        self.axes.set_xlim(left, right if right > left else left + 1)
        self.axes.set_ylim(bottom, top if top != bottom else bottom + 1)
        self.axes.grid(axis=grid, color=light("grid"), linewidth=1)
        if grid in ("x", "both"):
            self.axes.locator_params(axis="x", nbins=max(3, int(self.px // 90)))
        if grid in ("y", "both"):
            self.axes.locator_params(axis="y", nbins=5)

    def add(self, boxes: Iterable[Box], above: bool = False) -> None:
        """Draw boxes; those ``above`` have the height of the axes as the unit of y."""
        found, (left, right) = list(boxes), self.axes.get_xlim()
        wide = [box.width / (right - left) * self.px > _EDGE_ABOVE_PX for box in found]
        collection = self._library.collections.PolyCollection(
            [box.corners for box in found],
            facecolors=[(light(box.means), box.opacity) for box in found],
            edgecolors=light("surface"),
            linewidths=[0.4 if one else 0.0 for one in wide],
            clip_on=False,
            **({"transform": self.axes.get_xaxis_transform()} if above else {}),
        )
        self.entitle(collection, [box.title for box in found])
        self.axes.add_collection(collection, autolim=False)

    def add_area(
        self, tops: Sequence[float], edges: Sequence[float], bottoms: Sequence[float], means: str, title: str
    ) -> None:
        """Draw the area between two step curves, which change at the ``edges``."""
        look = {"fill": True, "color": light(means), "linewidth": 0}
        area = self._library.patches.StepPatch(tops, edges, baseline=bottoms, **look)
        self.entitle(area, [title])
        self.axes.add_artist(area)

    def entitle(self, artist: Any, titles: Sequence[str]) -> None:
        """Give the shapes of an artist their titles, in order; ``""``: none."""
        artist.set_gid(f"titled-{len(self.titles)}")
        self.titles += titles

    def write(self, text: str, x: float, y: float, means: str = "muted", **look: Any) -> None:
        """Write a text at a place in the data's coordinates; ``offset`` moves it by px."""
        look = {
            "offset": (0, 0),
            "fontsize": TEXT_PX,
            "ha": "center",
            "va": "center",
            "xycoords": "data",
        } | look
        offset, coordinates = look.pop("offset", (0, 0)), look.pop("xycoords", "data")
        with self._library.rc_context(_LOOK):
            self.axes.annotate(
                text,
                (x, y),
                offset,
                coordinates,
                "offset points",
                color=light(means),
                annotation_clip=False,
                **look,
            )

    def label_x(self, text: str, **look: Any) -> None:
        """Write what the x axis shows, at its right end."""
        self.axes.set_xlabel(text, loc="right", fontsize=TEXT_PX, color=light("muted"), **look)

    def svg(self, css_class: str = "") -> str:
        """Return an SVG element without ids, references and fonts of its own; its colours are variables."""
        out = StringIO()
        with self._library.rc_context(_LOOK):
            self.figure.savefig(out, format="svg", facecolor="none", metadata={"Date": None})
        text = out.getvalue()
        body = text[text.index('<g id="figure_1">') : text.rindex("</svg>")]
        body = _TITLED.sub(self._with_titles, body)
        body = _LEFT_OUT.sub("", body)
        for name, (light, _) in COLOURS.items():
            body = body.replace(light, f"var(--c-{name})")
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
        return f'<svg class="{css_class}" {size} role="img" aria-label="{escape(self.title)}">\n{body}</svg>'

    def _with_titles(self, group: re.Match[str]) -> str:
        titles = iter(self.titles[int(group[1]) :])

        def entitled(path: re.Match[str]) -> str:
            title = next(titles)
            return f"{path[1]}><title>{escape(title)}</title></path>" if title else path[0]

        return f"<g>{_PATH.sub(entitled, group[2])}</g>"

    def write_png(self, path: Path) -> None:
        """Write a PNG file of twice the size, on a light surface."""
        with self._library.rc_context(_LOOK):
            self.figure.savefig(path, dpi=_PNG_DPI, facecolor=light("surface"))


_TITLED = re.compile(r'<g id="titled-(\d+)">(.*?)</g>', re.DOTALL)
_PATH = re.compile(r"(<path [^>]*)/>")
_LEFT_OUT = re.compile(
    r' id="[^"]*"| clip-path="[^"]*"| transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?|<defs>.*?</defs>',
    re.DOTALL,
)


def light(means: str) -> str:
    """Return the colour of a meaning on a light surface, in which everything is drawn."""
    return COLOURS[means][0]


def tick_text(value: float) -> str:
    """Return a round value as text, for an axis."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
