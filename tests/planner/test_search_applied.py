"""Plans that the search finds, put on models: what was predicted moves, and gradients are equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_actswap import MemoryPlan, apply
from hf_actswap.planner import Limits, find_plan, predict
from hf_actswap.planner.search.find_plan import least_peak_bytes
from tests.engine.tiny_models import gradients
from tests.planner.recorded_steps import MODELS, call_of, recorded, step
from tests.quick_cases import quick_first

from .search_profiles import link_of


@pytest.mark.parametrize("gb_per_s", [None, 2e-3, 1e3], ids=["no link", "2 kB per ms", "fast link"])
@pytest.mark.parametrize("name", quick_first(["llama", "neox", "qwen3"], 1))
def test_engine_does_what_the_plan_says(name: str, gb_per_s: float | None) -> None:
    model = MODELS[name]()
    profile, _ = recorded(model)
    link = None if gb_per_s is None else replace(link_of(gb_per_s), latency_ms=0.0)
    profile = replace(profile, link=link)
    nothing = MemoryPlan((), profile.num_layers, min_tensor_bytes=0)
    least = least_peak_bytes(profile, nothing, Limits(0, min_tensor_bytes=0))
    most = predict(profile, nothing).peak_bytes
    model.zero_grad()
    step(model, call_of())
    expected = gradients(model)
    fates = set()
    for share in (0.0, 0.4, 0.8):
        budget = int(least + share * (most - least))
        found = find_plan(profile, nothing, Limits(budget, min_tensor_bytes=0))
        fates |= {row.fate for row in found.plan.rows}
        applied = apply(model, found.plan)
        model.zero_grad()
        step(model, call_of())
        actual = gradients(model)
        assert [path for path in expected if not torch.equal(actual[path], expected[path])] == []
        assert applied.stats().offloaded_bytes == found.prediction.swapped_bytes
        assert applied.plan.rows == found.plan.rows
        applied.remove()
    assert fates & {"swap", "recompute"}
    assert ("swap" in fates) == (link is not None)
