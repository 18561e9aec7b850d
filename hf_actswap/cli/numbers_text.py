"""Numbers as tables show them."""

from __future__ import annotations

from ..engine.link import Link


def size_text(size_bytes: int) -> str:
    """Return bytes in the largest binary unit of which there is at least one."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def step_ms_text(milliseconds: float) -> str:
    """Return the duration of a step."""
    return f"{milliseconds:,.1f} ms" if milliseconds < 1000 else f"{milliseconds:,.0f} ms"


def op_ms_text(milliseconds: float) -> str:
    """Return the time of a few ops in ms, without the unit."""
    return f"{milliseconds:,.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def link_text(link: Link) -> str:
    """Return the rates of a link."""
    rates = (
        link.out_bytes_per_ms,
        link.in_bytes_per_ms,
        link.out_beside_in_bytes_per_ms,
        link.in_beside_out_bytes_per_ms,
    )
    out, back, out_both, back_both = (rate / 1e6 for rate in rates)
    return f"{out:.1f} GB/s out, {back:.1f} back, {out_both:.1f} and {back_both:.1f} at once"
