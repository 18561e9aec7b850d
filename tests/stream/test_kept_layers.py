"""``memory.mode: adaptive`` beside ``stream_config``: as many layers of a chunk are kept as fit."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap import MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from hf_actswap.planner import BudgetError, CountingMeter
from hf_actswap.stream.host_sequence import TOKEN_BYTES
from tests.stream.streamed_models import SIZES, STREAMED, gradients, made
from tests.stream.test_host_sequence import DeviceMeter

LAYERS, LENGTH, GIB = 3, 256, 2**30
CHUNKS: dict[str, Any] = {"stream_config": {"tokens": 128}, "tile_config": {"loss": "auto"}}


def model_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": LAYERS}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).train()
    return model, torch.optim.AdamW(model.parameters())


def ids_of(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(1))


def within(budget_bytes: float) -> dict[str, Any]:
    return {**CHUNKS, "memory": {"mode": "adaptive", "budget_gib": budget_bytes / GIB}}


@dataclass
class Counted:
    """A step of two micro-batches, with weights, and the optimizer's states of the next one."""

    peak_bytes: int
    gradients: dict[str, torch.Tensor]
    plan: MemoryPlan


def counted(config: dict[str, Any], rows: int = 1) -> Counted:
    model, optimizer = model_and_optimizer()
    ids = ids_of(LENGTH, rows)
    with apply(model, config, optimizer=optimizer) as applied, DeviceMeter(model) as meter:
        for _ in range(2):
            model(input_ids=ids, labels=ids.clone()).loss.backward()
    weights = sum(item.nbytes for item in model.parameters())
    return Counted(meter.peak_bytes + weights + 2 * weights, gradients(model), applied.plan)


def by_hand(kept: int) -> dict[str, Any]:
    return {**CHUNKS, "recompute_config": {"recompute": [LAYERS - kept]}}


@pytest.mark.parametrize(("kept", "rows"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_as_many_layers_as_fit_are_kept(kept: int, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    fits, more = (counted(by_hand(count), rows) for count in (kept, kept + 1))
    budget = (fits.peak_bytes + more.peak_bytes) // 2
    with caplog.at_level(logging.INFO, logger="hf_actswap"):
        found = counted(within(budget), rows)
    fates = [found.plan.fate(layer) for layer in range(LAYERS)]
    assert fates == [*["recompute"] * (LAYERS - kept), *["keep"] * kept]
    assert found.peak_bytes == fits.peak_bytes < budget < more.peak_bytes
    assert all(torch.equal(found.gradients[name], one) for name, one in fits.gradients.items())
    told = str(found.plan.adjustments[-1])
    assert f"got {kept} of 3 layers of a chunk kept" in told
    assert f"{rows} x 256 tokens" in told
    assert told in caplog.text


@pytest.mark.slow
def test_no_budget_is_all_that_the_device_has() -> None:
    found = counted({**CHUNKS, "memory": {"mode": "adaptive"}})
    assert not found.plan.rows


@pytest.mark.slow
def test_what_else_is_on_the_device_is_not_there_for_layers() -> None:
    both = []
    for other_bytes in (0, 150_000):
        model, optimizer = model_and_optimizer()
        meter, other = CountingMeter(), torch.empty(other_bytes, dtype=torch.uint8)
        meter.own([*model.parameters(), other])
        budget = counted(by_hand(2)).peak_bytes + 60_000
        with apply(model, within(budget), optimizer=optimizer, meter=meter) as applied:
            ids = ids_of(LENGTH)
            model(input_ids=ids, labels=ids).loss.backward()
            both.append(len(applied.plan.rows))
    assert both[0] == 1 < both[1]


@pytest.mark.slow
def test_what_does_not_fit_is_an_error_before_any_gradient() -> None:
    model, optimizer = model_and_optimizer()
    ids = ids_of(2 * LENGTH)
    with (
        apply(model, within(10**6), optimizer=optimizer),
        pytest.raises(BudgetError, match=r"No streamed sequence fits: fewer stream_config\.tokens") as error,
    ):
        model(input_ids=ids, labels=ids)
    budget, longest = error.value.least_bytes - 50 * TOKEN_BYTES, 2 * LENGTH - 50
    with apply(model, within(budget), optimizer=optimizer) as applied:
        with pytest.raises(
            BudgetError, match=f"layer recomputed, found .*Sequences of at most {longest} tokens"
        ):
            model(input_ids=ids, labels=ids)
        assert all(item.grad is None for item in model.parameters())
        assert all(applied.plan.fate(layer) == "recompute" for layer in range(LAYERS))
        model(input_ids=ids[:, :longest], labels=ids[:, :longest]).loss.backward()
    assert "_call_impl" not in vars(model)


def test_a_model_that_does_not_run_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = model_and_optimizer()
    forward = model.model.layers[1].mlp.forward
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", lambda x: forward(x) * float(x.sum() > 0))
    ids = ids_of(LENGTH)
    with (
        apply(model, within(10**9), optimizer=optimizer),
        pytest.raises(PlanError, match=r"runs on fake tensors.*Leave memory\.mode out"),
    ):
        model(input_ids=ids, labels=ids)


def test_what_it_does_not_go_with() -> None:
    def resolved(**memory: Any) -> MemoryPlan:
        return resolve_plan(load_config({**STREAMED, "memory": memory}), model_structure(made()))

    with pytest.raises(PlanError) as error:
        resolved(mode="adaptive", reduce_by_gib=1, preference="memory_saving", plan_file="a.json")
    assert [item.where for item in error.value.problems] == [
        f"memory.{key}" for key in ("reduce_by_gib", "plan_file", "preference")
    ]
    with pytest.raises(PlanError, match="off or adaptive beside stream_config, found smart_swap"):
        resolved(mode="smart_swap")
    with pytest.raises(PlanError, match="optimizer"):
        apply(made(), {**STREAMED, "memory": {"mode": "adaptive"}})
