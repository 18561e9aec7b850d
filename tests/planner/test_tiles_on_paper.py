"""Predicted steps in tiles, held against storages that are counted in real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_actswap import apply, load_config, model_structure, resolve_plan
from hf_actswap.plan import MemoryPlan
from hf_actswap.planner import predict, profile_from_shapes
from tests.engine.tiny_models import tiny_llama
from tests.planner.recorded_steps import (
    assert_events_partition,
    call_of,
    counting_meter,
    measured_peak_bytes,
    recorded,
    step,
    tiled,
)
from tests.quick_cases import quick_first

LAYERS, TOKENS = 2, 1024
LOSS: dict[str, Any] = {"loss": {"tokens": 128}}
MLP: dict[str, Any] = {"tile": [{"op_name": "feed_forward", "tokens": 128}]}
NORMS = {"tile": [{"op_name": name, "tokens": 128} for name in ("feed_forward", "input_layernorm")]}
TILES: dict[str, dict[str, Any]] = {
    "none": {},
    "loss": LOSS,
    "mlp": MLP,
    "loss and mlp": LOSS | MLP,
    "loss, mlp and a norm": LOSS | NORMS,
}


def made() -> LlamaForCausalLM:
    """A Llama in the proportions of Llama-3-8B, of fewer words."""
    sizes = {"hidden_size": 64, "intermediate_size": 224, "num_key_value_heads": 1, "vocab_size": 800}
    return tiny_llama(num_hidden_layers=LAYERS, **sizes)


def planned(model: Any, tiles: dict[str, Any], recompute: bool = False) -> MemoryPlan:
    document = {"tile_config": tiles, "recompute_config": {"recompute": recompute}}
    return resolve_plan(load_config(document), model_structure(model))


def counted_peak_bytes(model: Any, plan: MemoryPlan, call: dict[str, Any]) -> int:
    with apply(model, plan):
        step(model, call)  # the first step under a plan looks at shapes beforehand
        model.zero_grad()
        with counting_meter(model, call) as meter:
            step(model, call)
    model.zero_grad()
    return meter.peak_bytes()


@pytest.mark.parametrize("tiles", quick_first(reversed(TILES), 3))
def test_predicted_peak_is_the_counted_one(tiles: str) -> None:
    model = made()
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    plans = [planned(model, TILES[tiles], recompute) for recompute in (False, True)]
    with tiled(model, plans[0]):
        profile = profile_from_shapes(model, model_structure(model), call, "H200")
    for plan in plans:
        counted = counted_peak_bytes(model, plan, call)
        assert predict(profile, plan).peak_bytes == pytest.approx(counted, rel=0.02)


def test_a_module_in_tiles_is_one_op_and_saves_its_input() -> None:
    """In 128 tiles as in 8: what runs in a tile is not told apart, and nothing of it is saved."""
    model = made()
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    found = []
    for tokens in (128, 8):
        with tiled(model, planned(model, {"tile": [{"op_name": "feed_forward", "tokens": tokens}]})):
            found.append(profile_from_shapes(model, model_structure(model), call, "H200"))
    eight, many = (
        [[replace(use, version=0) for use in storage.uses] for storage in profile.saved.storages]
        for profile in found
    )
    assert eight == many
    for profile in found:
        assert_events_partition(profile)
        paths = [one.call[1] for one in profile.op_events if one.call[0] == 1]
        assert [path for path in paths if path.startswith("mlp")] == ["mlp"]
        (event,) = (one for one in profile.op_events if one.call[:2] == (1, "mlp"))
        saved = [
            use.producer[1]
            for storage in profile.saved.storages
            for use in storage.uses
            if use.kind == "saved" and event.first_order <= use.order <= event.last_order
        ]
        assert saved == ["post_attention_layernorm.mul"]


@pytest.mark.parametrize("tiles", ["loss", "mlp", "loss, mlp and a norm"])
def test_a_step_in_tiles_is_the_same_on_paper_and_recorded(tiles: str) -> None:
    model = tiny_llama(num_hidden_layers=LAYERS)
    few: dict[str, Any] = {"loss": 4} if "loss" in TILES[tiles] else {}
    few |= {"tile": [rule | {"tokens": 8} for rule in TILES[tiles].get("tile", [])]}
    with tiled(model, planned(model, few)):
        measured, _ = recorded(model)
        model.zero_grad()
        forecast = profile_from_shapes(model, model_structure(model), call_of(), "H200")
    assert_events_partition(forecast)
    assert forecast.saved == measured.saved
    assert measured_peak_bytes(forecast) == measured_peak_bytes(measured)
    orders = [[op_event.backward_place for op_event in profile.op_events] for profile in (forecast, measured)]
    assert orders[0] == orders[1]
    assert any(op_event.backward_place >= 0 and op_event.call[0] == 0 for op_event in measured.op_events)
