"""The settings of MindSpeed's SmartSwap by name, and what becomes of each here (data only).

Source: MindSpeed's ``core/memory/smart_swap/swap_policy_config.py``, where users edit attributes of a class.
Its two command line flags are ``--smart-swap`` and ``--adaptive-memory-optimization``. A size there is a
number of bytes, and steps are counted from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MODE_FLAGS: Mapping[str, str] = MappingProxyType(
    {"smart_swap": "smart_swap", "adaptive_memory_optimization": "adaptive"}
)
"""Command line flag to ``memory.mode``; as keys they stand at the top level or in ``memory``."""

TARGET_MEMORY_BYTES = 40 * 2**30
REDUCTION_MEMORY_BYTES = 3 * 2**30
OUTPUT_ROOT_PATH = "./swap_output"
"""MindSpeed's defaults, for a setting that counts and is not written."""

TRANSLATED: Mapping[str, str] = MappingProxyType(
    {
        "policy_pref": "preference",
        "target_mode": "budget_gib or reduce_by_gib",
        "target_memory": "budget_gib",
        "reduction_memory": "reduce_by_gib",
        "tensor_size_filter": "min_tensor_mib",
        "redundant_memory": "margin_gib",
        "warmup_step": "warmup_steps",
        "stable_step": "search_steps",
        "save_policy": "plan_file",
        "output_root_path": "plan_file",
    }
)
"""Setting to the key of `MemoryConfig` that it sets."""

_WEIGHT = "a weight of MindSpeed's heuristic: here the simulated time of the step is minimised."
_MEASURED = "measured instead, in both directions, alone and together, on all ranks at once."
_DELAY = "release points follow from the simulated copies, op by op and not stage by stage."

UNUSED: Mapping[str, str] = MappingProxyType(
    {
        "policy_v2": "one planner serves both versions: the budget holds, and swap_bucket_size and "
        "num_attn_layers_per_stage bind beside it.",
        "rank": "the launcher says which rank a process is.",
        "print_level": "the level of the logger `hf_actswap` decides.",
        "print_rank": "rank 0 prints; under the Trainer every rank has its worker_<rank>.log.",
        "save_profiler_data": "no profiler data are written.",
        "op_diff_thresh": "a changed step is known by what it saves, not by the number of its ops.",
        "tensor_size_thresh": "tensors are found again by layer, op and call, whatever their size.",
        "enable_custom_record_stream": "memory is released by events; no stream is recorded on tensors.",
        "free_stage_delay": _DELAY,
        "swap_in_free_stage_delay": _DELAY,
        "D2H_bandwidth": _MEASURED,
        "H2D_bandwidth": _MEASURED,
        "size_coverage_weight": _WEIGHT,
        "adjust_memory": "a step that runs out of memory corrects the prediction by what was measured.",
        "adjust_step_duration": "the best measured plan is kept; durations are not scaled.",
        "adjust_size_coverage_weight": _WEIGHT,
        "custom_policy_fcn": "write fates by hand in swap_config and recompute_config, or edit the file of "
        "plan_file.",
    }
)
"""Setting that is accepted and sets nothing, to what happens instead."""

SETTINGS = (*TRANSLATED, *UNUSED)
