"""The Trainer with frozen weights on the host: it never moves them, and trains what it trains without."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainerCallback, set_seed

from hf_actswap import (
    ActSwapCallback,
    ActSwapTrainingArguments,
    ConfigError,
    PlanError,
    load_config,
    prepare,
)
from hf_actswap.apply import sets_weights_aside
from hf_actswap.engine.frozen_weights import weights_of
from hf_actswap.planner import Planner
from tests.integrations.conftest import SHORT_ON_CPU, Tokens, tiny_llama
from tests.processes import fork_server

HOST: dict[str, Any] = {"memory": {"weights": "host"}}


def lora() -> nn.Module:
    model = tiny_llama()
    set_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def trainer_of(folder: Path, actswap: dict[str, Any] | None, **settings: Any) -> Trainer:
    asked = {**SHORT_ON_CPU, "max_steps": 3, "gradient_accumulation_steps": 2, **settings}
    args = ActSwapTrainingArguments(output_dir=str(folder), actswap=actswap, **asked)
    return Trainer(model=lora(), args=args, train_dataset=Tokens(), eval_dataset=Tokens(8))


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("beside", [{}, {"recompute_config": {"recompute": True}}])
def test_training_and_evaluation_are_bitwise_those_without(tmp_path: Path, beside: dict[str, Any]) -> None:
    bare = trainer_of(tmp_path, None)
    before = bare.evaluate()["eval_loss"]
    expected = bare.train().training_loss
    after = bare.evaluate()["eval_loss"]

    trainer = trainer_of(tmp_path, {**HOST, **beside})
    assert trainer.evaluate()["eval_loss"] == before
    assert trainer.train().training_loss == expected
    assert trainer.evaluate()["eval_loss"] == after
    weights = weights_of(trainer.model)
    assert weights is not None, "evaluation streams them as well"
    assert weights.stats().prefetched_bytes > 6 * weights.step_bytes
    for name, one in trained(trainer.model).items():
        assert torch.equal(one, trained(bare.model)[name]), name


def test_the_trainer_leaves_the_weights_where_they_are(tmp_path: Path) -> None:
    args = ActSwapTrainingArguments(output_dir=str(tmp_path), actswap=HOST, **SHORT_ON_CPU)
    assert args.place_model_on_device is False
    other = ActSwapTrainingArguments(output_dir=str(tmp_path), actswap=None, **SHORT_ON_CPU)
    assert other.place_model_on_device is None
    trainer = Trainer(model=lora(), args=args, train_dataset=Tokens())
    trainer.model.to("meta")
    weights = weights_of(trainer.model)
    assert weights is not None
    assert {name for name, one in trainer.model.named_parameters() if not one.is_meta} == set(
        weights.names_in(trainer.model)
    )


SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


class KilledInBackward(TrainerCallback):
    """Ends the process in the backward of the fourth step, with weights on their way."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            weight = next(iter(trained(kwargs["model"]).values()))
            weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def be_killed(folder: str) -> None:
    trainer = trainer_of(Path(folder), HOST, **SAVED)
    trainer.add_callback(KilledInBackward())
    trainer.train()


def test_adapters_are_saved_and_a_killed_training_goes_on(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", HOST, **SAVED)
    whole.train()
    killed = fork_server().Process(target=be_killed, args=(str(tmp_path / "killed"),))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    resumed = trainer_of(tmp_path / "killed", HOST, **SAVED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-2"))
    for name, one in trained(resumed.model).items():
        assert torch.equal(one, trained(whole.model)[name]), name
    assert (tmp_path / "killed" / "checkpoint-4" / "adapter_model.safetensors").exists()


def test_what_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "hf_actswap"):
        trainer = trainer_of(tmp_path, HOST)
        trainer.train()
    assert "frozen weights of the layers: on the host, copied in layer by layer" in caplog.text


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_a_trainer_that_shards_the_model_is_rejected(tmp_path: Path, name: str) -> None:
    class Sharding(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            setattr(self, f"is_{name}_enabled", True)

    args = ActSwapTrainingArguments(output_dir=str(tmp_path), actswap=HOST, **SHORT_ON_CPU)
    model = lora()
    with pytest.raises(PlanError) as raised:
        Sharding(model=model, args=args, train_dataset=Tokens())
    (problem,) = raised.value.problems
    assert (problem.where, problem.expected, problem.found) == (
        "memory.weights",
        f"keep beside {name}",
        "host",
    )
    assert "leave weights: host out" in problem.hint
    assert weights_of(model) is None


def test_the_planner_finds_a_plan_beside_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_steps": 6}
    bare = trainer_of(tmp_path, None, **settings)
    expected = bare.train().training_loss
    memory = {"mode": "smart_swap", "search_steps": 2, "reduce_by_gib": 0.0001}
    trainer = trainer_of(tmp_path, {"memory": {"weights": "host", **memory}}, **settings)
    early = weights_of(trainer.model)
    assert early is not None
    found: list[Planner] = []

    class Watching(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            (ours,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, ActSwapCallback))
            found[:] = [ours.applied] if isinstance(ours.applied, Planner) else []
            phases.append(found[0].phase)

    phases: list[str] = []
    trainer.add_callback(Watching())
    assert trainer.train().training_loss == expected
    assert phases[-1] == "stable"
    assert found[0].weights is early is weights_of(trainer.model)
    assert found[0].trials[0].plan.rows
    assert early.stats().prefetched_bytes > 6 * early.step_bytes
    for name, one in trained(trainer.model).items():
        assert torch.equal(one, trained(bare.model)[name]), name


@pytest.mark.parametrize(("budget_gib", "leaves"), [(0.0001, True), (1.0, False)])
def test_auto_sets_aside_at_once_what_the_budget_does_not_hold(
    tmp_path: Path, budget_gib: float, leaves: bool
) -> None:
    memory = {"mode": "adaptive", "weights": "auto", "budget_gib": budget_gib}
    trainer = trainer_of(tmp_path, {"memory": memory})
    assert trainer.place_model_on_device is not leaves
    assert (weights_of(trainer.model) is not None) is leaves


@pytest.mark.parametrize(
    ("memory", "owner", "expected"),
    [
        ({}, None, True),
        ({"preference": "performance"}, None, False),
        ({"budget_gib": 1.0}, None, False),
        ({}, "fsdp", False),
        ({"weights": "auto"}, "fsdp", True),
    ],
)
def test_what_must_be_set_aside(memory: dict[str, Any], owner: str | None, expected: bool) -> None:
    """On a device that the model is too large for, with the planner that nobody told of weights."""
    model, owners = lora(), [] if owner is None else [owner]
    asked = load_config({"memory": {"mode": "adaptive", "budget_gib": 0.0001, **memory}})
    device = torch.device("cuda")
    assert sets_weights_aside(asked, model, device, owners) is expected
    for weight in model.parameters():
        weight.requires_grad_(True)
    assert sets_weights_aside(asked, model, device, owners) is ("weights" in memory)


def test_a_prepared_loop_never_has_them_on_the_device() -> None:
    """They are set aside before Accelerate moves the model, and come back with `remove`."""
    model, memory = lora(), {"mode": "adaptive", "weights": "auto", "budget_gib": 0.0001}
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    found: list[bool] = []

    class Noting(Accelerator):
        def prepare(self, *given: Any, **settings: Any) -> Any:
            found.append(weights_of(model) is not None)
            return super().prepare(*given, **settings)

    prepared = prepare(Noting(cpu=True), model, {"memory": memory}, optimizer)
    assert found == [True]
    assert isinstance(prepared.applied, Planner)
    assert prepared.applied.weights is weights_of(model)
    prepared.applied.remove()
    assert weights_of(model) is None


def test_auto_needs_the_planner(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory\.weights: expected keep or host without the planner"):
        trainer_of(tmp_path, {"memory": {"weights": "auto"}})
