"""Decides what happens to the saved tensors of each op of a model: keep, swap or recompute.

In: an `ActSwapConfig` and a model.
Out: a `MemoryPlan`: rows of layer, op path and fate, with an adjustment for each change to what was
    requested.

`model_structure` names the layers and ops of a model, by one run on fake tensors (`dry_run`,
`forward_recorder`). `resolve` applies what was requested (`apply_rules`) and the coupling rules (`rules`).
`settle` changes a plan once the real shapes are known, and `saved_bytes` counts what it keeps and moves.

The package knows names, layers, ops and bytes. It knows no CUDA streams, and no hooks of a training run.
"""

from __future__ import annotations

from .actions import (
    Adjustment,
    ConfigOrPlan,
    MemoryPlan,
    PlanRow,
    Tile,
    Windows,
    fingerprint_of,
    load_config_or_plan,
    load_plan,
)
from .layout import build_layout
from .model_structure import ModelStructure, model_structure
from .resolve import resolve_plan, with_problems_of_model
from .saved_bytes import OpCall, SavedBytes, SavedStorage, Use, swapped_bytes

__all__ = [
    "Adjustment",
    "ConfigOrPlan",
    "MemoryPlan",
    "ModelStructure",
    "OpCall",
    "PlanRow",
    "SavedBytes",
    "SavedStorage",
    "Tile",
    "Use",
    "Windows",
    "build_layout",
    "fingerprint_of",
    "load_config_or_plan",
    "load_plan",
    "model_structure",
    "resolve_plan",
    "swapped_bytes",
    "with_problems_of_model",
]
