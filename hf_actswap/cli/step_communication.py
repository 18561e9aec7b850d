"""What the ranks of one model tell each other in a planned step, on paper."""

from __future__ import annotations

from typing import Any

from ..planner.cost.tensor_axis import Exchanged, exchanged, tensor_axis
from ..planner.record.devices import DEVICES, Fabric
from .planned import Planned


def fabric_of(found: Planned) -> Fabric | None:
    """Return what connects the devices of a step; ``None``: nothing is known of it."""
    return next((rates.fabric for rates in DEVICES if rates.name == found.step.device), None)


def communication_of(found: Planned) -> Exchanged | None:
    """Return the exchanges of a step; ``None``: they, or the link, are not known. A plan adds none."""
    fabric, ranks = fabric_of(found), found.subject.tensor_parallel_size
    if fabric is None or (ranks > 1 and not found.subject.shape.communicates):
        return None
    return exchanged(tensor_axis(found.subject.model, found.subject.shape, found.profile), ranks, fabric)


def communication_document(found: Exchanged | None) -> dict[str, Any] | None:
    """Return it as JSON values."""
    if found is None:
        return None
    return {
        "source": "data sheet",
        "sent_bytes": found.sent_bytes,
        "collectives": found.collectives,
        "ms": found.ms,
        "added_ms": found.added_ms,
    }


def communication_note(fabric: Fabric | None) -> str:
    """Return what a table of such steps must say."""
    if fabric is None:
        return "Of one rank. Times are computed from shapes; communication between ranks is not in them."
    rate = f"{fabric.bytes_per_ms / 1e6:.0f} GB/s and {fabric.latency_ms:g} ms each"
    return (
        "Of one rank. Times are computed from shapes. Comm., which the step contains, is on paper: what "
        f"collectives add that no product hides, at {rate} ({fabric.name} by its data sheet; not measured), "
        "all ranks in one machine."
    )
