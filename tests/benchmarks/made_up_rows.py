"""Rows of the frontier as a run on a GPU would write them."""

from __future__ import annotations

from typing import Any

GIB = 2**30
Row = dict[str, Any]


def measured(method: str, seq: int, ms: float, activation_gib: float) -> Row:
    """Return what every row of a decoder stack has; 12 GiB of its peak are no activations."""
    return {
        "method": method,
        "compiled": "compiled" in method,
        "model": "Llama-2-7B",
        "layers": 16 if seq == 8192 else 6,
        "seq": seq,
        "batch": 1,
        "head": False,
        "ms": ms,
        "activation_bytes": int(activation_gib * GIB),
        "peak_allocated_bytes": int((activation_gib + 12) * GIB),
        "device": "NVIDIA H200",
        "status": "measured",
    }
