"""The configuration layer: what the user wrote, as frozen values, or every error of it at once."""

from __future__ import annotations

from .loader import ActSwapConfig, load_config
from .op_path import split_op_path
from .schema import (
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
    TileConfig,
    TileTokens,
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
    "TileConfig",
    "TileTokens",
    "load_config",
    "split_op_path",
]
