"""The recorded numbers as pictures: time against memory, the value of bytes, curves of losses.

    python benchmarks/pictures.py RESULTS.json      draws RESULTS.png beside it

*Time against activation memory*, for `frontier.py` and `gpu_day.py`: a panel per workload, ours in colour.
*The value of bytes*, for `byte_values.py`: each tensor is as wide as its bytes, and as high as the time to
compute a byte of it again. *Curves*, for `parallel_curves.py`: losses of runs that should be equal, and their
differences. All of these commands but `gpu_day.py` draw their picture themselves if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from benchmarks.byte_values import READERS_NAMES, by_shape, forward_ms, held_rows, link_text, title
from benchmarks.records import by_workload

Row = Mapping[str, Any]

OURS = "actswap"
PLANNER = "actswap_plan"
_OUR_COLOUR = "#c8102e"
_PLANNER_COLOUR = "#1857a4"
_PEER_COLOUR = "#5a6570"
_GRID_COLOUR = "#e3e6e8"
_PANEL_INCHES = (9.0, 6.5)
_DOTS_PER_INCH = 130
_LOGARITHMIC_ABOVE = 2.5
"""Times that differ by more than this factor are drawn on a logarithmic axis."""
_LOGARITHMIC_TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the measured rows of a results file as a PNG.

    Args:
        rows: rows of the file; those without time or activation bytes are listed below their panel.
        path: path of the PNG.
    """
    panels = list(by_workload(rows).values())
    figure = Figure(figsize=(_PANEL_INCHES[0], _PANEL_INCHES[1] * max(1, len(panels))), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    drawn = []
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, number + 1)
        points = [row for row in panel if row["ms"] is not None and row["activation_bytes"] is not None]
        _draw_panel(axes, panel, points)
        drawn.append((axes, points))
    canvas.draw()  # fixes the layout, on which the places of labels depend
    figure.set_layout_engine("none")
    for axes, points in drawn:
        _label(axes, points, canvas.get_renderer())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw_panel(axes: Axes, panel: Sequence[Row], points: Sequence[Row]) -> None:
    axes.set_title(_title(panel[0]), loc="left", fontsize=9.5)
    axes.set_ylabel("ms per step (forward + backward)")
    axes.grid(color=_GRID_COLOUR)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    missing = [f"{row['method']} ({row['status']})" for row in panel if row not in points]
    note = f"\nnot drawn: {_wrapped(missing)}" if missing else ""
    if not points:
        axes.set_xlabel(f"activation memory{note}")
        return
    size, unit = _unit(points)
    axes.set_xlabel(f"activation memory at the peak, {unit} (left and low is better){note}", fontsize=9)
    for colour, group in _groups(points):
        ours, best = colour != _PEER_COLOUR, _frontier(group)
        planned = colour == _PLANNER_COLOUR
        style = {"alpha": 0.8, "linewidth": 1.8} if planned else {"alpha": 0.35, "linewidth": 1.2}
        axes.plot(*_coordinates(best, size), color=colour, zorder=2, **style)
        for row in group:
            axes.plot(
                *_coordinates([row], size),
                marker="s" if row["compiled"] else "o",
                markersize=8 if ours else 7,
                markerfacecolor=colour if ours else "white",
                markeredgecolor=colour,
                linestyle="none",
                zorder=3,
            )
    _scale(axes, points, size)


def _colour(row: Row) -> str:
    if row["method"].startswith(PLANNER):
        return _PLANNER_COLOUR
    return _OUR_COLOUR if row["method"].startswith(OURS) else _PEER_COLOUR


def _groups(points: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return groups with their colour: others, ours by hand, and the planner's eager and compiled rows.

    The best of each group are joined by a line.
    """
    by_colour = [
        (colour, [row for row in points if _colour(row) == colour])
        for colour in (_PEER_COLOUR, _OUR_COLOUR, _PLANNER_COLOUR)
    ]
    planned = by_colour.pop()[1]
    curves = [[row for row in planned if row["compiled"] is compiled] for compiled in (False, True)]
    return [*by_colour, *((_PLANNER_COLOUR, curve) for curve in curves)]


def _title(row: Row) -> str:
    form = "whole model" if row["head"] else "decoder stack"
    return (
        f"{row['model']}, {row['layers']} layers, {row['seq']:,} tokens, batch {row['batch']}, {form} "
        f"({row['device']}, torch {row['torch']}, commit {(row['commit'] or 'unknown')[:10]})\n"
        "filled: hf_actswap, blue: its planner; hollow: others; square: compiled layers; lines: best of each"
    )


def _wrapped(names: Sequence[str], a_line: int = 4) -> str:
    return "\n".join(", ".join(names[start : start + a_line]) for start in range(0, len(names), a_line))


def _unit(points: Sequence[Row]) -> tuple[int, str]:
    largest = max(row["activation_bytes"] for row in points)
    return next(((size, unit) for size, unit in _UNITS if largest >= size), (1, "bytes"))


def _coordinates(rows: Sequence[Row], size: int) -> tuple[list[float], list[float]]:
    return [row["activation_bytes"] / size for row in rows], [row["ms"] for row in rows]


def _frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other beats in both time and memory, from the least memory to the most."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["activation_bytes"], row["ms"])):
        if not best or row["ms"] < best[-1]["ms"]:
            best.append(row)
    return best


def _scale(axes: Axes, points: Sequence[Row], size: int) -> None:
    """Set the axes' limits with room for labels; the time axis is logarithmic if times differ much."""
    memory, times = _coordinates(points, size)
    axes.set_xlim(0, max(memory) * 1.25)
    low, high = min(times), max(times)
    if high / low > _LOGARITHMIC_ABOVE:
        axes.set_yscale("log")
        axes.set_ylim(low * (low / high) ** 0.15, high * (high / low) ** 0.12)
        axes.yaxis.set_major_locator(LogLocator(subs=_LOGARITHMIC_TICKS, numticks=40))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        room = max(high - low, 0.05 * high) * 0.2
        axes.set_ylim(low - room, high + room)


def _label(axes: Axes, points: Sequence[Row], renderer: RendererAgg) -> None:
    """Write each method's name beside its point, away from other names and points."""
    if not points:
        return
    size, _ = _unit(points)
    places = [tuple(axes.transData.transform(pair)) for pair in zip(*_coordinates(points, size), strict=True)]
    reach = 9.0 * renderer.points_to_pixels(1.0)
    taken = [Bbox.from_extents(x - reach, y - reach, x + reach, y + reach) for x, y in places]
    frame = axes.get_window_extent(renderer)
    order = sorted(range(len(points)), key=lambda number: -places[number][1])
    for number in order:
        others = [box for index, box in enumerate(taken) if index != number]
        taken.append(_place(axes, points[number], size, others, frame, renderer))


def _place(
    axes: Axes, row: Row, size: int, taken: Sequence[Bbox], frame: Bbox, renderer: RendererAgg
) -> Bbox:
    """Put one label at the nearest free place around its point; return its box."""
    ours = row["method"].startswith(OURS)
    colour = _colour(row)
    point = (row["activation_bytes"] / size, row["ms"])
    words: dict[str, Any] = {"fontsize": 8, "fontweight": "bold" if ours else "normal", "color": colour}
    probe = axes.text(0, 0, row["method"], transform=None, verticalalignment="center", **words)
    pixel_x, pixel_y = axes.transData.transform(point)
    boxes = [(place, _box(probe, place, (pixel_x, pixel_y), renderer)) for place in _places()]
    probe.remove()
    (x, y, end), box = min(boxes, key=lambda item: _cost(item[0], item[1], taken, frame))
    axes.annotate(
        row["method"],
        point,
        textcoords="offset points",
        xytext=(x, y),
        horizontalalignment=end,
        verticalalignment="center",
        # The line goes to the end of the text that is nearer to the point.
        arrowprops={
            **{"arrowstyle": "-", "color": colour, "alpha": 0.5, "lw": 0.7, "shrinkA": 0, "shrinkB": 6},
            "relpos": (0.0 if end == "left" else 1.0, 0.5),
        },
        **words,
    )
    return box


Place = tuple[float, float, Literal["left", "right"]]
"""Offset (x, y) from the row's point, in typographic points, and which end of the text is there."""


def _places() -> Iterator[Place]:
    for distance in (0, 10, 20, 30, 45, 60, 80, 100, 130):
        for rise in (0, 1, -1, 2, -2):
            yield 9.0 + distance, rise * (6.0 + 0.5 * distance), "left"
            yield -9.0 - distance, rise * (6.0 + 0.5 * distance), "right"


def _box(text: Text, place: Place, point: tuple[float, float], renderer: RendererAgg) -> Bbox:
    """Return the box in pixels that a text at a place covers."""
    pixels = renderer.points_to_pixels(1.0)
    text.set_position((point[0] + place[0] * pixels, point[1] + place[1] * pixels))
    text.set_horizontalalignment(place[2])
    return text.get_window_extent(renderer)


def _cost(place: Place, box: Bbox, taken: Sequence[Bbox], frame: Bbox) -> float:
    """Return the cost of a place: covering others or leaving the panel costs more than any distance."""
    covered = sum(_overlap(box, other) for other in taken)
    outside = box.width * box.height - _overlap(box, frame)
    return 10.0 * (covered + outside) + abs(place[0]) + abs(place[1])


def _overlap(one: Bbox, other: Bbox) -> float:
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else float(common.width * common.height)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw a results file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON of frontier.py, gpu_day.py or byte_values.py")
    parser.add_argument("--out", type=Path, help="PNG (default: beside the JSON)")
    arguments = parser.parse_args(argv)
    rows = json.loads(arguments.results.read_text(encoding="utf-8"))
    picture = arguments.out or arguments.results.with_suffix(".png")
    if rows and "ps_per_byte" in rows[0]:
        draw_byte_values(rows, picture)
    else:
        draw([row for row in rows if row.get("kind", "frontier") == "frontier"], picture)


_COLOURS = {"attention": "#c8102e", "matmul": "#2f6690", "elementwise": "#9aa5ad"}
_WORDS = {
    "attention": "attention",
    "matmul": "a matrix product",
    "elementwise": "elementwise, norms, casts",
}
_LINK_COLOUR = "#b8860b"
_BYTE_PANEL_INCHES = (10.0, 4.9)
_BYTE_DOTS_PER_INCH = 110
_NARROWEST = 0.004
"""Smallest share of the layer's bytes that is drawn; smaller tensors (statistics of norms) are left out."""
_MIB = 2**20


def draw_byte_values(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a results file of `byte_values.py` as a PNG, a panel per shape.

    Args:
        rows: rows of the file.
        path: path of the PNG.
    """
    panels = list(by_shape(rows).values())
    figure = Figure(
        figsize=(_BYTE_PANEL_INCHES[0], _BYTE_PANEL_INCHES[1] * max(1, len(panels))), layout="constrained"
    )
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels):
        _draw_byte_panel(figure.add_subplot(len(panels), 1, number + 1), panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_BYTE_DOTS_PER_INCH, metadata={"Software": None, "Description": digest(rows)})


def digest(rows: Sequence[Row]) -> str:
    """Return a digest of a picture's data; it is written into the PNG."""
    return "rows " + hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _draw_byte_panel(axes: Axes, panel: Sequence[Row]) -> None:
    total_bytes = sum(row["held_bytes"] for row in panel)
    drawn = [row for row in held_rows(panel) if row["held_bytes"] > _NARROWEST * total_bytes]
    lowest = min(row["ps_per_byte"] for row in drawn)
    highest = max(row["ps_per_byte"] for row in drawn)
    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.6, highest * (highest / lowest))
    left = 0.0
    for row in drawn:
        width = row["held_bytes"] / _MIB
        axes.bar(
            left,
            row["ps_per_byte"],
            width,
            align="edge",
            color=_COLOURS[_dearest_kind(row, panel)],
            edgecolor="white",
            linewidth=0.8,
            hatch="//" if row["root"] else None,
        )
        axes.text(
            left + width / 2,
            row["ps_per_byte"] * 1.12,
            f"{READERS_NAMES.get(row['name'], row['op'])}  {_number(row['ps_per_byte'])}",
            rotation=90,
            fontsize=7.5,
            horizontalalignment="center",
            verticalalignment="bottom",
        )
        left += width
    axes.set_xlim(0, left)
    axes.set_title(title(panel), loc="left", fontsize=10)
    axes.set_xlabel("MiB of one layer, the dearest byte first", fontsize=9)
    axes.set_ylabel("ps to have a byte again", fontsize=9)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.spines[["top", "right"]].set_visible(False)
    _draw_link(axes, panel, left)
    handles: list[Artist] = [
        Patch(color=_COLOURS[kind], label=f"again by {_WORDS[kind]}") for kind in _COLOURS
    ]
    handles.append(_link_in_legend(panel[0]))
    handles.append(Patch(facecolor="white", edgecolor="#5a6570", hatch="//", label="held only to recompute"))
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="upper right")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _link_in_legend(row: Row) -> Artist:
    has_link = row["link_ps_per_byte"] is not None
    return Line2D([], [], color=_LINK_COLOUR, linestyle="-" if has_link else "none", label=link_text(row))


def _dearest_kind(row: Row, panel: Sequence[Row]) -> str:
    """Return the kind of the call that takes the most time of a row's reruns."""
    calls = [one for one in panel if one["name"] in row["reruns"]]
    return str(max(calls, key=lambda one: one["ms"])["kind"])


def _draw_link(axes: Axes, panel: Sequence[Row], total_mib: float) -> None:
    """Draw the link's time for a byte, and the bytes that it can copy during the layer's own forward."""
    price = panel[0]["link_ps_per_byte"]
    if price is None:
        return
    axes.axhline(price, color=_LINK_COLOUR, linewidth=1.4)
    hidden_mib = forward_ms(panel) * 1e9 / price / _MIB
    if hidden_mib < total_mib:
        axes.axvline(hidden_mib, color=_LINK_COLOUR, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"{hidden_mib:,.0f} MiB leave during\nthe layer's forward",
            (hidden_mib, axes.get_ylim()[1]),
            xytext=(4, -4),
            textcoords="offset points",
            fontsize=8,
            color=_LINK_COLOUR,
            verticalalignment="top",
        )


_STYLES = (("#444444", "-", 3.0), ("#1f77b4", "--", 1.6), ("#d62728", ":", 1.6), ("#2ca02c", "-.", 1.0))


def draw_curves(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the losses above, and below how far each is from the first, on a logarithmic scale.

    Args:
        curves: mappings with ``name`` and ``loss``, a number for each step; the first is the reference.
        path: path of the PNG.
    """
    figure = Figure(figsize=(7.5, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = curves[0]["loss"]
    steps = range(1, len(reference) + 1)
    for number, curve in enumerate(curves):
        colour, line, width = _STYLES[number % len(_STYLES)]
        look: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": width}
        above.plot(steps, curve["loss"], label=curve["name"], **look)
        if number:
            differences = [abs(b - a) for a, b in zip(reference, curve["loss"], strict=True)]
            below.plot(steps, [value or None for value in differences], label=curve["name"], **look)
    above.set_ylabel("training loss (nats)")
    below.set_ylabel(f"|loss - {curves[0]['name']}|")
    below.set_xlabel("step")
    below.set_yscale("log")
    for axes in (above, below):
        axes.grid(color="#e5e5e5")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


if __name__ == "__main__":
    main()
