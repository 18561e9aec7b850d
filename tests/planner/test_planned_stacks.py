"""Plans for models with several stacks: an encoder and a vision tower have fates like the decoder."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan, apply, model_structure
from hf_actswap.plan.model_structure import OUTPUT
from hf_actswap.plan.wrappers import is_checkpointed
from hf_actswap.planner import (
    Limits,
    Profile,
    find_plan,
    profile_from_json,
    profile_from_shapes,
    profile_to_json,
)
from hf_actswap.planner.cost.simulate import Simulator
from hf_actswap.planner.search.find_plan import least_peak_bytes
from tests.plan.stacked_models import MODELS, STACKS, assert_equal, batch_of, step, tiny, without_cache


def profile_of(model: nn.Module, name: str) -> Profile:
    return profile_from_shapes(model, model_structure(model), batch_of(name), "RTX 4090")


@pytest.mark.parametrize("name", MODELS)
def test_all_stacks_have_fates_and_gradients_stay(name: str) -> None:
    model = without_cache(tiny(name))
    profile = profile_of(model, name)
    _, other, layers = STACKS[name]
    assert profile.layers == (*(f"{other}.{number}" for number in range(layers)), 0, 1)
    nothing = MemoryPlan((), profile.num_layers, profile.family)
    most_bytes = Simulator(profile).predict(nothing).peak_bytes
    least_bytes = least_peak_bytes(profile, nothing, Limits(most_bytes, min_tensor_bytes=0))
    assert least_bytes < most_bytes
    limits = Limits(least_bytes + (most_bytes - least_bytes) // 20, min_tensor_bytes=0)
    found = find_plan(profile, nothing, limits)
    assert found.prediction.peak_bytes <= limits.device_bytes
    assert {str(row.scope).rpartition(".")[0] for row in found.plan.rows} >= {other, ""}
    expected = step(model, name)
    with apply(model, MemoryPlan.from_json(found.plan.to_json())) as applied:
        assert_equal(step(model, name), expected)
    stats = applied.stats()
    assert stats.recomputes + stats.offloads > 0


def test_a_tower_without_images_has_no_fates() -> None:
    model = tiny("gemma3")
    text = {name: values for name, values in batch_of("gemma3").items() if name != "pixel_values"}
    text["input_ids"] = text["input_ids"].clamp(max=40)
    profile = profile_from_shapes(model, model_structure(model), text, "RTX 4090")
    assert profile.layers == (0, 1)


def test_a_profile_is_read_back_with_all_its_layers() -> None:
    profile = profile_of(without_cache(tiny("t5")), "t5")
    assert profile_from_json(profile_to_json(profile)) == profile
    document = json.loads(profile_to_json(profile))
    stacks = [scope for scope, _ in document["modules_of_stacks"]]
    assert stacks == [f"encoder.block.{number}" for number in range(3)]


def test_a_training_is_planned_in_all_stacks() -> None:
    """Checkpointing, which was on in both, is off meanwhile: the planner decides about all layers."""
    model = without_cache(tiny("t5"))
    profile = profile_of(model, "t5")
    kept_bytes = Simulator(profile).predict(MemoryPlan((), 2, "t5")).peak_bytes
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = [path for path, module in model.named_modules() if is_checkpointed(module)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = {"mode": "adaptive", "budget_gib": 0.9 * kept_bytes / 2**30, "min_tensor_mib": 1e-6}
    with apply(model, {"memory": budget}, optimizer=optimizer) as planner:
        assert not any(map(is_checkpointed, model.modules()))
        for _ in range(8):
            model(**batch_of("t5")).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert any(str(row.scope).startswith("encoder.block.") for row in planner.plan.rows)
    assert [path for path, module in model.named_modules() if is_checkpointed(module)] == before


def test_what_an_encoder_hands_on_may_move_although_all_layers_read_it() -> None:
    """BART has no norm behind its encoder's last layer."""
    model = without_cache(tiny("bart"))
    profile = profile_of(model, "bart")
    nothing = MemoryPlan((), profile.num_layers, profile.family)
    least_bytes = least_peak_bytes(profile, nothing, Limits(2**40, min_tensor_bytes=0))
    plan = find_plan(profile, nothing, Limits(least_bytes, min_tensor_bytes=0)).plan
    handed_on = [
        row.fate for row in plan.rows if row.scope == "model.encoder.layers.2" and row.op_path == OUTPUT
    ]
    assert handed_on == ["swap"]
    expected = step(model, "bart")
    with apply(model, plan):
        assert_equal(step(model, "bart"), expected)


def test_compiled_stacks_are_left_alone() -> None:
    model = tiny("gemma3")
    structure = model_structure(model)
    assert structure.planned_in(model) == structure
    for layer in structure.stacks[0].layers:
        model.get_submodule(layer.module_path).compile(backend="eager")
    structure = model_structure(model)
    assert structure.stacks
    assert structure.planned_in(model) == replace(structure, stacks=())
