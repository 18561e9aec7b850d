"""The configuration floor: what the user wrote, as frozen values, or every error of it at once."""

from __future__ import annotations

from hf_actswap.config.loader import load_config
from hf_actswap.config.op_path import split_op_path
from hf_actswap.config.schema import (
    ActSwapConfig,
    LayerCounts,
    Layers,
    LayerSwapRule,
    MemoryConfig,
    Offset,
    OpSelection,
    OpSwapRule,
    ParallelConfig,
    Prefetch,
    RecomputeConfig,
    SwapConfig,
)

__all__ = [
    "ActSwapConfig",
    "LayerCounts",
    "LayerSwapRule",
    "Layers",
    "MemoryConfig",
    "Offset",
    "OpSelection",
    "OpSwapRule",
    "ParallelConfig",
    "Prefetch",
    "RecomputeConfig",
    "SwapConfig",
    "load_config",
    "split_op_path",
]
