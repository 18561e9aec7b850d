"""Carries out a plan on a running model: what autograd saves is kept, swapped or recomputed.

In: a model, its `ModelStructure` and a `MemoryPlan` (`install`).
Out: an `AppliedPlan`: statistics (`SwapStats`), and `remove`, after which the model is as it was.

`hooks` and `forward_pass` follow the model, and give autograd a ticket for each tensor that it saves
(`tickets`). Swap: a `moving_block` has its host memory from `host_pool` and its copies from `transfer`;
`windows` and `schedule` decide when it moves. Recompute: `recompute`, `compiled_regions`. Tiles:
`tiled_calls` for modules, `tiled_logits` for head and loss.

It depends on tensors, autograd and streams, and on neither YAML nor model families.
"""

from __future__ import annotations

from .frozen_weights import FrozenWeights
from .host_budget import record_saved
from .host_pool import HostBuffer, HostPool, PageableSlabs, PinnedSlabs
from .install import AppliedPlan, install
from .link import Link
from .plan_runtime import Resources
from .stats import SwapStats
from .swapped_storages import EvictableTensors
from .tickets import StaleTensorError
from .tiled_logits import TiledLogits
from .transfer import BlockingTransfer, Copy, StreamTransfer, Transfer

__all__ = [
    "AppliedPlan",
    "BlockingTransfer",
    "Copy",
    "EvictableTensors",
    "FrozenWeights",
    "HostBuffer",
    "HostPool",
    "Link",
    "PageableSlabs",
    "PinnedSlabs",
    "Resources",
    "StaleTensorError",
    "StreamTransfer",
    "SwapStats",
    "TiledLogits",
    "Transfer",
    "install",
    "record_saved",
]
