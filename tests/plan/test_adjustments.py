"""Each rule that changes what the user wrote says so: one adjustment, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hf_actswap import MemoryPlan, load_config, model_structure, resolve_plan
from hf_actswap.plan import Adjustment
from tests.engine.tiny_models import tiny, tiny_llama
from tests.plan.documents import (
    EXCLUDE_BEATS,
    FIRST_WINS,
    FULL_BEATS,
    MUL,
    NO_COMMUNICATION,
    NO_COUNTERPART,
    RULE_1,
    RULE_2,
    SILU,
    entry,
    op,
)

PlanOf = Callable[..., MemoryPlan]

SELECT, EXCLUDE = "recompute_config.select_recompute", "recompute_config.select_recompute_exclude"


def swap(recompute: dict[str, Any] | None = None, /, **keys: Any) -> dict[str, Any]:
    return {"swap_config": {"swap": True, **keys}, "recompute_config": recompute or {}}


def texts(plan: MemoryPlan) -> list[str]:
    return [str(adjustment) for adjustment in plan.adjustments]


# Rule 1: recompute beats swap.


def test_swap_of_a_part_gives_way_to_recompute_of_the_whole(plan_of: PlanOf) -> None:
    config = swap({"select_recompute": {"attention": [1]}}, op_swap=[op(r".*\.flash_attention", 4, True)])
    plan = plan_of(config)
    assert [plan.fate(layer, "self_attn.flash_attention") for layer in (0, 1)] == ["swap", "recompute"]
    assert plan.adjustments == (
        Adjustment(SELECT, (1,), "self_attn.flash_attention", "swap", "recompute", RULE_1),
    )


def test_recompute_of_a_part_leaves_the_rest_swapped(plan_of: PlanOf) -> None:
    plan = plan_of(swap({"select_recompute": {SILU: [0]}}, op_swap=[op(r"feed_forward\.w1", 4, [0])]))
    assert plan.fate(0, "mlp.act_fn.silu") == "recompute"
    # What silu reads is gate_proj's output: rule 2 keeps it, and says so.
    assert plan.fate(0, "mlp.gate_proj.linear") == "keep"
    assert plan.fate(0, "mlp.act_fn") == "swap"
    assert texts(plan) == [
        f"{SELECT} mlp.act_fn.silu, layers 0: asked swap, got recompute: {RULE_1}",
        f"swap_config mlp.gate_proj.linear, layers 0: asked swap, got keep: {RULE_2}",
    ]


def test_full_recompute_names_every_swap_that_it_beats(plan_of: PlanOf) -> None:
    config = swap({"recompute": [2]}, op_swap=[op(["add", r".*\.flash_attention", MUL], 4, [2])])
    plan = plan_of(config)
    assert texts(plan) == [
        "recompute_config.recompute self_attn.flash_attention, add, mlp.mul, layers 2: "
        f"asked swap, got recompute: {RULE_1}"
    ]
    assert plan.fate(2, "output") == "keep"


# Rule 2: what a recomputed op reads stays on the device.


def test_inside_a_layer(plan_of: PlanOf) -> None:
    plan = plan_of(swap({"select_recompute": {"feed_forward": [1]}}, op_swap=[op("ffn_norm", 4, [0, 1])]))
    norm = "post_attention_layernorm"
    # The norm's last product feeds the MLP; what the norm saves of its own is not read there.
    assert [plan.fate(1, f"{norm}.mul", ordinal) for ordinal in (0, 1)] == ["swap", "keep"]
    assert [plan.fate(0, f"{norm}.mul", ordinal) for ordinal in (0, 1)] == ["swap", "swap"]
    assert plan.fate(1, f"{norm}.rsqrt") == "swap"
    assert plan.adjustments == (Adjustment("swap_config", (1,), f"{norm}.mul", "swap", "keep", RULE_2),)


def test_across_layers(plan_of: PlanOf) -> None:
    plan = plan_of(swap({"recompute": [2]}, layer_swap=[entry(4, [0, 1])]))
    assert [plan.fate(layer, "output") for layer in range(4)] == ["swap", "keep", "keep", "keep"]
    assert plan.fate(1, "mlp.down_proj") == "swap"
    assert plan.adjustments == (Adjustment("swap_config", (1,), "output", "swap", "keep", RULE_2),)


def test_across_layers_for_the_op_that_hands_on(plan_of: PlanOf) -> None:
    """A swapped residual sum produces the layer's output: it counts too; a swapped MLP does not."""
    plan = plan_of(swap({"recompute": [2]}, op_swap=[op("add", 4, [1])]))
    assert (plan.fate(1, "output"), plan.fate(1, "add", 0)) == ("keep", "swap")
    assert plan.adjustments == (Adjustment("swap_config", (1,), "output", "swap", "keep", RULE_2),)
    plan = plan_of(swap({"recompute": [2]}, op_swap=[op("feed_forward", 4, [1])]))
    assert plan.fate(1, "mlp.down_proj.linear") == "swap"
    assert plan.adjustments == ()


def test_across_layers_for_a_recomputed_first_op(plan_of: PlanOf) -> None:
    plan = plan_of(swap({"select_recompute": {"attention_norm": [2]}}, layer_swap=[entry(4, [1])]))
    assert plan.fate(1, "output") == "keep"


def test_between_functions(plan_of: PlanOf) -> None:
    plan = plan_of(swap({"select_recompute": {MUL: [1]}}, op_swap=[op("mlp.up_proj", 4, [1])]))
    assert plan.fate(1, "mlp.mul") == "recompute"
    assert plan.fate(1, "mlp.up_proj.linear") == plan.fate(1, "mlp.up_proj.linear", 0) == "keep"
    assert texts(plan) == [f"swap_config mlp.up_proj.linear, layers 1: asked swap, got keep: {RULE_2}"]


def test_a_recomputed_chain_reads_only_its_ends(plan_of: PlanOf) -> None:
    """silu and mul are both recomputed: mul's input is silu's, which is rebuilt, not kept."""
    config = swap({"select_recompute": True}, op_swap=[op(r"mlp\.(gate|up|down)_proj", 4, [1])])
    plan = plan_of(config)
    fates = {path: plan.fate(1, f"mlp.{path}_proj.linear") for path in ("gate", "up", "down")}
    assert fates == {"gate": "keep", "up": "keep", "down": "swap"}


# Full beats selective; exclude beats all.


def test_full_beats_selective(plan_of: PlanOf) -> None:
    plan = plan_of(swap({"recompute": [1], "select_recompute": {MUL: [1, 2]}}, op_swap=[]))
    assert (plan.fate(1), plan.fate(2), plan.fate(2, "mlp.mul")) == ("recompute", "keep", "recompute")
    assert plan.adjustments == (
        Adjustment(SELECT, (1,), MUL, "selective recompute", "full recompute", FULL_BEATS),
    )


@pytest.mark.parametrize("is_on", [False, True])
def test_exclude_inside_a_fully_recomputed_layer(is_on: bool, plan_of: PlanOf) -> None:
    """With swap on, the reference does not apply exclude keys to layers; ours means what is written."""
    recompute = {"recompute": [1], "select_recompute_exclude": {"attention": [1] if is_on else [2]}}
    plan = plan_of({"swap_config": {"swap": is_on}, "recompute_config": recompute})
    layers = [1] if is_on else [0]  # without swap, numbers count the first layers of a stage
    assert [layer for layer in range(4) if plan.fate(layer, "mlp") == "recompute"] == layers
    assert [layer for layer in range(4) if plan.fate(layer, "self_attn") == "recompute"] == []
    assert (
        Adjustment(EXCLUDE, tuple(layers), "attention", "recompute", "keep", EXCLUDE_BEATS)
        in plan.adjustments
    )


def test_exclude_drops_an_equal_pattern_for_all_layers(plan_of: PlanOf) -> None:
    select = {MUL: True, SILU: True, "attention": True}
    exclude = {r"feed_forward\..*": [1]}
    plan = plan_of({"recompute_config": {"select_recompute": select, "select_recompute_exclude": exclude}})
    assert {plan.fate(layer, "mlp.mul") for layer in range(4)} == {"keep"}
    assert {plan.fate(layer, "self_attn") for layer in range(4)} == {"recompute"}
    # silu stands one level deeper than the pattern: it is excluded only where the pattern applies.
    assert [plan.fate(layer, "mlp.act_fn.silu") for layer in range(4)] == ["keep", *["recompute"] * 3]
    named = r"select_recompute_exclude names 'feed_forward\\..*', and a pattern is dropped whole"
    assert plan.adjustments[0] == Adjustment(
        SELECT, (0, 1, 2, 3), MUL, "recompute", "keep", f"{EXCLUDE_BEATS}; {named}"
    )
    assert all(MUL not in line and "feed_forward.mul" not in line for line in plan.log_lines()[3:])


def test_exclude_that_finds_nothing(plan_of: PlanOf) -> None:
    plan = plan_of({"recompute_config": {"select_recompute_exclude": {MUL: True}}})
    assert texts(plan) == [
        f"{EXCLUDE} {MUL}: asked exclude, got no effect: nothing that it names is recomputed"
    ]


# Values.


def test_first_entry_wins_only_where_values_differ(plan_of: PlanOf) -> None:
    plan = plan_of(swap(layer_swap=[entry(1, [0, 1]), entry(1, [1]), entry(2, [1, 2])]))
    assert plan.adjustments == (
        Adjustment(
            "swap_config.layer_swap[2]",
            (1,),
            "",
            "backward_prefetch 2",
            "1",
            FIRST_WINS,
        ),
    )
    assert plan.rows[-1].windows.prefetch_ops == 2


def test_op_over_layer_is_order_and_no_adjustment(plan_of: PlanOf) -> None:
    plan = plan_of(swap(layer_swap=[entry(20, [1])], op_swap=[op("feed_forward", 5, [1])]))
    windows = {row.op_path: row.windows.prefetch_ops for row in plan.rows if row.windows}
    assert windows == {"": 20, "mlp": 5}
    assert plan.adjustments == ()


@pytest.mark.parametrize("written", ["auto", "Auto"])
def test_auto_prefetch(written: str, plan_of: PlanOf) -> None:
    plan = plan_of(swap(default_prefetch=written))
    """Left to measurement: no windows in the plan, and nothing said until they are known."""
    assert {(row.fate, row.windows) for row in plan.rows} == {("swap", None)}
    assert plan.log_lines()[-1] == "Set op_swap at layer 3: attention.flash_attention, value=Auto"
    assert plan.adjustments == ()


# Requested policies without effect.


def test_no_counterpart(plan_of: PlanOf) -> None:
    plan = plan_of(swap(op_swap=[op(r"feed_forward\.w2\.reshape", 4, [0, 3])]))
    assert plan.rows == ()
    assert texts(plan) == [
        r"swap_config.op_swap[0].op_name feed_forward\.w2\.reshape, layers 0, 3: "
        f"asked a fate, got no effect: {NO_COUNTERPART}"
    ]
    assert plan.log_lines()[-1] == "Set op_swap at layer 3: feed_forward.w2.reshape, value=4"


def test_communication_keys_on_one_rank(plan_of: PlanOf) -> None:
    recompute = {
        "select_comm_recompute": True,
        "select_comm_recompute_exclude": {MUL: True},
        "parallel_optimizer_comm_recompute": True,
        "mp_comm_recompute": False,
        "recompute_slice_activation": True,
    }
    plan = plan_of({"recompute_config": recompute, "parallel_config": {"sequence_parallel_enabled": True}})
    none = NO_COMMUNICATION
    assert plan.rows == ()
    assert texts(plan)[:6] == [
        f"recompute_config.select_comm_recompute: asked recompute communication, got no effect: {none}",
        f"recompute_config.select_comm_recompute_exclude: asked keep communication, got no effect: {none}",
        f"recompute_config.mp_comm_recompute: asked false, got no effect: {none}",
        f"recompute_config.recompute_slice_activation: asked slices, got no effect: {none}",
        "parallel_config.sequence_parallel_enabled: asked true, got no effect: "
        "sequence parallelism splits the tensor-parallel group, whose size is 1",
        "recompute_config.parallel_optimizer_comm_recompute: asked true, got no effect: "
        "weights are not gathered from an optimizer-sharding group here (FSDP2: reshard_after_forward)",
    ]
    assert len(plan.adjustments) == 6


@pytest.mark.parametrize("again", [None, True, False])
@pytest.mark.parametrize("by_itself", [True, False])
def test_weights_that_fsdp2_shards(again: bool | None, by_itself: bool) -> None:
    sharded = replace(model_structure(tiny_llama()), sharded=True, gathers_again=by_itself)
    written = {} if again is None else {"parallel_optimizer_comm_recompute": again}
    plan = resolve_plan(load_config({"recompute_config": written}), sharded)
    said = "recompute_config.parallel_optimizer_comm_recompute: asked false, got no effect: "
    reason = "FSDP2 gathers again as its own reshard_after_forward says; pass false to fully_shard"
    assert texts(plan) == ([said + reason] if again is False and by_itself else [])
    assert plan.gather_weights_again is (again is True)


def test_swap_off_with_rules(plan_of: PlanOf) -> None:
    rules = {"swap": False, "layer_swap": [entry(1, True)], "op_swap": [op("attention", 1, True)]}
    plan = plan_of({"swap_config": rules})
    assert plan.rows == ()
    assert texts(plan) == [
        f"swap_config.{key}: asked swap, got no effect: swap_config.swap is false"
        for key in ("layer_swap", "op_swap")
    ]


# The key of ours that lifts rule 2 for selective recomputation.


def rows_of(plan: MemoryPlan) -> set[object]:
    return {(row.scope, row.op_path, row.ordinal, row.fate, row.windows) for row in plan.rows}


def test_what_recomputed_ops_read_is_swapped_where_the_key_says_so(plan_of: PlanOf) -> None:
    select = {"select_recompute": {"feed_forward": True, "attention_norm": True}}
    swaps = {"layer_swap": [entry(4, True)]}
    norm = "post_attention_layernorm"
    read = [(1, "output", None), (1, f"{norm}.mul", 1), (2, "output", None), (2, f"{norm}.mul", 1)]
    default, everywhere, listed = (
        plan_of(swap(select, **swaps, **key))
        for key in ({}, {"select_recompute_input": True}, {"select_recompute_input": [2]})
    )
    assert [default.fate(*op) for op in read] == ["keep", "keep", "keep", "keep"]
    assert [everywhere.fate(*op) for op in read] == ["swap", "swap", "swap", "swap"]
    # The input of layer 2 is the output of layer 1.
    assert [listed.fate(*op) for op in read] == ["swap", "keep", "keep", "swap"]
    assert RULE_2 not in "".join(texts(everywhere))
    assert {row for row in rows_of(everywhere) if row not in rows_of(default)} == set()
    assert all(row[3] == "keep" for row in rows_of(default) - rows_of(everywhere))  # type: ignore[index]


def test_it_asks_for_no_swap_by_itself(plan_of: PlanOf) -> None:
    select = {"select_recompute": {"feed_forward": True}}
    plan = plan_of(swap(select, op_swap=[op("attention", 4, [0])], select_recompute_input=True))
    norm = "post_attention_layernorm"
    assert [plan.fate(layer, f"{norm}.mul", 1) for layer in (0, 1)] == ["keep", "keep"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            swap({"recompute": True}, op_swap=[], select_recompute_input=True),
            "swap_config.select_recompute_input: asked swapped as written, got no effect: no op is "
            "recomputed selectively",
        ),
        (
            swap({"select_recompute": {"feed_forward": [1]}}, op_swap=[], select_recompute_input=[0, 1]),
            "swap_config.select_recompute_input, layers 0: asked swapped as written, got no effect: none of "
            "its ops is recomputed selectively",
        ),
        (
            {"swap_config": {"swap": False, "select_recompute_input": True}},
            "swap_config.select_recompute_input: asked swap, got no effect: swap_config.swap is false",
        ),
    ],
    ids=["whole", "another layer", "swap off"],
)
def test_where_it_changes_nothing(config: dict[str, Any], expected: str, plan_of: PlanOf) -> None:
    assert expected in texts(plan_of(config))


def test_all_swap_is_not_lost_where_inputs_are_swapped(plan_of: PlanOf) -> None:
    """With neither list the default strategy holds, which recomputation beats; but the inputs move."""
    lost = "All layers and ops that are enabled swap do not work! Because recompute = True."
    assert plan_of(swap({"recompute": True})).warnings == (lost,)
    assert plan_of(swap({"recompute": True}, recompute_input=True)).warnings == ()
    assert plan_of(swap({"recompute": True}, recompute_input=False)).warnings == (lost,)


FUSED = "an op of a fused layer that this model does not have"


@pytest.mark.parametrize(
    ("family", "path", "targets", "said"),
    [
        ("Llama", r"attention\.w_qkv", (), FUSED),
        ("Llama", r"attention\.w_qkv\.reshape", (), FUSED),
        ("Llama", r"feed_forward\.w_gate_hidden\.reshape", (), FUSED),
        ("Llama", r"feed_forward\.activate\.silu", ("mlp.act_fn.silu",), ""),
        ("Phi3", r"attention\.w_qkv", ("self_attn.qkv_proj",), ""),
        ("Phi3", r"attention\.w_qkv\.matmul", ("self_attn.qkv_proj.linear",), ""),
        ("Phi3", r"feed_forward\.w_gate_hidden", ("mlp.gate_up_proj",), ""),
        ("Phi3", r"feed_forward\.w_gate_hidden\.reshape", (), NO_COUNTERPART),
    ],
)
def test_names_of_fused_layers(family: str, path: str, targets: tuple[str, ...], said: str) -> None:
    model = tiny(family, **({"pad_token_id": 0} if family == "Phi3" else {}))
    config = load_config({"profiler_level": 1, "recompute_config": {"select_recompute": {path: True}}})
    plan = resolve_plan(config, model_structure(model))
    assert {row.op_path for row in plan.rows} == set(targets)
    assert [item.reason for item in plan.adjustments] == ([said] if said else [])
