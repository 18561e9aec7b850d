"""Every model family: its structure, MindFormers' names on it, and the cases of the documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan, apply, load_config, model_structure, resolve_plan
from hf_actswap.plan import ModelStructure, PlanRow, Windows
from hf_actswap.plan.opnames import megatron_names
from hf_actswap.plan.rules import OF_FUSED_LAYER, LayerNames
from tests.plan.documents import NO_COUNTERPART
from tests.quick_cases import quick_first

PlanOf = Callable[..., MemoryPlan]
MakeStructure = Callable[..., ModelStructure]
MakeModel = Callable[..., nn.Module]
Gradients = Callable[[nn.Module], dict[str, torch.Tensor]]

FAMILY_NAMES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
]


LLAMA_TARGETS = {
    "attention": ("self_attn",),
    r"attention\.flash_attention": ("self_attn.flash_attention",),
    r"attention\.wq": ("self_attn.q_proj",),
    r"attention\.wk\.matmul": ("self_attn.k_proj.linear",),
    r"attention\.wo": ("self_attn.o_proj",),
    r"attention_norm\.norm": ("input_layernorm",),
    r"ffn_norm\.norm": ("post_attention_layernorm",),
    "feed_forward": ("mlp",),
    r"feed_forward\.mul": ("mlp.mul",),
    r"feed_forward\.w1": ("mlp.gate_proj", "mlp.act_fn"),
    r"feed_forward\.w1\.activation\.silu": ("mlp.act_fn.silu",),
    r"feed_forward\.w2\.matmul": ("mlp.down_proj.linear",),
    r"feed_forward\.w2\.reshape": (),
    r"feed_forward\.w3": ("mlp.up_proj",),
    r"self_attention\.core_attention\.flash_attention": ("self_attn.flash_attention",),
    r"self_attention\.linear_proj": ("self_attn.o_proj",),
    r"mlp\.linear_fc2": ("mlp.down_proj",),
    r"mlp\.activation_func\.silu": ("mlp.act_fn.silu",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    r"mlp\.down_proj\.matmul": ("mlp.down_proj.linear",),
    "self_attn.flash_attention": ("self_attn.flash_attention",),
    "add": ("add",),
}
GELU = {r"feed_forward\.w1\.activation\.silu": ("mlp.act_fn.gelu",)}
GEMMA_TARGETS = {
    **{name: LLAMA_TARGETS[name] for name in ("attention", r"attention\.wq", r"feed_forward\.mul")},
    **GELU,
    r"ffn_norm\.norm": ("pre_feedforward_layernorm",),
    "post_feedforward_layernorm": ("post_feedforward_layernorm",),
}
EXPERT_TARGETS = {
    r"attention\.wq": ("self_attn.q_proj",),
    r"feed_forward\.mul": ("mlp.experts.mul",),
    r"feed_forward\.w1\.activation\.silu": ("mlp.experts.act_fn.silu",),
    r"feed_forward\.router": ("mlp.gate",),
    r"feed_forward\.w2": (),
    r"mlp\.experts": ("mlp.experts",),
    r"mlp\.experts\.act_fn": ("mlp.experts.act_fn",),
}

# Family -> path as written -> ops of its last layer.
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA_TARGETS),
    "gemma2": GEMMA_TARGETS,
    "gemma3_text": GEMMA_TARGETS,
    "gpt_neox": {
        "attention": ("attention",),
        r"attention\.flash_attention": ("attention.flash_attention",),
        r"attention\.wk": ("attention.query_key_value",),
        r"attention\.wo\.matmul": ("attention.dense.linear",),
        r"attention_norm\.norm": ("input_layernorm",),
        r"feed_forward\.mul": (),
        r"feed_forward\.w1": ("mlp.dense_h_to_4h", "mlp.act"),
        r"feed_forward\.w1\.activation\.silu": ("mlp.act.gelu",),
        r"feed_forward\.w2": ("mlp.dense_4h_to_h",),
        r"feed_forward\.w3": (),
        "mlp.act.gelu": ("mlp.act.gelu",),
    },
    "phi3": {
        r"attention\.wv": ("self_attn.qkv_proj",),
        r"feed_forward\.w1": ("mlp.gate_up_proj", "mlp.activation_fn"),
        r"feed_forward\.w3": ("mlp.gate_up_proj",),
        r"feed_forward\.w1\.activation\.silu": ("mlp.activation_fn.silu",),
        r"feed_forward\.mul": ("mlp.mul",),
    },
    "mixtral": EXPERT_TARGETS,
    "qwen3_moe": EXPERT_TARGETS,
    "deepseek_v3": {
        r"attention\.wq": ("self_attn.q_b_proj",),
        r"attention\.flash_attention": ("self_attn.flash_attention",),
        r"feed_forward\.mul": ("mlp.experts.mul", "mlp.shared_experts.mul"),
        r"feed_forward\.w1\.activation\.silu": ("mlp.experts.act_fn.silu", "mlp.shared_experts.act_fn.silu"),
        r"mlp\.shared_experts\.down_proj": ("mlp.shared_experts.down_proj",),
    },
}


def swapped(path: str, layers: object = True, prefetch: object = 5) -> dict[str, Any]:
    rule = {"op_name": path, "backward_prefetch": prefetch, "layers": layers}
    return {"swap_config": {"swap": True, "op_swap": [rule]}}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_structure(family: str, tiny_structure: MakeStructure) -> None:
    found = tiny_structure(family)
    base = "gpt_neox" if family == "gpt_neox" else "model"
    assert (found.family, found.functions_known, found.why_not) == (family, True, "")
    assert [layer.module_path for layer in found.layers] == [f"{base}.layers.0", f"{base}.layers.1"]
    names = ("embed_in", "final_layer_norm") if family == "gpt_neox" else ("embed_tokens", "norm")
    assert (found.embedding, found.final_norm) == tuple(f"{base}.{name}" for name in names)
    heads = ("lm_head", "embed_out") if family == "gpt_neox" else ("lm_head",)  # its name up to 5.6
    assert found.head in heads
    for layer in found.layers:
        assert layer.output_of == ("add", 1)
        assert layer.attention_paths == {"attention" if family == "gpt_neox" else "self_attn"}
        paths = [op.path for op in layer.ops]
        assert len(paths) == len(set(paths))
        assert {call.key[0] for call in layer.calls} <= set(paths)
        earlier = {("input", 0)}
        for call in layer.calls:  # what a call reads was produced before it
            assert earlier.issuperset(call.inputs)
            earlier.add(call.key)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_targets(family: str, tiny_structure: MakeStructure) -> None:
    names = LayerNames(tiny_structure(family).layers[-1])
    found = {path: tuple(t for m in names.match(path) for t in m.targets) for path in TARGETS[family]}
    assert found == TARGETS[family]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_name_of_the_family_is_an_op_or_has_no_counterpart(
    family: str, plan_of: PlanOf, tiny_structure: MakeStructure
) -> None:
    reference = LayerNames(tiny_structure(family).layers[-1]).reference
    for name in {**megatron_names(reference), **reference}:
        plan = plan_of(swapped(name.replace(".", r"\.")), family, 2)
        without = {layer for item in plan.adjustments for layer in item.layers}
        assert {item.reason for item in plan.adjustments} <= {NO_COUNTERPART, OF_FUSED_LAYER}, name
        with_rows = {row.scope for row in plan.rows}
        assert with_rows | without == {0, 1}, name
        assert with_rows & without == set(), name


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_default_swap(family: str, plan_of: PlanOf) -> None:
    plan = plan_of({"swap_config": {"swap": True, "default_prefetch": 10}}, family, 2)
    attention = "attention" if family == "gpt_neox" else "self_attn"
    rows = [(row.scope, row.op_path, row.fate) for row in plan.rows]
    assert rows == [(layer, f"{attention}.flash_attention", "swap") for layer in (0, 1)]
    assert plan.log_lines()[-1] == "Set op_swap at layer 1: attention.flash_attention, value=10"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_cases_2_to_4(family: str, plan_of: PlanOf) -> None:
    layer_swap = {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": [0]}]}
    plan = plan_of({"swap_config": layer_swap}, family, 2)
    assert [(row.scope, row.op_path, row.fate) for row in plan.rows] == [(0, "", "swap")]
    rules = [
        {"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1]},
        {"op_name": "feed_forward", "backward_prefetch": 15, "layers": [1]},
    ]
    case_3 = {"swap_config": {"swap": True, "op_swap": rules}}
    attention = "attention" if family == "gpt_neox" else "self_attn"
    plan = plan_of(case_3, family, 2)
    assert [(row.scope, row.op_path) for row in plan.rows] == [(0, attention), (1, attention), (1, "mlp")]
    plan = plan_of({**case_3, "recompute_config": {"select_recompute": {"feed_forward": [0]}}}, family, 2)
    assert [(row.scope, row.op_path, row.fate) for row in plan.rows] == [
        (0, attention, "swap"),
        (0, "mlp", "recompute"),
        (1, attention, "swap"),
        (1, "mlp", "swap"),
    ]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_select_true(family: str, plan_of: PlanOf) -> None:
    plan = plan_of({"recompute_config": {"select_recompute": True}}, family, 2)
    expected = {
        t
        for path in (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
        for t in TARGETS[family][path]
    }
    assert {row.op_path for row in plan.rows if row.scope == 1} == expected
    assert {row.fate for row in plan.rows} == {"recompute"}
    without = [item.op_path for item in plan.adjustments if item.reason == NO_COUNTERPART]
    assert without == ([r"feed_forward\.mul"] if family == "gpt_neox" else [])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_path_of_a_layer_can_be_written(
    family: str, plan_of: PlanOf, tiny_structure: MakeStructure
) -> None:
    """With plain dots and as the reference writes it, each Hugging Face path names exactly its op."""
    layer = tiny_structure(family).layers[1]
    reference_names = set(LayerNames(layer).reference)
    for op in layer.ops:
        if op.path in reference_names:
            continue  # MindFormers' meaning comes first; checked by name in TARGETS
        for written in (op.path, op.path.replace(".", r"\.")):
            plan = plan_of(swapped(written, [1]), family, 2)
            assert plan.fate(1, op.path) == "swap", written
            assert plan.fate(0, op.path) == "keep", written
            # What is swapped is below the path; a plain op of one level keeps the reference's leading dot.
            assert all(row.op_path in (op.path, "output") for row in plan.rows), written


def test_a_list_stands_for_the_modules_in_it(plan_of: PlanOf) -> None:
    """A list is never called: recomputed as one, it would do nothing, and nothing would say so."""
    plan = plan_of({"recompute_config": {"select_recompute": {"mlps": True}}}, "longcat_flash", 2)
    assert [row.op_path for row in plan.rows if row.scope == 1] == ["mlps.0", "mlps.1"]
    norms = plan_of(swapped(r"attention_norm"), "longcat_flash", 2)
    assert [row.op_path for row in norms.rows if row.scope == 1] == ["input_layernorm.0", "input_layernorm.1"]


@pytest.mark.parametrize(
    ("path", "ops"),
    [
        (r".*\.flash_attention", ["self_attn.flash_attention"]),
        (r"self_attn\.[qkv]_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("self_attn.[qkv]_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("mlp.(gate|up)_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        (".*layernorm", ["input_layernorm", "post_attention_layernorm"]),
        (r".*\.mul", ["mlp.mul"]),  # MindFormers' names come first, and there only feed_forward has a mul
        (r"self_attn\.(q|k)_proj\.matmul", ["self_attn.q_proj.linear", "self_attn.k_proj.linear"]),
    ],
)
def test_regular_expressions_level_by_level(path: str, ops: list[str], plan_of: PlanOf) -> None:
    plan = plan_of(swapped(path, [1]), "llama", 2)
    assert [row.op_path for row in plan.rows] == ops


def test_dense_and_expert_layers_side_by_side(plan_of: PlanOf) -> None:
    """Targets that a layer does not have are passed over for that layer alone."""
    plan = plan_of({"recompute_config": {"select_recompute": {r"feed_forward\.mul": True}}}, "deepseek_v3", 3)
    assert [(row.scope, row.op_path) for row in plan.rows] == [
        (0, "mlp.mul"),
        *((layer, path) for layer in (1, 2) for path in ("mlp.experts.mul", "mlp.shared_experts.mul")),
    ]
    plan = plan_of(swapped("mlp.experts"), "deepseek_v3", 3)
    assert [(row.scope, row.op_path) for row in plan.rows] == [(1, "mlp.experts"), (2, "mlp.experts")]
    plan = plan_of(swapped(r"feed_forward\.w2"), "deepseek_v3", 3)
    assert [(row.scope, row.op_path) for row in plan.rows] == [
        (0, "mlp.down_proj"),
        *((layer, "mlp.shared_experts.down_proj") for layer in (1, 2)),
    ]
    plan = plan_of(swapped(r"feed_forward\.router"), "deepseek_v3", 3)
    assert [(row.scope, row.op_path) for row in plan.rows] == [(1, "mlp.gate"), (2, "mlp.gate")]


CORES = {
    **dict.fromkeys(("opt", "phi", "starcoder2", "gpt_oss", "olmoe", "qwen2_moe"), ("self_attn",)),
    "bart": ("self_attn", "encoder_attn"),
    "bert": ("attention.self",),
    "electra": ("attention.self",),
    "gpt2": ("attn",),
    "bloom": ("self_attention",),
    "longcat_flash": ("self_attn.0", "self_attn.1"),
    "qwen3_next": ("self_attn",),
}
FEED_FORWARDS = {
    **dict.fromkeys(("phi", "starcoder2", "gpt_oss", "olmoe", "qwen2_moe"), ("mlp",)),
    **dict.fromkeys(("gpt2", "bloom", "qwen3_next"), ("mlp",)),
    "longcat_flash": ("mlp", "mlps.0", "mlps.1"),
    "opt": ("fc1.linear", "activation_fn.relu", "fc2.linear"),
    "bart": ("fc1.linear", "activation_fn.gelu", "fc2.linear"),
    "bert": ("intermediate.dense.linear", "intermediate.intermediate_act_fn.gelu", "output.dense.linear"),
    "electra": ("intermediate.dense.linear", "intermediate.intermediate_act_fn.gelu", "output.dense.linear"),
}
ALL_SIZES = {"memory": {"min_tensor_mib": 1e-6}}


@pytest.mark.parametrize("family", CORES)
def test_other_families_have_the_references_names(family: str, plan_of: PlanOf) -> None:
    swap = plan_of({"swap_config": {"swap": True}}, family, 2)
    assert [row.op_path for row in swap.rows if row.scope == 1] == [
        f"{path}.flash_attention" for path in CORES[family]
    ]
    without = [item.layers for item in swap.adjustments if item.reason == NO_COUNTERPART]
    # Until some release after 5.2 its linear attention reads values, and only its modules are known.
    known = not any("only module paths are known" in item.reason for item in swap.adjustments)
    assert without == ([(0,)] if family == "qwen3_next" and known else [])
    assert known or family == "qwen3_next"
    plan = plan_of({"recompute_config": {"select_recompute": {"feed_forward": True}}}, family, 2)
    assert tuple(row.op_path for row in plan.rows if row.scope == 1) == FEED_FORWARDS[family]


@pytest.mark.parametrize(
    "family",
    quick_first(
        dict.fromkeys(["opt", "gpt_oss", "bart", "bert", "gpt2", "qwen3_next", "longcat_flash", *CORES]), 7
    ),
)
def test_other_families_train_under_the_references_names(
    family: str, tiny_model: MakeModel, gradients: Gradients
) -> None:
    """The core moves, the feed-forward network runs again, the default ops too, or the plan says why not."""
    model = tiny_model(family)
    model.config.use_cache = False
    expected = gradients(model)
    for value in ("swap", True, {"feed_forward": True}):
        requested = {"recompute_config": {"select_recompute": value}}
        document = {"swap_config": {"swap": True}} if value == "swap" else requested
        with apply(model, {**ALL_SIZES, **document}) as applied:
            for _ in range(3):
                found = gradients(model)
                assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
            stats, adjustments = applied.stats(), applied.plan.adjustments
        said = any(item.op_path.startswith(("feed_forward", "activation_fn")) for item in adjustments)
        assert (
            stats.offloaded_bytes > 0 if value == "swap" else stats.recomputes > 0 or (value is True and said)
        )


def test_the_hidden_state_is_not_berts_module_of_that_name(
    tiny_model: MakeModel, gradients: Gradients, plan_of: PlanOf
) -> None:
    """A row of ``output`` moves the hidden state and leaves what is in the module ``output`` where it is."""
    model = tiny_model("bert")
    expected = gradients(model)
    plan = MemoryPlan((PlanRow(0, "output", "swap", windows=Windows.of_prefetch(5)),), 2, min_tensor_bytes=0)
    assert plan.fate(0, "output.dense") == "keep"
    with apply(model, plan) as applied:
        found = gradients(model)
        assert applied.stats().offloaded_bytes == 2 * 24 * 16 * 4  # batch, sequence, hidden, bytes
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    document = {"recompute_config": {"select_recompute": {"output.dense": True}}}
    assert [row.op_path for row in plan_of(document, "bert", 2).rows] == ["output.dense"] * 2


def test_what_is_not_known_is_the_reason_where_the_model_cannot_be_recorded(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("opt").to("meta")  # where no small forward on the device can record instead
    monkeypatch.setattr(type(model.model.decoder.layers[0]), "forward", _data_dependent)
    shape = model_structure(model)
    document = {"recompute_config": {"select_recompute": {r"feed_forward\.w1\.activation\.silu": True}}}
    (adjustment,) = resolve_plan(load_config(document), shape).adjustments
    assert adjustment.got == "no effect"
    assert adjustment.reason == f"only module paths are known of this model ({shape.why_not})"


def test_a_model_that_may_drop_layers_at_random_is_recorded(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As encoders and decoders of transformers up to 5.17 do (``layerdrop``)."""
    model = tiny_model("opt")
    layer = type(model.model.decoder.layers[0])
    forward = layer.forward

    def dropping(self: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden if torch.rand([]) < 0.0 else forward(self, hidden, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", dropping)
    assert model_structure(model).functions_known


def _data_dependent(_self: nn.Module, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden if hidden.sum().item() > 0 else -hidden
