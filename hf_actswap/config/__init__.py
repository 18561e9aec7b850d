"""Reads the configuration: what the user wrote, as frozen values, or every error of it at once.

In: YAML text, a mapping, a file, a folder, a Hub id, or ``auto`` (`load_config`).
Out: an `ActSwapConfig`, with one frozen dataclass for each section (`schema`).

Types say what a key may hold (`schema`, `layer_values`) and pydantic checks it; `validation` turns what it
rejects into problems. `sections` and `memory_section` say what several keys mean together. `hub`
exchanges configurations with a model repository, and `documents` reads what this library itself has
written: plans, profiles, records of runs.

This package depends on neither torch nor a model, so errors are reported before anything is loaded.
"""

from __future__ import annotations

from .layer_values import LayerCounts, Layers, Offset, OpSelection, split_op_path
from .loader import ActSwapConfig, load_config
from .schema import (
    LayerSwapRule,
    MemoryConfig,
    OpSwapRule,
    OpTileRule,
    ParallelConfig,
    Preference,
    Prefetch,
    RecomputeConfig,
    StreamConfig,
    SwapConfig,
    TileConfig,
    TileTokens,
    Verify,
    WeightsPlace,
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
    "OpTileRule",
    "ParallelConfig",
    "Preference",
    "Prefetch",
    "RecomputeConfig",
    "StreamConfig",
    "SwapConfig",
    "TileConfig",
    "TileTokens",
    "Verify",
    "WeightsPlace",
    "load_config",
    "split_op_path",
]
