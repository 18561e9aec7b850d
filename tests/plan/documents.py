"""Entries of documents as they are written, and the reasons that plans give for what they change."""

from __future__ import annotations

from hf_actswap import MemoryPlan

MUL, SILU = r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"

RULE_1 = "recomputation takes effect and swap does not where both are enabled (MindFormers, coupling rule 1)"
RULE_2 = (
    "its output is used by an op with recomputation enabled, so it stays on the device "
    "(MindFormers, coupling rule 2)"
)
FIRST_WINS = "the first entry that names a layer wins (MindFormers, LayerSetting)"
FULL_BEATS = "full recomputation takes effect where both are configured (MindFormers, Memory Optimization)"
EXCLUDE_BEATS = "exclude keys have the highest priority (MindFormers 1.5, LayerSetting)"
NO_COUNTERPART = "the reference has this op and these layers have no counterpart, no effect"
NO_COMMUNICATION = "tensor_parallel_size is 1: there is no communication inside layers"


def entry(prefetch: object, layers: object) -> dict[str, object]:
    return {"backward_prefetch": prefetch, "layers": layers}


def op(name: object, prefetch: object, layers: object) -> dict[str, object]:
    return {"op_name": name, **entry(prefetch, layers)}


def set_lines(plan: MemoryPlan) -> list[str]:
    return [line for line in plan.log_lines() if line.startswith("Set ")]
