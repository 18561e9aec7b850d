"""Carries out a plan on a running model: what autograd saves is kept, swapped or recomputed.

In: a model, its `ModelStructure` and a `MemoryPlan` (`install`).
Out: an `AppliedPlan`: statistics (`SwapStats`), and `remove`, after which the model is as it was.

`hooks` and `forward_pass` follow the model and answer autograd's packs with tickets (`tickets`). Swap:
`host_pool` and `slabs` hold host memory, `transfer` and `transfer_streams` move bytes, `windows`,
`schedule` and `passes` say when. Recompute: `recompute`, `kept_results`, `compiled_regions`. Tiles:
`tiled_calls`, and of head and loss `chunked_logits`, `head_chunks`; `pieces` has what runs a call piece by
piece.

It depends on tensors, autograd and streams, and on neither YAML nor model families.
"""

from __future__ import annotations

from .install import AppliedPlan, install
from .stats import SwapStats
from .transfer import BlockingTransfer, Transfer
from .transfer_streams import StreamTransfer
from .workplace import Resources

__all__ = [
    "AppliedPlan",
    "BlockingTransfer",
    "Resources",
    "StreamTransfer",
    "SwapStats",
    "Transfer",
    "install",
]
