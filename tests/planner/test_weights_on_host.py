"""The planner beside frozen weights on the host: the same numbers, their bytes, and the link they leave."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap import apply
from hf_actswap.config import MemoryConfig
from hf_actswap.engine import AppliedPlan
from hf_actswap.engine.frozen_weights import sizes_on_host, step_bytes, weights_of
from hf_actswap.engine.host_budget import HostMemory
from hf_actswap.plan import MemoryPlan, model_structure
from hf_actswap.plan.actions import Scope
from hf_actswap.plan.model_structure import unwrapped
from hf_actswap.planner import BudgetError, Planner, profile_from_shapes
from hf_actswap.planner.cost.simulate import predict
from hf_actswap.planner.planning import agreed_task, best_plans, weights_pay
from hf_actswap.planner.profile import Prediction, Profile
from hf_actswap.planner.recorded_step import RecordedStep
from hf_actswap.planner.search.find_plan import least_peak_bytes
from tests.engine.tiny_models import tiny_llama
from tests.planner.simulated_device import Trained, train

GIB = 2**30
STEPS: dict[str, Any] = {"steps": 5, "shape": (2, 64)}


def lora() -> nn.Module:
    torch.manual_seed(1)
    settings: Any = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return get_peft_model(tiny_llama(), LoraConfig(**settings)).train()


@pytest.fixture(scope="module")
def unplanned() -> Trained:
    return train(lora, **STEPS)


@pytest.mark.parametrize("mode", [pytest.param("adaptive", marks=pytest.mark.slow), "smart_swap"])
def test_numbers_budget_and_bytes(mode: str, unplanned: Trained) -> None:
    budget = int(0.6 * unplanned.peak_bytes)
    found = train(lora, {"mode": mode, "weights": "host", "budget_gib": budget / GIB}, **STEPS)
    assert found.losses == unplanned.losses
    assert all(torch.equal(found.weights[name], one) for name, one in unplanned.weights.items())
    planner = found.planner
    assert isinstance(planner, Planner)
    weights = planner.weights
    assert weights is not None
    own_bytes = sum(one.tensor.nbytes for layer in weights.layers for one in layer.held)
    # Without a plan the device has the window in the place of all layers; the host is not counted.
    assert found.peaks[1] == unplanned.peak_bytes - own_bytes + weights.window_bytes
    for trial in planner.trials:
        assert trial.prediction.peak_bytes == pytest.approx(trial.reserved_peak_bytes, rel=0.01)
    assert found.stable_peaks()
    assert max(found.stable_peaks()) <= budget
    assert planner.trials[0].plan.weights == "host"
    first = sum(layer.size_bytes for layer in weights.layers[:2])  # nothing is there at the first forward
    assert planner.stats().prefetched_bytes == STEPS["steps"] * weights.step_bytes + first


def test_all_plans_have_what_the_weights_leave_of_the_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HostMemory] = []

    def noted(*given: Any) -> HostMemory:
        made.append(HostMemory(*given))
        return made[-1]

    monkeypatch.setattr(sys.modules["hf_actswap.apply"], "HostMemory", noted)
    memory = {"mode": "smart_swap", "weights": "host", "host_memory_gib": 2**20 / GIB}
    planner = train(lora, memory, **(STEPS | {"steps": 1})).planner
    assert isinstance(planner, Planner)
    assert planner.weights is not None
    (host,) = made
    limit_bytes = host.pool(torch.device("cpu"), False, None).limit_bytes
    assert limit_bytes == 2**20 - planner.weights.host_bytes
    assert planner._run.host_bytes == 2**20, "of which every search takes the weights off"


def test_a_step_that_does_not_fit_survives_and_no_weight_is_evicted(unplanned: Trained) -> None:
    limit = int(0.55 * unplanned.peak_bytes)
    found = train(
        lora, {"mode": "smart_swap", "weights": "host"}, limit_bytes=limit, **(STEPS | {"steps": 3})
    )
    planner = found.planner
    assert isinstance(planner, Planner)
    assert planner.weights is not None
    assert planner.evicted_bytes > 0
    assert found.losses == unplanned.losses[:3]
    assert max(found.peaks) <= limit
    first = sum(layer.size_bytes for layer in planner.weights.layers[:2])
    assert planner.stats().prefetched_bytes == 3 * planner.weights.step_bytes + first


def test_auto_moves_them_where_nothing_fits_with_them_on_the_device(
    unplanned: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The budget is less than the least that any plan reaches with the weights on the device."""
    kept = train(lora, {"mode": "smart_swap", "weights": "auto"}, **STEPS)
    assert isinstance(kept.planner, Planner)
    assert kept.planner.weights is None, "everything fits"
    assert kept.losses == unplanned.losses
    task = kept.planner.task
    assert task is not None
    budget = least_peak_bytes(task.profile, task.fixed, task.limits()) - 20_000
    memory = {"mode": "smart_swap", "weights": "auto", "budget_gib": budget / GIB}
    memory["plan_file"] = str(tmp_path / "plan.json")
    with caplog.at_level("INFO", "hf_actswap"):
        found = train(lora, memory, **(STEPS | {"steps": 8}))
    assert "wait on the host: nothing fits with them on the device" in caplog.text
    assert found.losses[:5] == unplanned.losses
    assert isinstance(found.planner, Planner)
    assert found.planner.weights is not None
    assert max(found.stable_peaks()) <= budget
    again = train(lora, memory, **(STEPS | {"steps": 2}))
    assert again.phases == ["stable"] * 2, "the plan's file says where the weights are"
    assert again.losses == unplanned.losses[:2]
    assert max(again.peaks) <= budget


def test_auto_moves_them_where_the_first_step_runs_out_of_memory(
    unplanned: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    limit = int(0.305 * unplanned.peak_bytes)  # between what evictions reach with them there, and without
    with pytest.raises((BudgetError, torch.OutOfMemoryError)):
        train(lora, {"mode": "smart_swap"}, limit_bytes=limit, **(STEPS | {"steps": 1}))
    with caplog.at_level("INFO", "hf_actswap"):
        memory = {"mode": "smart_swap", "weights": "auto"}
        found = train(lora, memory, limit_bytes=limit, **(STEPS | {"steps": 1}))
    assert "wait on the host: nothing fits with them on the device" in caplog.text
    assert found.losses == unplanned.losses[:1]
    assert max(found.peaks) <= limit


def test_auto_moves_them_where_the_step_is_predicted_to_be_faster() -> None:
    profile, sizes, _ = profile_of_four_layers(8192)
    fixed = MemoryPlan((), profile.num_layers, profile.family)
    budget_gib = 0.6 * predict(profile, fixed).peak_bytes / GIB
    memory = MemoryConfig(
        mode="adaptive", budget_gib=budget_gib, swap_bucket_size=0
    )  # recomputed, not swapped

    def why(**changed: Any) -> str:
        task = agreed_task(RecordedStep(profile), fixed, replace(memory, **changed), 2**40, 0)
        return weights_pay(task, sizes)[0]

    assert re.fullmatch(r"a step is predicted to take (\d+) ms, and (\d+) ms with them on the device", why())
    assert why(budget_gib=2 * budget_gib) == "", "nothing need be recomputed"
    assert why(host_memory_gib=0.1) == "", "the host has no room for them"
    assert why(budget_gib=0.45 * budget_gib / 0.6) == "nothing fits with them on the device"


def llama_8b_with_four_layers() -> nn.Module:
    sizes: Any = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, vocab_size=1000, **sizes)).bfloat16()
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()


def profile_of_four_layers(tokens: int) -> tuple[Profile, dict[Scope, int], float]:
    """The profile, the bytes of the layers' frozen weights, and the time of backward in the layers."""
    model = llama_8b_with_four_layers()
    structure, sizes = model_structure(model), sizes_on_host(model, model_structure(model))
    ids = torch.empty((1, tokens), dtype=torch.long, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        profile = profile_from_shapes(model, structure, {"input_ids": ids, "labels": ids.clone()}, "H100")
    return profile, sizes, sum(one.backward_ms for one in profile.op_events if one.call[0] in sizes)


@pytest.mark.slow
def test_less_is_swapped_where_weights_take_the_link() -> None:
    """A recorded step has their bytes and the waits for them; what they leave of the link it has not."""
    profile, sizes, backward_ms = profile_of_four_layers(4096)
    link = profile.link
    assert link is not None
    left = 1 - step_bytes(list(sizes.values())) / 2 / link.in_bytes_per_ms / backward_ms
    assert 0.4 < left < 0.6
    fixed = MemoryPlan((), profile.num_layers, profile.family)
    budget_gib = 0.8 * predict(profile, fixed).peak_bytes / GIB

    def planned(streamed: Mapping[Scope, int]) -> tuple[Prediction, Profile]:
        step = RecordedStep(profile, streamed_bytes=streamed)
        task = agreed_task(step, fixed, MemoryConfig(mode="adaptive", budget_gib=budget_gib), 2**40, 0)
        return best_plans(task, 1)[0].prediction, task.profile

    (beside, halved), (alone, whole) = planned(sizes), planned({})
    assert whole.link == link
    assert halved.link is not None
    assert halved.link.in_bytes_per_ms == pytest.approx(left * link.in_bytes_per_ms)
    assert link.out_beside_in_bytes_per_ms < halved.link.out_bytes_per_ms < link.out_bytes_per_ms
    assert 0 < beside.swapped_bytes < 0.8 * alone.swapped_bytes
    assert beside.recomputed_bytes > alone.recomputed_bytes


def test_a_loop_sets_the_weights_aside_moves_the_rest_and_starts_the_planner() -> None:
    model = lora()
    alone = apply(model, {"memory": {"weights": "host"}})
    model.to(torch.float32)  # as .to(device): the weights stay
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    planner = apply(model, {"memory": {"mode": "smart_swap", "weights": "host"}}, optimizer=optimizer)
    assert isinstance(planner, Planner)
    assert isinstance(alone, AppliedPlan)
    assert planner.weights is alone.weights is weights_of(unwrapped(model))
    planner.remove()
    assert weights_of(unwrapped(model)) is alone.weights, "they belong to the first call"
    alone.remove()
    assert weights_of(unwrapped(model)) is None


@pytest.mark.parametrize(("build", "named"), [(lora, True), (tiny_llama, False)], ids=["adapters", "full"])
def test_an_impossible_budget_names_the_frozen_weights(build: Callable[[], Any], named: bool) -> None:
    with pytest.raises(BudgetError) as raised:
        train(build, {"mode": "adaptive", "budget_gib": 1e-5}, **STEPS)
    assert ("`memory.weights: auto` moves" in str(raised.value)) == named
