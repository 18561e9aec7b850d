"""On a model and off again: bare, wrapped, prepared, adapted, twice, and while a graph lives."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.parallel import DistributedDataParallel
from transformers import T5Config, T5ForConditionalGeneration

from hf_actswap import MemoryPlan, PlanError, apply
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    forward,
    gradients,
    gradients_of_step,
    on,
    plan_of,
    snapshot,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.quick_cases import each_value_once, quick_named

PLANS: dict[str, MemoryPlan | str] = {"everything swapped": swap_everything(5), **CASES}
QUICK = ("everything swapped", "case_4", "select_recompute", "exclude_inside_full")
every_plan = pytest.mark.parametrize("plan", quick_named(PLANS, QUICK))


def test_what_cannot_be_put_on_whole_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def rejected(*_: object) -> None:
        raise PlanError([])

    monkeypatch.setattr(sys.modules["hf_actswap.apply"], "stream_sequences", rejected)
    model = tiny_llama()
    before = snapshot(model)
    with pytest.raises(PlanError):
        apply(model, {"stream_config": {"tokens": 8}})
    assert snapshot(model) == before
    assert model.config.use_cache is True


@every_plan
def test_remove_leaves_no_trace(plan: MemoryPlan | str) -> None:
    model = tiny_llama()
    model.model.layers[1].register_forward_hook(lambda *_: None)  # hooks of others stay
    before = snapshot(model)
    applied = on(model, plan)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert list(model.state_dict()) == before["state_dict"]
    assert model.config.use_cache is False
    gradients_of_step(model)
    applied.remove()
    assert snapshot(model) == before
    assert model.config.use_cache is True
    applied.remove()
    assert snapshot(model) == before


def test_t5_is_bitwise_as_without_a_cache_and_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "d_model": 32, "d_ff": 48, "num_layers": 2, "d_kv": 8, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).train()
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))

    def step(**more: bool) -> tuple[bool, dict[str, torch.Tensor]]:
        model.zero_grad()
        output = model(input_ids=ids, labels=ids, **more)
        output.loss.backward()
        gradients = {
            name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None
        }
        return output.past_key_values is not None, gradients

    assert step()[0], "a cache is made, with which a processor may round otherwise"
    _, expected = step(use_cache=False)
    with (
        caplog.at_level("INFO", logger="hf_actswap"),
        apply(model, {"recompute_config": {"recompute": True}}),
    ):
        cached, found = step()
    assert not cached
    assert "bitwise those with use_cache=False" in caplog.text
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@every_plan
def test_remove_while_a_graph_lives(plan: MemoryPlan | str) -> None:
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    before = snapshot(model)
    applied = on(model, plan)
    loss = forward(model)
    applied.remove()
    assert snapshot(model) == before
    loss.backward()
    assert_bitwise_equal(gradients(model), bare)
    del loss
    stats = applied.stats()
    assert (stats.live_swaps, stats.host_bytes, stats.host_pool_bytes) == (0, 0, 0)


def test_a_second_plan_is_rejected_and_the_first_stays() -> None:
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    applied = on(model, swap_everything())
    between = snapshot(model)
    with pytest.raises(PlanError) as caught:
        apply(model, swap_everything())
    assert [str(problem) for problem in caught.value.problems] == [
        "model: expected no plan on it yet, found one that is applied. Call remove() on it first; if it is "
        "lost, copy.deepcopy(model) has no plan."
    ]
    assert snapshot(model) == between
    assert_bitwise_equal(gradients_of_step(model), bare)
    assert applied.stats().offloads > 0
    applied.remove()
    with apply(model, swap_everything()) as again:
        assert_bitwise_equal(gradients_of_step(model), bare)
        assert again.stats().offloads == applied.stats().offloads


def test_a_plan_of_another_model_is_rejected() -> None:
    model = tiny_llama()
    before = snapshot(model)
    with pytest.raises(PlanError) as caught:
        apply(model, plan_of(*swap_rows([""], [0]), num_layers=7))
    assert [str(problem) for problem in caught.value.problems] == [
        "plan.num_layers: expected 4, as in the model, found 7."
    ]
    assert snapshot(model) == before


def test_an_empty_plan_does_nothing() -> None:
    model = tiny_llama()
    before = snapshot(model)
    with apply(model, None):
        assert snapshot(model) == before


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@each_value_once
@every_plan
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("first", ["apply", "prepare"])
def test_before_and_after_prepare(plan: MemoryPlan | str, first: str) -> None:
    def run(plan: MemoryPlan | str | None) -> dict[str, torch.Tensor]:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters())
        applied = on(model, plan) if first == "apply" else None
        prepared, optimizer = accelerator.prepare(model, optimizer)
        applied = on(prepared, plan) if first == "prepare" else applied
        for _ in range(2):
            optimizer.zero_grad()
            loss = forward(prepared)
            accelerator.backward(loss)
            grads = gradients(model)
            optimizer.step()
        if applied is not None:
            assert applied.stats().forwards == 2
            applied.remove()
            assert not model._forward_pre_hooks
        return grads

    assert_bitwise_equal(run(plan), run(None))


@every_plan
@pytest.mark.usefixtures("world_of_one")
def test_a_wrapped_model(plan: MemoryPlan | str) -> None:
    bare = gradients_of_step(tiny_llama())
    wrapped = DistributedDataParallel(tiny_llama(), bucket_cap_mb=0.02)
    before = snapshot(wrapped)
    with apply(wrapped, plan) as applied:
        for _ in range(2):
            grads = gradients_of_step(wrapped)
            assert_bitwise_equal({name.removeprefix("module."): grad for name, grad in grads.items()}, bare)
        assert applied.stats().forwards == 2
        with wrapped.no_sync():
            gradients_of_step(wrapped)
    assert snapshot(wrapped)["modules"].keys() == before["modules"].keys()
    assert snapshot(wrapped.module) == snapshot(tiny_llama()) | {
        "modules": {
            name.removeprefix("module").lstrip("."): state
            for name, state in before["modules"].items()
            if name
        }
    }


@every_plan
def test_adapters(plan: MemoryPlan | str) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> torch.nn.Module:
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.2, init_lora_weights=False
        )
        torch.manual_seed(1)
        model: torch.nn.Module = peft.get_peft_model(tiny_llama(), config)
        return model.train()

    def run(plan: MemoryPlan | str | None) -> dict[str, torch.Tensor]:
        model = adapted()
        applied = on(model, plan)
        torch.manual_seed(2)
        grads = gradients_of_step(model)
        if applied is not None:
            assert applied.stats().live_swaps == 0
            assert (
                applied.stats().offloads + applied.stats().recomputes > 0 or plan == CASES["full_recompute"]
            )
        return grads

    bare = run(None)
    assert len(bare) == 2 * 2 * NUM_LAYERS
    assert_bitwise_equal(run(plan), bare)


def test_what_apply_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program that has not configured logging: what is done, each change once, and what it saved."""
    monkeypatch.setattr("logging.Logger.hasHandlers", lambda self: False)
    config = {
        "swap_config": {"swap": True, "op_swap": [{"op_name": "mlp", "backward_prefetch": 4, "layers": [1]}]},
        "recompute_config": {"select_recompute": {"mlp.mul": True}},
    }
    model = tiny_llama()
    with apply(model, config) as applied:
        model(input_ids=batch(0), labels=batch(0)).loss.backward()
    lines = [line for line in capsys.readouterr().err.splitlines() if "use_cache" not in line]
    changed = [str(item) for item in applied.plan.adjustments if "select_recompute" in str(item)]
    assert [sum(item in line for line in lines) for item in changed] == [1] * len(changed) != []
    title = lines.index("INFO - Activation plan, 4 llama layers:")
    assert lines[title + 1].startswith("INFO -   layers 0, 2-3: recompute mlp.mul")
    assert lines[-1].startswith("INFO - 0.000")
    assert "less kept for backward than without a plan" in lines[-1]
