"""The optimizer in backward under the Trainer and in a loop of Accelerate: the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback

import hf_actswap
from hf_actswap import PlanError

from .conftest import grad_norms, losses, tiny_llama

Make = Callable[..., Trainer]
ON = {"memory": {"optimizer_in_backward": True}}
UNCLIPPED = {"max_grad_norm": 0.0, "max_steps": 6}


class CountsGradients(TrainerCallback):
    """Notes how many gradients there are when the optimizer has stepped, before they would be zeroed."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.found.append(sum(item.grad is not None for item in model.parameters()))


def assert_same(trainer: Trainer, plain: Trainer) -> None:
    assert losses(trainer) == losses(plain)
    assert grad_norms(trainer) == pytest.approx(grad_norms(plain), rel=1e-5)
    rates = [[entry.get("learning_rate") for entry in one.state.log_history] for one in (trainer, plain)]
    assert rates[0] == rates[1]
    weights = plain.model.state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"bf16": True, "optim": "adamw_torch", "gradient_checkpointing": True},
        {"optim": "sgd"},
    ],
    ids=["fused AdamW", "accumulation and a schedule", "bf16 autocast, checkpointing", "SGD"],
)
def test_the_numbers_of_a_plain_run(make_trainer: Make, settings: dict[str, Any]) -> None:
    plain = make_trainer(None, callback=False, **UNCLIPPED, **settings)
    plain.train()
    trainer = make_trainer(ON, **UNCLIPPED, **settings)
    counts = CountsGradients()
    trainer.add_callback(counts)
    trainer.train()
    assert counts.found == [0] * 6
    assert_same(trainer, plain)
    assert not any(item._post_accumulate_grad_hooks for item in trainer.model.parameters())


class EditsGradients(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        for item in model.parameters():
            item.grad.mul_(0.5)


def test_a_callback_that_edits_gradients_is_rejected_by_name(make_trainer: Make) -> None:
    trainer = make_trainer(ON, **UNCLIPPED)
    trainer.add_callback(EditsGradients())
    with pytest.raises(PlanError, match=r"no callback with on_pre_optimizer_step.*found .*EditsGradients"):
        trainer.train()


def test_killed_and_resumed(make_trainer: Make, tmp_path: Path) -> None:
    saved = {**UNCLIPPED, "save_strategy": "steps", "save_steps": 3}
    plain = make_trainer(None, callback=False, output_dir=str(tmp_path / "plain"), **saved)
    plain.train()

    class Killed(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    first = make_trainer(ON, **saved)
    first.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    ours, theirs = (
        torch.load(folder / "checkpoint-3" / "optimizer.pt", weights_only=True)
        for folder in (tmp_path / "out", tmp_path / "plain")
    )
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    resumed = make_trainer(ON, model=tiny_llama(seed=9), **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert losses(resumed) == losses(plain)
    weights = plain.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())


def test_what_the_trainer_may_not_do_beside(make_trainer: Make) -> None:
    trainer = make_trainer(ON, max_steps=2)
    before = [item.detach().clone() for item in trainer.model.parameters()]
    with pytest.raises(PlanError, match=r"max_grad_norm: expected 0 .* found 1"):
        trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), before))
    with pytest.raises(PlanError, match="computes each parameter by itself"):
        make_trainer(ON, **UNCLIPPED, optim="adafactor").train()  # that of transformers


def test_a_loop_of_accelerate(tmp_path: Path) -> None:
    found = []
    for config in (None, ON):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: Any = tiny_llama().train()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if config is None:
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            prepared = hf_actswap.prepare(accelerator, model, config, optimizer)
            model, optimizer = prepared.model, prepared.optimizer
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            ids = torch.randint(0, 64, (2, 16), generator=generator)
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
        found.append([item.detach().clone() for item in model.parameters()])
    assert all(map(torch.equal, *found))
