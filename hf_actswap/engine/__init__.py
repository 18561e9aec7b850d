"""Carries out a plan on a running model: what autograd saves is kept, swapped or recomputed.

In: a model, its `ModelStructure` and a `MemoryPlan` (`install`).
Out: an `AppliedPlan`: statistics (`SwapStats`), and `remove`, after which the model is as it was.

`hooks` and `forward_pass` follow the model, and give autograd a ticket for each tensor that it saves
(`tickets`). Swap: `host_pool` holds host memory, `transfer` moves bytes,
`windows`, `schedule` and `passes` decide when. Recompute: `recompute`, `kept_results`, `compiled_regions`.
Tiles: `tiled_calls` for modules, `chunked_logits` for head and loss; `pieces` has helpers
for both.

It depends on tensors, autograd and streams, and on neither YAML nor model families.
"""

from __future__ import annotations

from .install import AppliedPlan, install
from .plan_runtime import Resources
from .stats import SwapStats
from .transfer import BlockingTransfer, StreamTransfer, Transfer

__all__ = [
    "AppliedPlan",
    "BlockingTransfer",
    "Resources",
    "StreamTransfer",
    "SwapStats",
    "Transfer",
    "install",
]
