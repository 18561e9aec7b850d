"""The program's own arithmetic written as loops: what a choice costs, and the most memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence

from hf_actswap.engine import Link
from hf_actswap.planner.search.layer_graph import Segment
from hf_actswap.planner.search.layer_options import Option


def cost_and_peak(segments: Sequence[Segment], options: Sequence[Option], link: Link) -> tuple[float, float]:
    """Return recomputation and stalls in ms, and the largest memory in bytes."""
    kept, backlog, lead = [0.0], [0.0], [0.0]
    for segment, option in zip(segments, options, strict=True):
        graph = segment.graph
        backward_ms = sum(graph.backward_ms[place] for place in graph.backward_order) + option.recompute_ms
        kept.append(kept[-1] + option.kept_bytes)
        backlog.append(max(backlog[-1] + option.out_ms - sum(graph.forward_ms), option.backlog_ms, 0.0))
        lead.append(max(lead[-1] + option.in_ms - backward_ms, option.lead_ms, 0.0))
    peak = 0.0
    for place, (segment, option) in enumerate(zip(segments, options, strict=True)):
        forward = segment.forward_base_bytes + option.forward_peak_bytes
        peak = max(peak, kept[place] + backlog[place] * link.out_bytes_per_ms + forward)
        if segment.graph.backward_order:
            backward = segment.backward_base_bytes + option.backward_peak_bytes
            peak = max(peak, kept[place] + lead[place] * link.in_bytes_per_ms + backward)
    return sum(option.recompute_ms for option in options) + backlog[-1] + lead[-1], peak
