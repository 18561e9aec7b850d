"""The planner under the Trainer: same losses, three stages in the log, nothing left behind."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import Trainer, TrainerCallback

from hf_actswap import ActSwapCallback, ActSwapTrainer
from hf_actswap.planner import BudgetError, Planner

from .conftest import Tokens, grad_norms, losses, tiny_llama

Make = Callable[..., Trainer]
GIB = 2**30
LENGTH = 64

SHORT = {"warmup_steps": 2, "search_steps": 2, "min_tensor_mib": 0.004}
"""One candidate; the tests train a few steps on tiny tensors."""


class Blocks(Tokens):
    """Random blocks that are long enough for activations to matter; can be told to fail at one index."""

    def __init__(self, count: int = 96, **how: Any) -> None:
        super().__init__(count, **how)
        self.ids = torch.randint(0, 64, (count, LENGTH), generator=torch.Generator().manual_seed(1))


UNPLANNED_BYTES = 2_713_992
"""The peak of a step of `tiny_llama` on four blocks, counted."""


def planned(mode: str = "smart_swap", share: float = 0.7, **more: Any) -> dict[str, Any]:
    return {
        "log": "full",
        "memory": {"mode": mode, "budget_gib": share * UNPLANNED_BYTES / GIB, **SHORT, **more},
    }


@pytest.fixture
def training(make_trainer: Make) -> Make:
    """Make a Trainer of `model` on `Blocks`."""

    def make(actswap: Any, data: Any = None, **more: Any) -> Trainer:
        more = {"max_steps": 10, "per_device_train_batch_size": 4, **more}
        own = more.pop("model", None)
        return make_trainer(actswap, model=own or tiny_llama(), data=data or Blocks(), **more)

    return make


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Watch(TrainerCallback):
    """Notes the planner's phase and plan in each step."""

    def __init__(self, trainer: Trainer) -> None:
        found = [item for item in trainer.callback_handler.callbacks if isinstance(item, ActSwapCallback)]
        self.callback, self.phases, self.planner = found[0], [], None
        self.rows: tuple[Any, ...] = ()
        trainer.add_callback(self)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        planner = self.callback.applied
        assert isinstance(planner, Planner)
        self.planner = planner
        self.phases.append(planner.phase)
        self.rows = planner.plan.rows


def hooks_of(module: torch.nn.Module) -> dict[str, Any]:
    return {
        name: (
            len(item._forward_hooks),
            len(item._forward_pre_hooks),
            "forward" in vars(item),
            "_call_impl" in vars(item),
            item._compiled_call_impl,
        )
        for name, item in module.named_modules()
    }


def assert_like_plain(trainer: Trainer, plain: Trainer) -> None:
    assert losses(trainer) == losses(plain)
    assert grad_norms(trainer) == grad_norms(plain)
    weights = plain.model.state_dict()
    assert trainer.model.state_dict().keys() == weights.keys()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert hooks_of(trainer.model) == hooks_of(plain.model)


def test_a_plan_that_only_an_evaluation_met_is_no_plan_that_did_nothing(
    training: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The planner puts the first plan on after the last step; the evaluation runs under it."""
    trainer = training(planned(), max_steps=2, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    assert "The plan did nothing" not in caplog.text


@pytest.mark.parametrize("mode", ["smart_swap", "adaptive"])
def test_losses_are_those_of_a_plain_run_and_the_stages_are_named(
    training: Make, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = training(None, callback=False)
    plain.train()
    trainer = training(planned(mode))
    watch = Watch(trainer)
    with caplog.at_level(logging.INFO, logger="hf_actswap"):
        trainer.train()
    assert_like_plain(trainer, plain)
    assert watch.phases == ["warm-up", "warm-up", "search", "search", *["stable"] * 6]
    assert watch.rows
    said = [record.getMessage() for record in caplog.records]
    for stage in (f"{mode}: warm-up, 2 step(s)", f"{mode}: search (2 steps", f"{mode}: stable: "):
        assert [line for line in said if line.startswith(stage)], stage
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all("actswap_offloaded_gib" in entry for entry in entries)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 3, "max_steps": 7},
        {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "max_steps": 7},
        {"bf16": True, "max_steps": 7},
    ],
    ids=["accumulation", "evaluation in every step", "bf16 autocast"],
)
@pytest.mark.slow
def test_what_the_trainer_does_beside(training: Make, settings: dict[str, Any]) -> None:
    plain = training(None, callback=False, **settings)
    plain.train()
    trainer = training(planned(), **settings)
    watch = Watch(trainer)
    trainer.train()
    assert_like_plain(trainer, plain)
    assert watch.phases[-1] == "stable"
    evaluations = [
        [entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry]
        for one in (trainer, plain)
    ]
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow
def test_generation_between_steps_disturbs_nothing(training: Make) -> None:
    class Generates(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            with torch.no_grad():
                made = model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=4, do_sample=False)
            texts.append(made.tolist())

    runs = []
    for actswap in (None, planned()):
        texts: list[Any] = []
        trainer = training(actswap, callback=actswap is not None, max_steps=7)
        trainer.add_callback(Generates())
        trainer.train()
        runs.append((losses(trainer), texts))
    assert runs[0] == runs[1]


def test_a_resumed_run_is_stable_at_once(training: Make, tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 5}
    path = tmp_path / "plan.json"
    memory = planned("adaptive", plan_file=str(path))
    whole = training(memory, **saved)
    whole.train()
    assert json.loads(path.read_text())["rows"]
    resumed = training(memory, model=tiny_llama(seed=9), **saved)
    watch = Watch(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert losses(resumed) == losses(whole)
    assert watch.phases == ["stable"] * 5


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (1, "forward"),
        (5, "backward"),
        *(
            pytest.param(step, where, marks=pytest.mark.slow)
            for step, where in product((0, 1, 2, 5), ("loader", "forward", "backward"))
            if (step, where) not in ((1, "forward"), (5, "backward"))
        ),
    ],
)
def test_an_exception_leaves_nothing_behind(training: Make, step: int, where: str) -> None:
    if where == "loader":
        trainer = training(planned(), data=Blocks(fail_at=None), max_steps=7)
    else:
        trainer = training(planned(), max_steps=7)
    before = hooks_of(trainer.model)

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step != step:
                return
            if where == "loader":
                raise OSError("here")
            self.handle = model.model.layers[2].mlp.up_proj.register_forward_hook(self.fail)

        def fail(self, _module: Any, _args: Any, output: torch.Tensor) -> None:
            self.handle.remove()
            if where == "forward":
                raise OSError("here")
            output.register_hook(self.fail_in_backward)

        def fail_in_backward(self, _gradient: torch.Tensor) -> None:
            raise OSError("here")

    trainer.add_callback(Fails())
    with pytest.raises(OSError, match="here"):
        trainer.train()
    assert hooks_of(trainer.model) == before
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.slow
def test_states_of_the_optimizer_are_saved_and_resumed(training: Make, tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 5}
    plain = training(None, callback=False, output_dir=str(tmp_path / "plain"), **saved)
    plain.train()
    memory = planned(preference="memory_saving", min_tensor_mib=0.001)
    whole = training(memory, **saved)
    watch = Watch(whole)
    whole.train()
    assert_like_plain(whole, plain)
    assert watch.planner is not None
    assert watch.planner.optimizer_states is not None
    assert watch.planner.optimizer_states.stats().offloaded_bytes > 0
    ours, theirs = (
        torch.load(folder / "checkpoint-5" / "optimizer.pt", weights_only=True)
        for folder in (tmp_path / "out", tmp_path / "plain")
    )
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for name, value in state.items():
            assert torch.equal(ours["state"][number][name], value), (number, name)
    resumed = training(memory, model=tiny_llama(seed=9), **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert losses(resumed) == losses(plain)


def test_what_cannot_fit_ends_with_the_least_budget(training: Make) -> None:
    trainer = training(planned(share=0.1))
    before = hooks_of(trainer.model)
    with pytest.raises((BudgetError, torch.OutOfMemoryError), match=r"at least|The least"):
        trainer.train()
    assert hooks_of(trainer.model) == before
    assert trainer.state.global_step <= 2


@pytest.mark.slow
def test_lora(training: Make) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> torch.nn.Module:
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return get_peft_model(tiny_llama(), lora)

    runs = []
    for actswap in (None, planned()):
        trainer = training(actswap, callback=actswap is not None, model=adapted(), max_steps=7)
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_our_own_trainer(make_trainer: Make, tmp_path: Path) -> None:
    args = make_trainer(planned(), max_steps=7).args
    plain = make_trainer(None, callback=False, model=tiny_llama(), data=Blocks(), max_steps=7)
    plain.train()
    trainer = ActSwapTrainer(model=tiny_llama(), args=args, train_dataset=Blocks())
    trainer.train()
    assert losses(trainer) == losses(plain)


def test_gradient_checkpointing_beside_adaptive_is_off_meanwhile(training: Make) -> None:
    plain = training(None, callback=False, gradient_checkpointing=True)
    plain.train()
    trainer = training(planned("adaptive"), gradient_checkpointing=True)
    watch = Watch(trainer)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert watch.phases[-1] == "stable"
    assert watch.rows
    assert trainer.args.gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in trainer.model.model.layers)


def test_where_everything_fits_the_time_without_a_plan_was_measured(
    training: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = training({"memory": {"mode": "adaptive", **SHORT}}, max_steps=6)
    watch = Watch(trainer)
    with caplog.at_level(logging.INFO, logger="hf_actswap"):
        trainer.train()
    said = [record.getMessage() for record in caplog.records]
    assert said[-1].endswith(" ms without a plan (measured).")
    assert len([line for line in said if "without a plan" in line and " ms" in line]) == 1
    assert len(said) <= 10
    assert repr(watch.planner) == "<Planner adaptive, stable: everything is kept>"


def test_a_training_that_goes_on_uses_the_plan_of_its_checkpoint(
    training: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"save_strategy": "steps", "save_steps": 3}
    whole = training(planned(), **saved)
    whole.train()
    folders = {name: tmp_path / "out" / f"checkpoint-{name}" for name in (3, 6)}
    assert not (folders[3] / "actswap_plan.json").exists()  # in the search
    found = json.loads((folders[6] / "actswap_plan.json").read_text())
    assert found["made_for"]["batch_shape"] == [4, LENGTH]
    for resumed_from, asked, phase, words in (
        (str(folders[6]), planned(), "stable", "stable: the plan of"),
        (True, planned(), "stable", "stable: the plan of"),
        (str(folders[6]), planned(share=0.8), "warm-up", "was made for another run (requested"),
        (str(folders[3]), planned(), "warm-up", "warm-up, 2 step(s)"),
    ):
        caplog.clear()
        trainer = training(asked, **saved, max_steps=12 if resumed_from is True else 10)
        watch = Watch(trainer)
        with caplog.at_level(logging.INFO, logger="hf_actswap"):
            trainer.train(resume_from_checkpoint=resumed_from)
        assert watch.phases[0] == phase, resumed_from
        assert words in caplog.text
        begun = 10 if resumed_from is True else trainer.state.global_step
        assert losses(trainer)[:begun] == losses(whole)
    (folders[6] / "actswap_plan.json").write_text("{")
    trainer = training(planned(), **saved)
    trainer.train(resume_from_checkpoint=str(folders[6]))
    assert "The plan of the checkpoint is not used, and one is searched" in caplog.text
    assert losses(trainer) == losses(whole)
