"""The pictures of a run's report, each in any width.

* Memory over a step, by fate: stacked, measured or predicted.
* The timeline of one step, measured: compute, copies out, copies in, and where compute waited.
* Bytes by layer and op: the colour of a cell is its fate, and it is stronger for more bytes.
* Time and loss of the steps that a training logged, with the planner's phases marked.

Everything is drawn by matplotlib in the light colours of `COLOURS`; the SVG has a CSS variable in place of
each, so that the reader's theme decides. A training does not import matplotlib: the first picture does.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib import import_module
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from ..engine.step_watch import ComputePart, StepMemory, StepTimeline
from ..errors import Problem
from ..plan import MemoryPlan
from ..plan.actions import SCOPES, Scope, is_layer, layer_order
from ..planner.cost.simulate import fates_of
from ..planner.profile import Prediction, Profile
from .run_facts import byte_unit, bytes_text, ms_text
from .run_files import LoggedStep, ReportError, Saving

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
_TEXT_PX = 11.0
_CHARACTER = 0.62
"""Width of a character relative to its height, on average, in matplotlib's font; the page's are narrower."""
_LEGEND_ROW = 20.0
_EDGE_ABOVE_PX = 3.0
"""Boxes that are wider than this are set apart by an edge, which would hide thinner ones."""
_LOOK = {"svg.fonttype": "none", "svg.hashsalt": "hf_actswap", "text.parse_math": False}

Entry = tuple[str, str]
"""Meaning and text of an entry of a legend."""


def library(name: str, *parts: str) -> Any:
    """Import a library of the extra ``report``, and modules of it.

    Raises:
        ReportError: it is not installed.
    """
    try:
        for part in parts:
            import_module(f"{name}.{part}")
        return import_module(name)
    except ImportError:
        hint = "pip install 'hf_actswap[report]'"
        raise ReportError([Problem("report", name, "it is not installed", hint)]) from None


def _text_width(text: str, size: float = _TEXT_PX) -> float:
    return len(text) * size * _CHARACTER


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle in the data's coordinates.

    Args:
        means: one of `COLOURS`.
        title: text that is shown when the mouse is on it, and in the list below the picture.
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
        right, top = self.x + self.width, self.y + self.height
        return [(self.x, self.y), (right, self.y), (right, top), (self.x, top)]


class Chart:
    """A picture with a legend above one pair of axes.

    Args:
        width: of the picture, in px.
        height: of the axes, in px.
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
        self._library = library("matplotlib", "collections", "figure", "lines", "patches")
        self.title, self.titles = title, list[str]()
        texts = [text for _, text in (*entries, *lines)]
        widest = max((_text_width(text) + 36 for text in texts), default=1.0)
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
                look = {"fontsize": _TEXT_PX, "labelcolor": light("muted"), "frameon": False}
                spaces = {"handlelength": 1.4, "handleheight": 0.9, "borderpad": 0.2, "borderaxespad": 0.0}
                self.figure.legend(handles=handles, loc="upper left", ncols=columns, **look, **spaces)

    def _prepare_axes(self) -> None:
        axes = self.axes
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=_TEXT_PX, labelcolor=light("muted"), pad=5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda at, _: f"{at:,.0f}" if at == int(at) else f"{at:g}")

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
        look = {"fill": True, "color": light(means)}
        self.entitle(self.axes.stairs(tops, edges, baseline=bottoms, **look), [title])

    def entitle(self, artist: Any, titles: Sequence[str]) -> None:
        """Give the shapes of an artist their titles, in order; ``""``: none."""
        artist.set_gid(f"titled-{len(self.titles)}")
        self.titles += titles

    def write(self, text: str, x: float, y: float, means: str = "muted", **look: Any) -> None:
        """Write a text at a place in the data's coordinates; ``xytext`` moves it by px."""
        usual = {"xytext": (0, 0), "fontsize": _TEXT_PX, "ha": "center", "va": "center"}
        look = {**usual, "color": light(means), "annotation_clip": False, **look}
        with self._library.rc_context(_LOOK):
            self.axes.annotate(text, (x, y), textcoords="offset points", **look)

    def label_x(self, text: str, **look: Any) -> None:
        """Write what the x axis shows, at its right end."""
        self.axes.set_xlabel(text, loc="right", fontsize=_TEXT_PX, color=light("muted"), **look)

    def svg(self, css_class: str = "") -> str:
        """Return an SVG element without ids, references and fonts of its own; its colours are variables."""
        out = StringIO()
        with self._library.rc_context(_LOOK), _any_glyph():
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
        with self._library.rc_context(_LOOK), _any_glyph():
            self.figure.savefig(path, dpi=_PNG_DPI, facecolor=light("surface"))


@contextmanager
def _any_glyph() -> Iterator[None]:
    """Let names have characters that matplotlib's font lacks: the reader's browser has others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


_TITLED = re.compile(r'<g id="titled-(\d+)">(.*?)</g>', re.DOTALL)
_PATH = re.compile(r"(<path [^>]*)/>")
_LEFT_OUT = re.compile(
    r' id="[^"]*"| clip-path="[^"]*"| transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?|<defs>.*?</defs>',
    re.DOTALL,
)


def light(means: str) -> str:
    """Return the colour of a meaning on a light surface."""
    return COLOURS[means][0]


_NARROW_BELOW_PX = 600
"""Pictures below this width have their texts above the boxes that they name."""


def _part_boxes(parts: Iterable[ComputePart], y: float, height: float) -> Iterator[Box]:
    for part in parts:
        if part.phase == "waiting":
            continue
        where = "outside the layers" if part.layer is None else f"layer {part.layer}"
        what = "optimizer and the rest" if part.phase == "outside" else f"{part.phase}, {where}"
        length_ms = part.end_ms - part.start_ms
        opacity = 1.0 if part.layer is not None else 0.55
        title = f"{what}: {ms_text(length_ms)}"
        yield Box(part.start_ms, y, length_ms, height, part.phase, title, opacity)


def _add_parts(chart: Chart, parts: Sequence[ComputePart], y: float, height: float, above: bool) -> None:
    chart.add(_part_boxes(parts, y, height), above)
    left, right = chart.axes.get_xlim()
    coordinates = chart.axes.get_xaxis_transform() if above else "data"
    for part in parts:
        if part.layer is None or part.phase == "waiting":
            continue
        wide = (part.end_ms - part.start_ms) / (right - left) * chart.px
        if _text_width(str(part.layer), 10) + 4 <= wide:
            middle = (part.start_ms + part.end_ms) / 2
            chart.write(str(part.layer), middle, y + height / 2, "ink", fontsize=10, xycoords=coordinates)


_MEASURED_LAYERS = (
    ("base", "weights, optimizer, what was there before"),
    ("keep", "kept for backward"),
    ("swap", "swapped, while on the device"),
    ("recompute", "the rest: run again, temporary, gradients"),
)
_PREDICTED_LAYERS = (
    ("base", "weights, optimizer, gradients, temporary"),
    ("keep", "kept for backward"),
    ("swap", "swapped, while on the device"),
    ("recompute", "run again"),
)
_MOST_POINTS = 600


@dataclass(frozen=True)
class MemoryCurve:
    """The data of a chart of memory over a step: areas on top of each other.

    Args:
        entries: meaning and text of each area, from the bottom up.
        points: (ms, bytes of each area), in order of time.
        parts: what compute does.
        peak_bytes: the allocator's peak, which may be above the points.
        saving: gives the peak without a plan.
    """

    title: str
    entries: Sequence[Entry]
    points: Sequence[tuple[float, tuple[int, int, int, int]]]
    parts: Sequence[ComputePart]
    end_ms: float
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    saving: Saving | None = None

    @property
    def peak(self) -> tuple[float, int]:
        """Time (ms) and bytes of the highest point."""
        ms, sizes = max(self.points, key=lambda point: sum(point[1]))
        return ms, sum(sizes)

    @property
    def limits(self) -> list[tuple[int, str, str]]:
        """Lines across the picture: bytes, meaning (`COLOURS`), text. The highest comes first."""
        most, budget, seen, saving = self.peak[1], self.budget_bytes, self.peak_bytes, self.saving
        found = []
        if budget and budget < 2 * most:
            found.append((budget, "stall", f"budget {bytes_text(budget)}"))
        if seen and seen > 1.02 * most:
            found.append((seen, "muted", f"allocator's peak {bytes_text(seen)}"))
        if saving is not None and saving.saved_bytes and saving.without_peak_bytes:
            without = f"{saving.at_most}{bytes_text(saving.without_peak_bytes)}"
            found.append((saving.without_peak_bytes, "ink", f"without a plan {without}"))
        return sorted(found, reverse=True)


def measured_curve(
    memory: StepMemory,
    budget_bytes: int | None = None,
    peak_bytes: int | None = None,
    saving: Saving | None = None,
) -> MemoryCurve:
    """Return the curve of a measured step; bytes not kept, swapped or in use before it are the rest."""
    points = []
    for sample in memory.samples:
        base = min(memory.start_bytes, max(sample.total_bytes - sample.kept_bytes - sample.swapped_bytes, 0))
        rest = max(sample.total_bytes - base - sample.kept_bytes - sample.swapped_bytes, 0)
        points.append((sample.ms, (base, sample.kept_bytes, sample.swapped_bytes, rest)))
    title, known = "Memory over a step, measured", (budget_bytes, peak_bytes, saving)
    return MemoryCurve(title, _MEASURED_LAYERS, points, memory.parts, memory.step_ms, *known)


def predicted_curve(
    prediction: Prediction, budget_bytes: int | None = None, saving: Saving | None = None
) -> MemoryCurve:
    """Return the curve of a predicted step."""
    points = [
        (point.ms, (point.base_bytes, point.kept_bytes, point.swapped_bytes, point.rebuilt_bytes))
        for point in prediction.memory
    ]
    turn_ms, end_ms = prediction.forward_end_ms, max(ms for ms, _ in points)
    parts = (ComputePart("forward", None, 0.0, turn_ms), ComputePart("backward", None, turn_ms, end_ms))
    title, known = "Memory over a step, predicted", (budget_bytes, None, saving)
    return MemoryCurve(title, _PREDICTED_LAYERS, points, parts, prediction.step_ms, *known)


def memory_chart(curve: MemoryCurve, width: float) -> Chart:
    """Draw memory over a step, of at least one point, in so many px."""
    (peak_ms, peak_bytes), limits = curve.peak, curve.limits
    unit_bytes, unit = byte_unit(peak_bytes)
    peak_text = f"peak {bytes_text(peak_bytes)}"
    title = f"{curve.title}: {', '.join([peak_text, *(text for _, _, text in limits)])}"
    lines = [(means, text) for _, means, text in limits]
    height = 190.0 if width < _NARROW_BELOW_PX else 260.0
    chart = Chart(width, height, title, curve.entries, lines, below=60)
    axes, points = chart.axes, _thinned(curve.points)
    end_ms = max(curve.end_ms, points[-1][0])
    most = max([peak_bytes, *(size for size, _, _ in limits)]) / unit_bytes * 1.08
    chart.ranges((0, end_ms), (0, most), "both")
    edges = [*(ms for ms, _ in points), end_ms]
    below = [0.0] * len(points)
    for number, (means, text) in enumerate(curve.entries):
        sizes = [sizes[number] for _, sizes in points]
        heights = [base + size / unit_bytes for base, size in zip(below, sizes, strict=True)]
        chart.add_area(heights, edges, below, means, f"{text}: {bytes_text(max(sizes))} at most")
        below = heights
    for size, means, _ in limits:
        axes.axhline(size / unit_bytes, color=light(means), linewidth=1.5, linestyle="--")
    chart.write(unit, 0, most, ha="right", va="bottom", xytext=(-5, 8))
    axes.plot([peak_ms, peak_ms], [peak_bytes / unit_bytes, most], color=light("ink"), linewidth=1)
    side = "right" if peak_ms > end_ms / 2 else "left"
    chart.write(peak_text, peak_ms, most, "ink", ha=side, va="bottom", xytext=(0, 3), fontweight="bold")
    _add_parts(chart, curve.parts, -20 / height, 15 / height, above=True)
    axes.tick_params(axis="x", pad=25)
    chart.label_x("ms since the step began")
    return chart


def _thinned(
    points: Sequence[tuple[float, tuple[int, int, int, int]]],
) -> list[tuple[float, tuple[int, int, int, int]]]:
    """Return the highest point of each of `_MOST_POINTS` intervals."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-len(points) // _MOST_POINTS)
    runs = (points[at : at + size] for at in range(0, len(points), size))
    return [(part[0][0], max(part, key=lambda point: sum(point[1]))[1]) for part in runs]


_TIMELINE_LEGEND = (
    ("forward", "forward, by layer"),
    ("backward", "backward, by layer"),
    ("outside", "optimizer and the rest"),
    ("swap", "copy to the host"),
    ("in", "copy back"),
    ("stall", "compute waits for a copy"),
)
_LANES = ("compute", "waits", "copies out", "copies in")


def timeline_chart(timeline: StepTimeline, width: float) -> Chart:
    """Draw compute, waits and copies of a step over time."""
    title = "Timeline of a step: compute, copies, waits"
    chart = Chart(width, 32.0 * len(_LANES), title, _TIMELINE_LEGEND, left=78, above=8)
    chart.ranges((0, timeline.step_ms), (len(_LANES), 0), "x")
    chart.axes.set_yticks([lane + 0.5 for lane in range(len(_LANES))], _LANES)
    _add_parts(chart, timeline.compute, 0.12, 0.76, above=False)
    least_ms = 0.8 * timeline.step_ms / chart.px  # wide enough to be seen
    boxes = []
    for stall in timeline.stalls:
        name = _name(stall.scope, stall.op_path)
        title = f"waits {ms_text(stall.length_ms)} for {name} ({stall.direction})"
        boxes.append(Box(stall.start_ms, 1.12, max(stall.length_ms, least_ms), 0.76, "stall", title))
    for copy in timeline.copies:
        length_ms = copy.end_ms - copy.start_ms
        rate = f", {copy.size_bytes / length_ms / 1e6:.1f} GB/s" if length_ms > 0 else ""
        name = _name(copy.scope, copy.op_path)
        title = f"{name}: {bytes_text(copy.size_bytes)}, {ms_text(length_ms)}{rate}"
        lane, means = (2.12, "swap") if copy.direction == "out" else (3.12, "in")
        boxes.append(Box(copy.start_ms, lane, max(length_ms, least_ms), 0.76, means, title))
    chart.add(boxes)
    chart.label_x("ms since the step began")
    return chart


def _name(scope: object, op_path: str) -> str:
    place = f"layer {scope}" if isinstance(scope, int) else str(scope or "")
    return ", ".join(part for part in (place, op_path) if part) or "unnamed"


Cells = Mapping[tuple[str, Scope], Mapping[str, int]]
"""Bytes by fate, for each (op path, scope)."""

_FATES_LEGEND = (("keep", "kept"), ("swap", "swapped"), ("recompute", "run again in backward"))
_MOST_ROWS = 24
_REST = "all others"


def planned_cells(profile: Profile, plan: MemoryPlan) -> Cells:
    """Return the bytes that autograd saves without a plan, by the fate that they have under ``plan``."""
    found: defaultdict[tuple[str, Scope], Counter[str]] = defaultdict(Counter)
    for storage, fate in zip(profile.saved.storages, fates_of(profile, plan), strict=True):
        first = next((use for use in storage.uses if use.kind == "saved"), None)
        if first is None or fate == "unsaved":
            continue
        scope, path, _ = first.producer
        if scope is not None:
            found[path or "everything", scope][fate] += storage.size_bytes
    return found


def swapped_cells(timeline: StepTimeline) -> Cells:
    """Return the bytes swapped in a measured step, by op path and scope of the plan's rows."""
    found: defaultdict[tuple[str, Scope], Counter[str]] = defaultdict(Counter)
    for copy in timeline.copies:
        if copy.direction == "out" and copy.scope is not None:
            found[copy.op_path or "everything", copy.scope]["swap"] += copy.size_bytes
    return found


def bytes_chart(cells: Cells, width: float) -> Chart:
    """Draw bytes by op and layer: a row for each op, the largest first, and a column for each layer."""
    rows, columns, narrow = _rows(cells), _columns(cells), width < _NARROW_BELOW_PX
    fates = {fate for sizes in cells.values() for fate in sizes}
    legend = _FATES_LEGEND[1:2] if fates == {"swap"} else _FATES_LEGEND
    left, right = (8.0, 8.0) if narrow else (max(_text_width(name) for name, _ in rows) + 12, 84.0)
    pitch = 36.0 if narrow else 20.0
    sides: dict[str, Any] = {"left": left, "right": right, "above": 24, "below": 8}
    chart = Chart(width, pitch * len(rows), "Bytes by layer and op", legend, **sides)
    chart.ranges((0, len(columns)), (len(rows), 0), "both")
    chart.axes.grid(False)
    chart.axes.set_yticks([])
    chart.axes.tick_params(axis="x", top=True, labeltop=True, labelbottom=False)
    chart.axes.set_xticks(*_column_names(columns, chart.px / len(columns)))
    most = max(sum(sizes.values()) for _, by_scope in rows for sizes in by_scope.values())
    height, boxes = 18 / pitch, list[Box]()
    for number, (name, by_scope) in enumerate(rows):
        total = bytes_text(sum(sum(sizes.values()) for sizes in by_scope.values()))
        y = number + 0.2 if narrow else number + 0.5
        chart.write(name, 0, y, "ink", ha="left" if narrow else "right", xytext=(0 if narrow else -8, 0))
        far: dict[str, Any] = {"ha": "right"} if narrow else {"ha": "left", "xytext": (8, 0)}
        chart.write(total, len(columns), y, **far)
        for column, scope in enumerate(columns):
            place = (column, number + 1 - height, height)
            boxes += _cell(by_scope.get(scope, {}), *place, most, f"{scope} {name}")
    chart.add(boxes)
    return chart


def _cell(sizes: Mapping[str, int], x: float, y: float, height: float, most: int, name: str) -> Iterator[Box]:
    """Yield the boxes of a cell; several fates in it share its width."""
    width = 0.96
    yield Box(x, y, width, height, "grid", opacity=0.45)
    total = sum(sizes.values())
    for fate, size_bytes in sizes.items():
        share = width * size_bytes / total if total else 0.0
        means = fate if fate in ("keep", "swap", "recompute") else "stall"
        title = f"layer {name}: {bytes_text(size_bytes)} {fate}"
        yield Box(x, y, share, height, means, title, 0.25 + 0.75 * total / most if most else 1.0)
        x += share


def _column_names(columns: Sequence[Scope], cell_px: float) -> tuple[list[float], list[str]]:
    """Return places and names of the columns, as many as fit."""
    every = max(1, math.ceil((_text_width(str(len(columns))) + 6) / cell_px))
    found: list[tuple[float, str]] = []
    for number, scope in enumerate(columns):
        if isinstance(scope, int):
            if number % every == 0:
                found.append((number + 0.5, str(scope)))
        else:
            found.append((number + 0.5, scope if _text_width(scope) < cell_px else scope[0].upper()))
    return [at for at, _ in found], [name for _, name in found]


def _columns(cells: Cells) -> list[Scope]:
    met = {scope for _, scope in cells}
    layers = sorted(filter(is_layer, met), key=layer_order)
    before: list[Scope] = [name for name in SCOPES if name in met and name == "embedding"]
    return [*before, *layers, *(name for name in SCOPES if name in met and name != "embedding")]


def _rows(cells: Cells) -> list[tuple[str, dict[Scope, Mapping[str, int]]]]:
    """Return the rows of ops, the largest first; if there are too many, the last row joins the others."""
    totals: Counter[str] = Counter()
    for (op, _), sizes in cells.items():
        totals[op] += sum(sizes.values())
    names = [op for op, _ in totals.most_common()]
    shown = names if len(names) <= _MOST_ROWS else names[: _MOST_ROWS - 1]
    merged: dict[str, dict[Scope, Counter[str]]] = {name: {} for name in shown}
    for (op, scope), sizes in cells.items():
        name = op if op in merged else _REST
        merged.setdefault(name, {}).setdefault(scope, Counter()).update(sizes)
    return [(name, dict(by_scope)) for name, by_scope in merged.items()]


_CUT = 4.0
"""Times above this many medians are cut off, so that a first step of a minute does not flatten the rest."""


def steps_chart(steps: Sequence[LoggedStep], width: float) -> Chart:
    """Draw the time of a step over the training."""
    times = [float(line["step_ms"]) for line in steps]
    unit_ms, unit = (1e3, "s") if median(times) > 10_000 else (1.0, "ms")
    values = [ms / unit_ms for ms in times]
    most = min(max(values), _CUT * median(values))
    texts = [f"{value:,.1f} {unit}" for value in values]
    return _curve("Time of a step over the training", steps, values, (0.0, most), texts, unit, width)


def with_loss(steps: Sequence[LoggedStep]) -> list[tuple[LoggedStep, float]]:
    """Return the lines with a loss, and the loss; a loss that is not a number becomes NaN."""
    found = ((line, line.get("loss")) for line in steps if "loss" in line)
    return [(line, float(loss) if isinstance(loss, int | float) else math.nan) for line, loss in found]


def loss_chart(steps: Sequence[LoggedStep], width: float) -> Chart:
    """Draw the loss over the training; at least one line of the record has a finite one (`with_loss`)."""
    lines, losses = zip(*with_loss(steps), strict=True)
    finite = [loss for loss in losses if math.isfinite(loss)]
    title = f"Loss over the training: from {losses[0]:.4g} to {losses[-1]:.4g}"
    texts = [f"loss {loss:.4g}" for loss in losses]
    return _curve(title, lines, losses, (min(finite), max(finite)), texts, "", width)


def _curve(
    title: str,
    steps: Sequence[LoggedStep],
    values: Sequence[float],
    ends: tuple[float, float],
    texts: Sequence[str],
    unit: str,
    width: float,
) -> Chart:
    """Draw a line with a point for each step; points above ``ends[1]`` or not finite are red, at the top."""
    least, most = ends
    height = 126.0
    chart = Chart(width, height, title)
    numbers = [float(line["step"]) for line in steps]
    first, last = min(numbers), max(numbers)
    room = (last - first or 1.0) * 6 / chart.px
    chart.ranges((first - room, last + room), (least, most + (most - least) * 0.1), "y")
    chart.axes.locator_params(axis="x", nbins=max(3, int(chart.px // 70)), integer=True)
    (left, right), (bottom, top) = chart.axes.get_xlim(), chart.axes.get_ylim()
    chart.write(unit, left, top, ha="right", va="bottom", xytext=(-5, 6))
    _add_phases(chart, steps, top)
    within = [math.isfinite(value) and value <= most for value in values]
    heights = [value if fits else most for value, fits in zip(values, within, strict=True)]
    chart.axes.plot(numbers, heights, color=light("keep"), linewidth=2)
    wide, high = 5 * (right - left) / chart.px, 5 * (top - bottom) / height
    points = []
    for x, y, fits, text in zip(numbers, heights, within, texts, strict=True):
        told = f"step {x:,.0f}: {text}{'' if fits else ' (beyond the picture)'}"
        points.append(Box(x - wide / 2, y - high / 2, wide, high, "keep" if fits else "stall", told))
    chart.add(points)
    chart.label_x("step")
    return chart


def _add_phases(chart: Chart, steps: Sequence[LoggedStep], top: float) -> None:
    left, right = chart.axes.get_xlim()
    phase, free = "", left
    for line in steps:
        if line.get("phase", "") == phase:
            continue
        phase, at = str(line.get("phase", "")), float(line["step"])
        chart.axes.axvline(at, color=light("muted"), linewidth=1, linestyle="--")
        wide = (_text_width(phase) + 8) * (right - left) / chart.px
        fits = at + wide <= right
        if phase and (at if fits else at - wide) >= free:
            side = {"ha": "left", "xytext": (2, 3)} if fits else {"ha": "right", "xytext": (-2, 3)}
            chart.write(phase, at, top, "ink", va="bottom", **side)
            free = at + wide
