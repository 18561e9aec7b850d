"""The values of bytes as a picture: each tensor as wide as its bytes, as high as a byte of it is worth.

    python benchmarks/byte_picture.py RESULTS.json [--out PICTURE.png]

`byte_values.py` does so itself where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.byte_table import READERS_NAMES, by_shape, forward_ms, held_rows, link_text, title

Result = Mapping[str, Any]

_COLOURS = {"attention": "#c8102e", "matmul": "#2f6690", "elementwise": "#9aa5ad"}
_WORDS = {
    "attention": "attention",
    "matmul": "a matrix product",
    "elementwise": "elementwise, norms, casts",
}
_LINK_COLOUR = "#b8860b"
_PANEL_INCHES = (10.0, 4.9)
_DOTS_PER_INCH = 110
_NARROWEST = 0.004
"""Tensors with a smaller share of the layer's bytes (statistics of norms) are left out."""
_MIB = 2**20


def draw(rows: Sequence[Result], path: Path) -> None:
    """Draw the rows of a results file as a PNG, a panel per shape.

    Args:
        rows: as in the file.
        path: of the PNG.
    """
    panels = list(by_shape(rows).values())
    figure = Figure(figsize=(_PANEL_INCHES[0], _PANEL_INCHES[1] * max(1, len(panels))), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(len(panels), 1, number + 1), panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Software": None, "Description": digest(rows)})


def digest(rows: Sequence[Result]) -> str:
    """Return what tells a picture's data from others; it is written into the PNG."""
    return "rows " + hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _draw_panel(axes: Axes, panel: Sequence[Result]) -> None:
    total_bytes = sum(row["held_bytes"] for row in panel)
    drawn = [row for row in held_rows(panel) if row["held_bytes"] > _NARROWEST * total_bytes]
    lowest = min(row["ps_per_byte"] for row in drawn)
    highest = max(row["ps_per_byte"] for row in drawn)
    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.6, highest * (highest / lowest) ** 1.0)
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


def _link_in_legend(row: Result) -> Artist:
    has_link = row["link_ps_per_byte"] is not None
    return Line2D([], [], color=_LINK_COLOUR, linestyle="-" if has_link else "none", label=link_text(row))


def _dearest_kind(row: Result, panel: Sequence[Result]) -> str:
    """The kind of that call on which most of the time goes."""
    calls = [one for one in panel if one["name"] in row["reruns"]]
    return str(max(calls, key=lambda one: one["ms"])["kind"])


def _draw_link(axes: Axes, panel: Sequence[Result], total_mib: float) -> None:
    """What the link takes for a byte, and how many bytes it takes away during the layer's own forward."""
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


def main(argv: Sequence[str] | None = None) -> None:
    """Draw a results file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON of byte_values.py")
    parser.add_argument("--out", type=Path, help="PNG (default: beside the JSON)")
    arguments = parser.parse_args(argv)
    rows = json.loads(arguments.results.read_text(encoding="utf-8"))
    draw(rows, arguments.out or arguments.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
