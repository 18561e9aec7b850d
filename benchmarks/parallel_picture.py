"""Loss curves of runs that should be one, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_DOTS_PER_INCH = 130
_STYLES = (("#444444", "-", 3.0), ("#1f77b4", "--", 1.6), ("#d62728", ":", 1.6), ("#2ca02c", "-.", 1.0))


def draw_curves(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the losses above, and below how far each is from the first, on a logarithmic scale.

    Args:
        curves: with ``name`` and ``loss``, a number for each step; the first is the reference.
        path: of the PNG file.
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
