"""``stream_config`` under the Trainer and in an Accelerate loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import Trainer

import hf_actswap
from tests.quick_cases import quick_first

from .conftest import Tokens, grad_norms, losses, tiny_llama

STREAMED: dict[str, Any] = {"stream_config": {"tokens": 5}}


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of hidden states that each layer's call got."""
    seen: list[int] = []
    forward = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self).__name__ == "LlamaDecoderLayer" and type(args[0]) is torch.Tensor:
            seen.append(args[0].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    return seen


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        pytest.param({"bf16": True, "average_tokens_across_devices": False}, marks=pytest.mark.slow),
        {"lora": True, "learning_rate": 1e-2},
    ],
    ids=["items in batch", "autocast", "adapters"],
)
def test_the_trainer_trains_as_without(
    make_trainer: Callable[..., Trainer], settings: dict[str, Any], lengths: list[int]
) -> None:
    settings, runs = dict(settings), {}
    lora = settings.pop("lora", False)
    for name, config in (("whole", None), ("streamed", STREAMED)):
        model: Any = tiny_llama()
        if lora:
            model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
        trainer = make_trainer(config, model=model, data=Tokens(), max_steps=4, **settings)
        lengths.clear()
        trainer.train()
        runs[name] = losses(trainer), grad_norms(trainer)
        checked = {11, 4, 3}  # a few tokens ahead of the first call, whole and in chunks
        assert set(lengths) == ({5, 1, *checked} if config else {16})
    for whole, streamed in zip(runs["whole"], runs["streamed"], strict=True):
        assert len(streamed) == 4
        assert streamed == pytest.approx(whole, rel=5e-3 if "bf16" in settings else 1e-5)


def test_evaluation_is_whole(make_trainer: Callable[..., Trainer], lengths: list[int]) -> None:
    found = []
    for config in (None, STREAMED):
        trainer = make_trainer(config, max_steps=2, eval_strategy="steps", eval_steps=1, learning_rate=1e-3)
        trainer.compute_metrics = lambda seen: {"sum": float(seen.predictions.sum())}
        lengths.clear()
        trainer.train()
        assert 16 in lengths
        assert (5 in lengths) == bool(config)
        found.append([entry for entry in trainer.state.log_history if "eval_loss" in entry])
    for whole, streamed in zip(*found, strict=True):
        for key in ("eval_loss", "eval_sum"):
            assert streamed[key] == pytest.approx(whole[key], rel=1e-4)


def test_what_needs_all_logits_is_rejected(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(STREAMED, max_steps=1, label_smoothing_factor=0.1)
    before = [item.detach().clone() for item in trainer.model.parameters()]
    with pytest.raises(hf_actswap.PlanError, match="label_smoothing_factor"):
        trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), before))


def test_the_trainers_gradient_checkpointing_is_rejected(make_trainer: Callable[..., Trainer]) -> None:
    with pytest.raises(hf_actswap.PlanError, match="gradient checkpointing off"):
        make_trainer(STREAMED, max_steps=1, gradient_checkpointing=True).train()


def test_the_plan_is_logged(make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_actswap"):
        make_trainer(STREAMED, max_steps=2).train()
    assert "chunks of 5 tokens" in caplog.text
    assert "Nothing is swapped" not in caplog.text
    assert "The plan did nothing" not in caplog.text
    assert "recomputes nothing" not in caplog.text


def test_layers_that_fit_are_kept(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    config = {**STREAMED, "log": "full", "memory": {"mode": "adaptive", "budget_gib": 1}}
    trainer = make_trainer(config, max_steps=2, gradient_accumulation_steps=2)
    with caplog.at_level(logging.INFO, logger="hf_actswap"):
        trainer.train()
    layers = trainer.model.config.num_hidden_layers
    assert f"{layers} of {layers} layers of a chunk kept" in caplog.text
    assert "Decided in step 1" in caplog.text
    assert "_call_impl" not in vars(trainer.model)


@pytest.mark.parametrize("order", quick_first(["before", "after"], 1))
def test_accelerate_loop(order: str) -> None:
    runs = []
    for config in ({}, STREAMED):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
        model: Any = tiny_llama()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = accelerator.prepare(torch.utils.data.DataLoader(Tokens(16), batch_size=2))
        applied: Any = hf_actswap.apply(model, config) if order == "before" else None
        model, optimizer = accelerator.prepare(model, optimizer)
        applied = applied or hf_actswap.apply(model, config)
        run = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            run.append(loss.item())
        applied.remove()
        runs.append(run)
    assert runs[1] == pytest.approx(runs[0], rel=1e-3)
