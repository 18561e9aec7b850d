"""Lists the keys that a document may hold: ours, and those of MindFormers that have no meaning here.

It also lists the settings of MindSpeed's SmartSwap, with what each of them does here. Source: MindSpeed's
``core/memory/smart_swap/swap_policy_config.py``, where users edit attributes of a class. Its two command line
flags are ``--smart-swap`` and ``--adaptive-memory-optimization``. A size there is a number of bytes, and
steps are counted from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from .schema import MemoryConfig, RecomputeConfig, StreamConfig, SwapConfig, TileConfig

SWAP_KEYS = tuple(field.name for field in fields(SwapConfig))
RECOMPUTE_KEYS = tuple(field.name for field in fields(RecomputeConfig))
TILE_KEYS = tuple(field.name for field in fields(TileConfig))
STREAM_KEYS = tuple(field.name for field in fields(StreamConfig))
MEMORY_KEYS = tuple(field.name for field in fields(MemoryConfig))

PARALLEL_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("tensor_parallel_size", "tensor_model_parallel_size", "model_parallel"),
    "sequence_parallel_enabled": ("sequence_parallel_enabled", "sequence_parallel", "use_seq_parallel"),
    "pipeline_stage": ("pipeline_stage",),
    "pp_interleave_num": ("pp_interleave_num",),
    "offset": ("offset",),
    "schedule": ("schedule",),
}
"""Field of `ParallelConfig` -> the keys that set it: NxD's name, Megatron's, MindFormers'."""

PARALLEL_KEYS = tuple(key for spellings in PARALLEL_SPELLINGS.values() for key in spellings)

OUR_SECTIONS = (
    "swap_config",
    "recompute_config",
    "parallel_config",
    "tile_config",
    "stream_config",
    "memory",
    "stacks",
    "log",
)
STACK_SECTIONS = ("swap_config", "recompute_config")
"""What each entry of ``stacks`` may hold."""

# MindFormers' template of configurations (its section names and its top-level scalars), and what its
# published files hold besides.
FOREIGN_SECTIONS = frozenset(
    """
    context seed output_dir run_mode use_parallel resume_training print_separate_loss load_checkpoint
    load_ckpt_format load_ckpt_async auto_trans_ckpt transform_process_num src_strategy_path_or_dir
    only_save_strategy use_legacy ckpt_use_legacy_format pretrained_model_dir balanced_load
    remove_redundancy save_checkpoint checkpoint_name_or_path do_eval eval_step_interval
    eval_epoch_interval ignore_data_skip data_skip_steps profile profile_communication profile_memory
    init_start_profile profile_start_step profile_stop_step profile_rank_ids profile_pipeline
    profile_level profiler_level profile_output with_stack data_simplification mstx layer_scale
    layer_decay lr_scale lr_scale_factor
    micro_batch_interleave_num remote_save_url save_file input_data predict_batch_size adapter_id
    exclude_cann_cpu train_precision_sync infer_precision_sync postprocess_use_numpy auto_tune
    filepath_prefix autotune_per_step trainer runner_config runner_wrapper optimizer lr_schedule
    grouped_lr_schedule train_dataset train_dataset_task eval_dataset eval_dataset_task processor metric
    callbacks eval_callbacks parallel moe_config monitor_config stable_rank_config tensorboard
    generation_config generation infer trust_remote_code rank_table_file
    """.split()  # noqa: SIM905 - one name a line would be a page
)

FOREIGN_PARALLEL_KEYS = frozenset(
    """
    data_parallel data_parallel_size context_parallel context_parallel_size context_parallel_algo
    hierarchical_context_parallel_sizes ulysses_degree_in_cp expert_parallel expert_model_parallel_size
    expert_tensor_parallel_size micro_batch_num micro_batch_interleave_num seq_split_num vocab_emb_dp
    gradient_aggregation_group optimizer_shard optimizer_weight_shard_size mem_coeff npu_nums_per_device
    use_ring_attention fp16 bf16 params_dtype pp_split_num
    """.split()  # noqa: SIM905 - one name a line would be a page
)


def ignored_key_note(key: str) -> str:
    """Return the note about a key that is accepted and does nothing."""
    return f"`{key}` has no meaning here and is ignored."


MODE_FLAGS: Mapping[str, str] = {"smart_swap": "smart_swap", "adaptive_memory_optimization": "adaptive"}
"""Command line flag -> ``memory.mode``. As keys the flags may stand at the top level or in ``memory``."""

TARGET_MEMORY_BYTES = 40 * 2**30
REDUCTION_MEMORY_BYTES = 3 * 2**30
OUTPUT_ROOT_PATH = "./swap_output"
"""MindSpeed's defaults, for settings that apply although they are not written."""

MINDSPEED_COUNTERPARTS: Mapping[str, str] = {
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
"""Setting -> the key of `MemoryConfig` that it sets."""

_WEIGHT = "a weight of MindSpeed's heuristic: here the simulated time of the step is minimised."
_MEASURED = "measured instead, in both directions, alone and together, on all ranks at once."
_DELAY = "release points follow from the simulated copies, op by op and not stage by stage."

MINDSPEED_IGNORED: Mapping[str, str] = {
    "policy_v2": "one planner serves both versions: the budget holds, and swap_bucket_size and "
    "num_attn_layers_per_stage apply as well.",
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
"""Setting that is accepted and has no effect -> what happens instead."""

SETTINGS = (*MINDSPEED_COUNTERPARTS, *MINDSPEED_IGNORED)

KEYS_OF_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "swap_config": SWAP_KEYS,
    "recompute_config": RECOMPUTE_KEYS,
    "parallel_config": PARALLEL_KEYS,
    "tile_config": TILE_KEYS,
    "stream_config": STREAM_KEYS,
    "memory": (*MEMORY_KEYS, *MINDSPEED_COUNTERPARTS),
}
"""Section -> its keys, for a key that stands elsewhere."""
