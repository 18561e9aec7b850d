"""One step, measured: compute, copies out, copies in, and where compute waited."""

from __future__ import annotations

from ..engine.step_record import StepTimeline
from .axes import LEGEND_ROW, add_legend, add_parts, add_time_axis, legend_rows
from .drawing import Box, Drawing, Label, Stroke
from .scales import Scale, ms_text, size_text

_LEGEND = (
    ("forward", "forward, by layer"),
    ("backward", "backward, by layer"),
    ("outside", "optimizer and the rest"),
    ("out", "copy to the host"),
    ("in", "copy back"),
    ("stall", "compute waits for a copy"),
)
_LANES = ("compute", "waits", "copies out", "copies in")


def timeline_chart(timeline: StepTimeline, width: float) -> Drawing:
    """Draw it.

    Args:
        timeline: of one step.
        width: in px.
    """
    narrow = width < 600
    left, right = (4.0 if narrow else 78.0), width - 8
    lane, gap = 24.0, 22.0 if narrow else 8.0
    top = legend_rows(_LEGEND, width - left) * LEGEND_ROW + (22 if narrow else 8)
    bottom = top + len(_LANES) * (lane + gap)
    drawing = Drawing(width, bottom + 34, "Timeline of a step: compute, copies, waits")
    add_legend(drawing, _LEGEND, left, 2, width - left)
    x = Scale(timeline.step_ms, left, right)
    add_time_axis(drawing, x, top, bottom, "ms since the step began")
    tops = {name: top + number * (lane + gap) for number, name in enumerate(_LANES)}
    for name, y in tops.items():
        drawing.add(Stroke([(left, y + lane), (right, y + lane)], "grid"))
        if narrow:
            drawing.add(Label(left, y - 5, name, size=11))
        else:
            drawing.add(Label(left - 8, y + lane / 2 + 4, name, anchor="end"))
    add_parts(drawing, timeline.compute, x, tops["compute"], lane)
    for stall in timeline.stalls:
        name = _name(stall.scope, stall.op_path)
        title = f"waits {ms_text(stall.length_ms)} for {name} ({stall.way})"
        drawing.add(_box(x, stall.start_ms, stall.length_ms, tops["waits"], lane, "stall", title))
    for copy in timeline.copies:
        length_ms = copy.end_ms - copy.start_ms
        rate = f", {copy.size_bytes / length_ms / 1e6:.1f} GB/s" if length_ms > 0 else ""
        title = f"{_name(copy.scope, copy.op_path)}: {size_text(copy.size_bytes)}, {ms_text(length_ms)}{rate}"
        y = tops["copies out" if copy.way == "out" else "copies in"]
        drawing.add(_box(x, copy.start_ms, length_ms, y, lane, copy.way, title))
    return drawing


def _box(x: Scale, start_ms: float, length_ms: float, y: float, lane: float, means: str, title: str) -> Box:
    """At least as wide as can be seen."""
    left = x(start_ms)
    return Box(left, y, max(x(start_ms + length_ms) - left - 0.3, 0.8), lane, means, title)


def _name(scope: object, op_path: str) -> str:
    place = f"layer {scope}" if isinstance(scope, int) else str(scope or "")
    return ", ".join(part for part in (place, op_path) if part) or "unnamed"
