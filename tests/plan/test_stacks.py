"""Models with several stacks of layers: whose layers a rule means, and what each stack is told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hf_actswap import ConfigError, MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from hf_actswap.plan import PlanRow, Windows
from hf_actswap.releases import is_since
from hf_actswap.report.console import plan_table
from tests.plan.stacked_models import (
    MODELS,
    STACKS,
    TOWER,
    assert_equal,
    shape_of,
    step,
    tiny,
    without_cache,
)
from tests.quick_cases import quick_first

SWAP_LAYERS = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": True}]}}
SELECT = {"recompute_config": {"select_recompute": {"attention": True, "feed_forward": True}}}
INPUTS = {
    "recompute_config": {"recompute": True},
    "swap_config": {"swap": True, "op_swap": [], "recompute_input": True},
}
DEFAULT = {"swap_config": {"swap": True}}
ALL_SIZES = {"memory": {"min_tensor_mib": 1e-6}}


@pytest.mark.parametrize("name", MODELS)
def test_rules_are_for_the_decoder(name: str) -> None:
    """However much deeper another stack is: Gemma-3's vision tower got them once, and nothing moved."""
    shape = shape_of(name)
    decoder, other, layers = STACKS[name]
    assert (shape.path, len(shape.layers)) == (decoder, 2)
    assert [(stack.path, len(stack.layers)) for stack in shape.stacks] == [(other, layers)]
    assert shape.functions_known
    if name != "gemma3" or is_since("transformers", "5.6"):  # before, only the tower's modules are known
        assert all(layer.calls for stack in (shape, *shape.stacks) for layer in stack.layers)
    plan = resolve_plan(load_config(DEFAULT), shape)
    assert {row.scope for row in plan.rows} == {0, 1}
    kept = f"Layers of {other} are kept: the document's rules are for the decoder, "
    assert plan.log_lines()[-1] == f"{kept}those for another stack stand under `stacks`."


@pytest.mark.parametrize("name", quick_first(["gemma3", "t5", "bart", "whisper"], 2))
def test_each_stack_trains_under_its_plan(name: str) -> None:
    model = without_cache(tiny(name))
    expected = step(model, name)
    other = STACKS[name][1]
    for rules, beside in ((DEFAULT, {}), (SWAP_LAYERS, DEFAULT), (SELECT, SELECT), (INPUTS, {})):
        with apply(model, {**ALL_SIZES, **beside, "stacks": {other: rules}}) as applied:
            for _ in range(3):  # the third goes by the cached traces
                assert_equal(step(model, name), expected)
            stats = applied.stats()
        assert stats.offloaded_bytes > 0 if rules is not SELECT else stats.recomputes > 0


def test_whole_layers_of_another_stack_are_run_again() -> None:
    model = without_cache(tiny("bart"))
    expected = step(model, "bart")
    calls: list[str] = []
    for path in ("model.encoder.layers.1.fc1", "model.decoder.layers.1.fc1"):
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: calls.append(path))
    with apply(model, {"stacks": {"encoder": {"recompute_config": {"recompute": [2]}}}}):
        assert_equal(step(model, "bart"), expected)
    assert sorted(calls) == ["model.decoder.layers.1.fc1", *["model.encoder.layers.1.fc1"] * 2]


@pytest.mark.parametrize("written", ["vision_tower", "vision_tower.layers", "encoder.layers", TOWER])
def test_a_stack_is_named_by_words_of_its_path(written: str) -> None:
    rules = {"swap_config": {"swap": True, "op_swap": [rule("attention", [0, 2])]}}
    document = {**SWAP_LAYERS, "stacks": {written: rules}}
    plan = resolve_plan(load_config(document), shape_of("gemma3"))
    windows = Windows.of_prefetch(5)
    assert plan.rows == (
        PlanRow(0, "", "swap", windows=windows),
        PlanRow(1, "", "swap", windows=windows),
        PlanRow(f"{TOWER}.0", "self_attn", "swap", windows=windows),
        PlanRow(f"{TOWER}.2", "self_attn", "swap", windows=windows),
    )
    assert plan.num_layers == 2
    assert plan.fate(f"{TOWER}.2", "self_attn.q_proj") == "swap"
    assert f"{TOWER}: Set op_swap at layer 2: .attention, value=5" in plan.log_lines()
    assert not any("are kept" in line for line in plan.log_lines())
    assert MemoryPlan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["rows"][2]["scope"] == f"{TOWER}.0"
    lines = plan_table(plan, 200).splitlines()
    assert any(f"{TOWER}.0, {TOWER}.2 " in line and " self_attn " in line for line in lines)


def rule(name: str, layers: object) -> dict[str, Any]:
    return {"op_name": name, "backward_prefetch": 5, "layers": layers}


def test_overrides_name_the_layers_of_the_stack() -> None:
    rules = {**SWAP_LAYERS, "recompute_config": {"recompute": [0, 1, 3]}}
    document = {**SWAP_LAYERS, "stacks": {"vision_tower": rules}}
    plan = resolve_plan(load_config(document), shape_of("gemma3"))
    lost = [item for item in plan.adjustments if item.got == "recompute"]
    assert [item.layers for item in lost] == [(f"{TOWER}.0", f"{TOWER}.1", f"{TOWER}.3")]
    where = "stacks.vision_tower.recompute_config.recompute"
    assert str(lost[0]).startswith(f"{where}, layers {TOWER}.0-1, {TOWER}.3: asked swap")


def test_the_input_of_the_first_layer_of_another_stack_stays_and_the_plan_says_so() -> None:
    plan = resolve_plan(load_config({"stacks": {"encoder": INPUTS}}), shape_of("bart"))
    assert not any(row.scope == "embedding" for row in plan.rows)
    said = [item for item in plan.adjustments if item.got == "no effect"]
    assert [(item.where, item.layers) for item in said] == [
        ("stacks.encoder.swap_config", ("model.encoder.layers.0",))
    ]


def test_a_saved_plan_serves_again_also_one_that_knows_no_stacks() -> None:
    model = tiny("gemma3")
    document = {**ALL_SIZES, **DEFAULT, "stacks": {"vision_tower": DEFAULT}}
    plan = resolve_plan(load_config(document), shape_of("gemma3"))
    moved = []
    for chosen in (plan, resolve_plan(load_config({**ALL_SIZES, **DEFAULT}), shape_of("gemma3"))):
        with apply(model, MemoryPlan.from_json(chosen.to_json())) as applied:
            step(model, "gemma3")
            moved.append(applied.stats().offloaded_bytes)
    assert moved[0] > moved[1] > 0
    strange = MemoryPlan((PlanRow("model.other.layers.0", "", "swap"),), 2)
    with pytest.raises(PlanError, match=r"expected a layer of this model, found model\.other\.layers\.0"):
        apply(model, strange)


def test_problems_with_names() -> None:
    wrong = {"swap_config": {"swap": True, "op_swap": [rule("attn_typo", True)]}}
    document = {
        "swap_config": {"swap": True, "op_swap": [rule("atten", True)]},
        "stacks": {
            "vision_tower": wrong,
            "language_model": DEFAULT,
            "audio": DEFAULT,
            TOWER: DEFAULT,
        },
    }
    with pytest.raises(PlanError) as caught:
        resolve_plan(load_config(document), shape_of("gemma3"))
    found = [str(problem) for problem in caught.value.problems]
    assert [line.partition(": ")[0] for line in found] == [
        "swap_config.op_swap[0].op_name",
        "stacks.vision_tower.swap_config.op_swap[0].op_name",
        "stacks.language_model",
        "stacks.audio",
        f"stacks.{TOWER}",
    ]
    one = f"expected one stack of layers beside the decoder's ({TOWER}), found"
    assert (
        f"{one} 'language_model'. The rules of model.language_model.layers stand outside of `stacks`."
        in found[2]
    )
    assert f"{one} 'audio'." in found[3]
    assert f"{one} {TOWER} again, as for 'vision_tower'." in found[4]


def test_problems_of_the_document() -> None:
    document = {
        "memory": {"mode": "adaptive"},
        "stacks": {
            "encoder": {
                "swap_config": {"swap": 3},
                "memory": {},
                "recompute_config": {"recompute": True, "parallel_optimizer_comm_recompute": True},
            },
            "decoder": 7,
        },
    }
    with pytest.raises(ConfigError) as caught:
        load_config(document)
    assert [str(problem) for problem in caught.value.problems] == [
        "memory.mode: expected no `stacks.encoder.recompute_config.recompute` beside adaptive, which chooses "
        "every fate itself, found both. Use smart_swap, which keeps what is written by hand.",
        "stacks.encoder.swap_config.swap: expected true or false, found 3.",
        "stacks.encoder.memory: expected a key of `stacks.encoder`, found an unknown key. "
        "Valid: swap_config, recompute_config.",
        "stacks.encoder.recompute_config.parallel_optimizer_comm_recompute: expected a key for one stack, "
        "found one for the model. "
        "Write it in the document's own recompute_config.",
        "stacks.decoder: expected a mapping, found 7.",
    ]
    config = load_config({"stacks": {"encoder": SWAP_LAYERS}})
    assert load_config(config.to_yaml()) == config
    assert config.to_dict() == {"stacks": {"encoder": SWAP_LAYERS}}


def test_a_tower_inside_compiled_code_is_rejected_and_only_it() -> None:
    model = tiny("gemma3")
    model.get_submodule("model.vision_tower").compile(backend="eager")
    assert not model_structure(model).compiled
    with pytest.raises(PlanError, match=rf"{re.escape(TOWER)}\.0-3 inside compiled code"):
        apply(model, {"stacks": {"vision_tower": SWAP_LAYERS}})
    with apply(model, {**ALL_SIZES, **SWAP_LAYERS}) as applied:
        step(model, "gemma3")
        assert applied.stats().offloaded_bytes > 0
