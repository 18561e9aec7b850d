"""MindSpeed's names in ``memory``: the same values in our words, or a note that says what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_actswap.config import MemoryConfig, load_config
from hf_actswap.config.keys import (
    MEMORY_KEYS,
    MINDSPEED_COUNTERPARTS,
    MINDSPEED_IGNORED,
    MODE_FLAGS,
    SETTINGS,
)
from hf_actswap.errors import ConfigError

GIB, MIB = 2**30, 2**20

THEIR_FILE = {
    "rank": 0,
    "save_policy": False,
    "save_profiler_data": False,
    "print_level": 1,
    "print_rank": 0,
    "output_root_path": "./swap_output",
    "warmup_step": 2,
    "stable_step": 3,
    "op_diff_thresh": 0.05,
    "tensor_size_thresh": 2**31 - 1,
    "enable_custom_record_stream": True,
    "free_stage_delay": 4,
    "swap_in_free_stage_delay": 2,
    "D2H_bandwidth": 64 / 2.5 * 1000,
    "H2D_bandwidth": 64 / 2.5 * 1000,
    "target_mode": False,
    "reduction_memory": 3 * GIB,
    "target_memory": 40 * GIB,
    "tensor_size_filter": 20 * MIB,
    "redundant_memory": 2 * GIB,
    "size_coverage_weight": 2,
    "adjust_memory": 300 * MIB,
    "adjust_step_duration": 1,
    "adjust_size_coverage_weight": 0,
    "policy_v2": True,
    "policy_pref": "SwapPolicyPref.BETTER_PERFORMANCE",
    "swap_bucket_size": -1,
    "num_attn_layers_per_stage": 1,
    "custom_policy_fcn": None,
}
"""All settings of MindSpeed with their defaults."""


def memory(**section: Any) -> MemoryConfig:
    return load_config({"memory": section}).memory


def notes(**section: Any) -> tuple[str, ...]:
    return load_config({"memory": section}).notes


def test_their_whole_file_means_what_it_means_there() -> None:
    config = load_config({"smart_swap": True, "memory": THEIR_FILE})
    assert config.memory == MemoryConfig(
        mode="smart_swap",
        reduce_by_gib=3.0,
        margin_gib=2.0,
        preference="performance",
        warmup_steps=2,
        search_steps=1,
        num_attn_layers_per_stage=1,
        swap_bucket_size=-1,
        min_tensor_mib=20.0,
    )
    assert load_config(config.to_yaml()) == config
    assert not set(config.to_dict()["memory"]) - set(MEMORY_KEYS)


def test_every_setting_is_ours_or_translated_or_has_a_note() -> None:
    same = set(THEIR_FILE) & set(MEMORY_KEYS)
    assert same == {"swap_bucket_size", "num_attn_layers_per_stage"}
    assert set(THEIR_FILE) == same | set(SETTINGS)
    for key in MINDSPEED_IGNORED:
        (line,) = notes(**{key: THEIR_FILE[key]})
        assert line == f"`memory.{key}`: {MINDSPEED_IGNORED[key]}"
        assert memory(**{key: THEIR_FILE[key]}) == MemoryConfig()


@pytest.mark.parametrize(
    ("section", "ours"),
    [
        ({"policy_pref": "BETTER_PERFORMANCE"}, {"preference": "performance"}),
        ({"policy_pref": "BETTER_MEMORY_SAVING"}, {"preference": "memory_saving"}),
        ({"policy_pref": "SwapPolicyPref.BETTER_MEMORY_SAVING"}, {"preference": "memory_saving"}),
        ({"target_mode": True, "target_memory": 24 * GIB}, {"budget_gib": 24.0}),
        ({"target_mode": True}, {"budget_gib": 40.0}),
        ({"target_mode": False}, {"reduce_by_gib": 3.0}),
        ({"target_memory": 24 * GIB}, {"budget_gib": 24.0}),
        ({"reduction_memory": GIB // 2}, {"reduce_by_gib": 0.5}),
        ({"target_memory": 24 * GIB, "reduction_memory": GIB}, {"reduce_by_gib": 1.0}),
        ({"target_mode": True, "target_memory": GIB, "reduction_memory": 2 * GIB}, {"budget_gib": 1.0}),
        ({"target_mode": True, "budget_gib": 7}, {"budget_gib": 7.0}),
        ({"target_mode": False, "reduce_by_gib": 7}, {"reduce_by_gib": 7.0}),
        ({"tensor_size_filter": 0}, {"min_tensor_mib": 1 / MIB}),
        ({"redundant_memory": 0}, {"margin_gib": 0.0}),
        ({"warmup_step": 3, "stable_step": 10}, {"warmup_steps": 3, "search_steps": 7}),
        ({"warmup_steps": 3, "stable_step": 10}, {"warmup_steps": 3, "search_steps": 7}),
        ({"stable_step": 2}, {"search_steps": 0}),
        ({"stable_step": 5, "warmup_step": 5}, {"warmup_steps": 5, "search_steps": 0}),
        ({"save_policy": True}, {"plan_file": "./swap_output/plan.json"}),
        ({"save_policy": True, "output_root_path": "/there/"}, {"plan_file": "/there/plan.json"}),
        ({"save_policy": False, "output_root_path": "there", "plan_file": "p"}, {"plan_file": "p"}),
    ],
)
def test_one_setting_in_our_words(section: dict[str, Any], ours: dict[str, Any]) -> None:
    assert memory(**section) == MemoryConfig(**ours)
    assert load_config(load_config({"memory": section}).to_yaml()).memory == MemoryConfig(**ours)


@given(st.integers(1, 2**53))
def test_bytes_stay_bytes(size_bytes: int) -> None:
    read = memory(target_memory=size_bytes, tensor_size_filter=size_bytes, redundant_memory=size_bytes)
    again = load_config(load_config({"memory": {"target_memory": size_bytes}}).to_yaml()).memory
    assert read.budget_gib is not None
    assert read.min_tensor_mib is not None
    assert read.margin_gib is not None
    assert round(read.budget_gib * GIB) == round(read.margin_gib * GIB) == size_bytes
    assert round(read.min_tensor_mib * MIB) == size_bytes
    assert again.budget_gib == read.budget_gib


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"target_mode": True}, "target_memory is not written; MindSpeed's default counts, budget_gib 40."),
        (
            {"target_mode": False},
            "reduction_memory is not written; MindSpeed's default counts, reduce_by_gib 3.",
        ),
        ({"target_mode": True, "reduction_memory": 1, "budget_gib": 1}, "counts where target_mode is false"),
        ({"target_mode": False, "target_memory": 1, "reduce_by_gib": 1}, "counts where target_mode is true"),
        ({"target_memory": 1}, "is the budget, as if target_mode were true, which is not written."),
        ({"output_root_path": "x"}, "counts where save_policy is true; it is ignored."),
        ({"redundant_memory": 1, "budget_gib": 1}, "beside memory.budget_gib it is ignored."),
        ({"save_policy": True}, "the plan is written to ./swap_output/plan.json, and read from there"),
    ],
)
def test_what_is_not_obvious_is_said(section: dict[str, Any], line: str) -> None:
    (found,) = notes(**section)
    assert line in found


def test_plain_settings_give_no_note() -> None:
    plain = {
        "policy_pref": "BETTER_PERFORMANCE",
        "reduction_memory": GIB,
        "stable_step": 9,
        "tensor_size_filter": 1,
    }
    assert notes(**plain) == ()


@pytest.mark.parametrize(("flag", "mode"), list(MODE_FLAGS.items()))
def test_the_flags_are_the_mode(flag: str, mode: str) -> None:
    other = next(name for name in MODE_FLAGS if name != flag)
    for document in (
        {flag: True},
        {flag: True, other: False},
        {"memory": {flag: True, other: False}},
        {other: False, "memory": {"mode": mode}},
    ):
        config = load_config(document)
        assert (config.memory.mode, config.notes) == (mode, ())
        assert config.to_dict() == {"memory": {"mode": mode}}
    assert load_config({flag: False}).memory == MemoryConfig()
    with pytest.raises(ConfigError, match=f"expected one of {flag} and {other}, found both"):
        load_config({flag: True, other: True})
    with pytest.raises(ConfigError, match=f"expected one of {flag} and memory.mode, found both"):
        load_config({flag: True, "memory": {"mode": mode}})


def test_memory_saving_goes_with_both_modes() -> None:
    for mode in MODE_FLAGS.values():
        assert memory(mode=mode, policy_pref="BETTER_MEMORY_SAVING").preference == "memory_saving"


def test_a_misspelt_setting_finds_the_nearest_of_both_vocabularies() -> None:
    for wrong, right in (
        ("policy_perf", "policy_pref"),
        ("margin_gb", "margin_gib"),
        ("D2H_bandwith", "D2H_bandwidth"),
    ):
        with pytest.raises(ConfigError, match=f"memory.{wrong}: .*Did you mean '{right}'"):
            memory(**{wrong: 1})


def test_a_setting_at_the_top_level_is_sent_below_memory() -> None:
    for name in MINDSPEED_COUNTERPARTS:
        with pytest.raises(
            ConfigError, match=f"{name}: .* It is a key of `memory`: write it below that line."
        ):
            load_config({name: 1})


def test_a_settings_file_sets_keys_of_memory() -> None:
    text = """
    smart_swap: true
    memory:
      policy_v2: True
      policy_pref: BETTER_MEMORY_SAVING
      swap_bucket_size: -1
      num_attn_layers_per_stage: 1
      target_mode: True
      target_memory: 42949672960
    """
    assert load_config(text).to_dict() == {
        "memory": {"mode": "smart_swap", "budget_gib": 40, "preference": "memory_saving"}
    }
