"""Swap beside Hugging Face's own gradient checkpointing: the inputs of its checkpoints move, nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_actswap import (
    ActSwapTrainingArguments,
    MemoryPlan,
    PlanError,
    apply,
    model_structure,
    releases,
    resolve_plan,
)
from hf_actswap.config import load_config
from hf_actswap.plan import PlanRow, Windows
from hf_actswap.plan.wrappers import checkpoints_its_call
from hf_actswap.releases import checkpointing_argument
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.test_recompute import held_bytes
from tests.engine.tiny_models import (
    BATCH,
    LENGTH,
    assert_bitwise_equal,
    gradients_of_step,
    tiny_llama,
    tiny_neox,
)

from .conftest import (
    CASE_1,
    CASE_2,
    CASE_3,
    CASE_4,
    FULL_RECOMPUTE,
    SHORT_ON_CPU,
    Tokens,
    grad_norms,
    losses,
)
from .conftest import tiny_llama as small_llama

Make = Callable[..., Trainer]
INPUT_BYTES = BATCH * LENGTH * 32 * 4
INPUTS_ALONE = {"swap_config": {"swap": True, "op_swap": [], "recompute_input": True, "default_prefetch": 4}}
_ALL = {"backward_prefetch": 9, "layers": True}
REASON = (
    "gradient checkpointing recomputes the layer, and all that is saved of it until backward is its input"
)


OPTIONS = inspect.signature(PreTrainedModel.gradient_checkpointing_enable).parameters
newer = pytest.mark.skipif("every_n_layers" not in OPTIONS, reason="this transformers has no every_n_layers")
offloads = pytest.mark.skipif("offload" not in OPTIONS, reason="this transformers has no offload")


def checkpointed(model: Any = None, **keys: Any) -> Any:
    """Under the name that all versions of transformers have."""
    model = model if model is not None else tiny_llama()
    model.gradient_checkpointing_enable(**keys)
    return model


def resolved(config: dict[str, Any], model: nn.Module) -> MemoryPlan:
    return resolve_plan(load_config(config), model_structure(model))


def output_rows(layers: list[int], prefetch_ops: int) -> tuple[PlanRow, ...]:
    windows = Windows.of_prefetch(prefetch_ops)
    return tuple(PlanRow(layer - 1, "output", "swap", windows=windows) for layer in layers)


@pytest.mark.parametrize(
    ("config", "layers"),
    [(CASE_1, [0, 1, 2, 3]), (CASE_2, [0, 3]), (CASE_3, [0, 1, 2, 3])],
    ids=["case 1", "case 2", "case 3"],
)
def test_every_swapped_layer_moves_its_input_and_nothing_else(
    config: dict[str, Any], layers: list[int]
) -> None:
    bare = gradients_of_step(checkpointed())
    model = checkpointed()
    applied = apply(model, config, transfer=RecordingTransfer())
    for _ in range(4):  # the first ones are followed, the later ones go by cached trace
        before = applied.stats()
        assert_bitwise_equal(gradients_of_step(model), bare)
        step = applied.stats() - before
        assert step.offloaded_bytes == step.prefetched_bytes == len(layers) * INPUT_BYTES
        assert step.late_prefetches == 0
    without, _ = held_bytes(None, checkpointed())
    held, offloaded_bytes = held_bytes(resolved(config, checkpointed()), checkpointed())
    assert without - held == offloaded_bytes == len(layers) * INPUT_BYTES


def test_the_plan_says_what_becomes_of_each_request() -> None:
    plan = resolved(CASE_3, checkpointed())
    assert [str(adjustment) for adjustment in plan.adjustments] == [
        f"swap_config self_attn, layers 0, 3: asked swap, got input swapped: {REASON}",
        f"swap_config self_attn, mlp, layers 1-2: asked swap, got input swapped: {REASON}",
    ]
    windows = Windows.of_prefetch(20)
    assert plan.rows == (
        PlanRow("embedding", "output", "swap", windows=windows),
        *output_rows([1, 2], 20),
        *output_rows([3], 10),
    )
    assert plan.log_lines() == resolved(CASE_3, tiny_llama()).log_lines()
    auto = resolved({"swap_config": {"swap": True, "default_prefetch": "auto"}}, checkpointed())
    assert {row.windows for row in auto.rows} == {None}
    assert len(auto.rows) == 4


def test_recompute_input_names_checkpointed_layers_too() -> None:
    config = {"swap_config": {"swap": True, "op_swap": [], "recompute_input": [1], "default_prefetch": 4}}
    plan = resolved(config, checkpointed())
    assert plan.rows == output_rows([1], 4)
    assert plan.adjustments == ()


@newer
def test_only_layers_that_are_checkpointed() -> None:
    """Every other layer: what the layers between save is swapped as ever."""
    bare = gradients_of_step(checkpointed(every_n_layers=2))
    model = checkpointed(every_n_layers=2)
    applied = apply(model, CASE_2)
    assert_bitwise_equal(gradients_of_step(model), bare)
    assert [str(adjustment) for adjustment in applied.plan.adjustments] == [
        f"swap_config, layers 0: asked swap, got input swapped: {REASON}"
    ]
    assert applied.plan.fate(3, "mlp") == "swap"
    assert applied.stats().offloaded_bytes > 3 * INPUT_BYTES


def test_dropout_and_another_family() -> None:
    grads = []
    for config in (None, CASE_2):
        model = checkpointed(tiny_neox(attn_implementation="eager"))
        applied = apply(model, config)
        torch.manual_seed(5)
        grads.append(gradients_of_step(model))
    assert_bitwise_equal(grads[1], grads[0])
    # A checkpoint around hooks saves what the first layer reads before we know it: here the dropout's result.
    count = 1 if checkpoints_its_call(model.gpt_neox.layers[0]) else 2
    assert applied.stats().offloaded_bytes == count * INPUT_BYTES


def test_adapters() -> None:
    grads = []
    for config in (None, CASE_1):
        model = get_peft_model(
            tiny_llama(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        )
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(parameter)
        checkpointed(model)
        applied = apply(model, config)
        grads.append(gradients_of_step(model))
    assert_bitwise_equal(grads[1], grads[0])
    assert applied.stats().offloaded_bytes == 4 * INPUT_BYTES


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_layers_that_are_compiled_one_by_one(compiled: bool) -> None:
    grads, moved = [], 0
    for config in (None, {"swap_config": {"swap": True, "layer_swap": [_ALL]}}):
        model = checkpointed()
        if compiled:
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
        applied = apply(model, config)
        grads.append(gradients_of_step(model))
        moved = applied.stats().offloaded_bytes
    torch.compiler.reset()
    assert_bitwise_equal(grads[1], grads[0])
    assert moved == 4 * INPUT_BYTES


def test_a_model_that_is_compiled_as_a_whole() -> None:
    """Its one region saves tensors without layers: all of them have one fate, as without checkpoints."""
    config = {"swap_config": {"swap": True, "recompute_input": True, "layer_swap": [_ALL]}}
    plan = resolved(config, torch.compile(checkpointed(), backend="aot_eager"))
    assert [str(adjustment) for adjustment in plan.adjustments] == [
        "swap_config.recompute_input: asked input swapped, got no effect: the model is compiled as a whole: "
        "what its region saves is not known by layer"
    ]
    assert {(row.op_path, row.fate) for row in plan.rows} == {("", "swap")}


def test_evaluation_mode_is_not_checkpointed() -> None:
    """The flag acts in training mode alone, and numbers stay right where the plan does not fit."""
    bare = gradients_of_step(checkpointed().eval())
    model = checkpointed().eval()
    apply(model, CASE_1)
    assert_bitwise_equal(gradients_of_step(model), bare)


# Rejected.


def message(model: nn.Module, config: Any) -> str:
    with pytest.raises(PlanError) as caught:
        apply(model, config)
    assert len(caught.value.problems) == 1
    return str(caught.value.problems[0])


@pytest.mark.parametrize(
    ("config", "layers"), [(FULL_RECOMPUTE, "0-3"), (CASE_4, "0, 3")], ids=["full", "selective"]
)
def test_two_kinds_of_recomputation(config: dict[str, Any], layers: str) -> None:
    assert message(checkpointed(), config) == (
        "model: expected gradient checkpointing or a recompute_config that recomputes something, not both, "
        f"found gradient checkpointing switched on, and recomputation in layers {layers}. "
        f"Use recompute_config and switch gradient checkpointing off ({checkpointing_argument()}=False): "
        "{recompute: true} does the same, and it can name layers and ops."
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(8, 2), nn.LayerNorm(8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.attn(hidden, hidden, hidden)[0]
        return hidden + self.norm(mixed)


class Blocks(nn.Module):
    """Calls its layers in checkpoints of its own, like the models of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            again = torch.is_grad_enabled() and self.gradient_checkpointing
            hidden = self._gradient_checkpointing_func(block, hidden) if again else block(hidden)
        return hidden


def test_checkpoints_around_layers() -> None:
    model = Blocks()
    model.gradient_checkpointing = True
    for config, layers in ((FULL_RECOMPUTE, "0-3"), ({"recompute_config": {"recompute": [2]}}, "0-1")):
        assert message(model, config) == (
            "model: expected gradient checkpointing or a plan, not both, found gradient checkpointing "
            f"switched on around layers {layers}, which the plan names. Leave enable_gradient_checkpointing()"
            " (--gradient_checkpointing) out: {recompute: true} does the same."
        )
    apply(model, {"recompute_config": {"recompute": False}}).remove()
    model.gradient_checkpointing = False
    apply(model, FULL_RECOMPUTE).remove()


def test_recompute_config_that_recomputes_nothing_is_no_conflict() -> None:
    apply(checkpointed(), {**CASE_1, "recompute_config": {"recompute": False, "select_recompute": {}}})
    apply(checkpointed(), {})


def test_reentrant_checkpoints() -> None:
    expected = (
        "model: expected gradient checkpointing with use_reentrant=False beside swap, found gradient "
        "checkpointing switched on, with use_reentrant=True. A reentrant checkpoint makes a layer one "
        "operator, and windows count operators. Write "
        f'{checkpointing_argument()}_kwargs={{"use_reentrant": False}}.'
    )
    for keywords in (
        {"use_reentrant": True},
        {"preserve_rng_state": False},
    ):  # reentrant is PyTorch's default
        model = checkpointed(gradient_checkpointing_kwargs=keywords)
        assert message(model, CASE_1) == expected


@offloads
def test_offloading_checkpoints() -> None:
    assert message(checkpointed(offload=True), CASE_1) == (
        "model: expected gradient checkpointing whose inputs saved-tensor hooks see, beside swap, found "
        "gradient checkpointing switched on, with offload=True or a function of its own. Leave offload out: "
        "swap moves the inputs, beside compute."
    )


def test_a_plan_that_was_made_without_it() -> None:
    plan = resolved(CASE_2, tiny_llama())
    assert message(checkpointed(), plan) == (
        "plan: expected of checkpointed layers only inputs swapped (`output` rows of what comes before), "
        "found gradient checkpointing switched on, and rows inside layers 0, 3. Resolve the plan from its "
        "configuration while gradient checkpointing is on."
    )


# Switched on after the plan has been applied.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CASE_4, "found gradient checkpointing switched on, and recomputation in layers 0, 3"),
        (FULL_RECOMPUTE, "found gradient checkpointing switched on, and recomputation in layers 0-3"),
        (CASE_2, "Resolve the plan from its configuration while gradient checkpointing is on"),
    ],
    ids=["selective", "full", "swap"],
)
def test_switched_on_later_it_is_noticed_at_the_next_forward(config: dict[str, Any], message: str) -> None:
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    with apply(model, config):
        assert_bitwise_equal(gradients_of_step(model), bare)
        checkpointed(model)
        with pytest.raises(PlanError, match=message):
            gradients_of_step(model)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))
        model.gradient_checkpointing_disable()
        assert_bitwise_equal(gradients_of_step(model), bare)


def test_switched_on_later_where_only_outputs_are_swapped() -> None:
    """That is what would have been resolved: the plan goes on, and so it does in evaluation."""
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    with apply(model, MemoryPlan(output_rows([1, 3], 4), num_layers=4)) as applied:
        gradients_of_step(model)
        checkpointed(model)
        assert_bitwise_equal(gradients_of_step(model), bare)
        assert applied.stats().offloads > 0
    model = tiny_llama()
    with apply(model, CASE_4):
        checkpointed(model).eval()
        assert_bitwise_equal(gradients_of_step(model), bare)


@pytest.mark.parametrize(
    ("release", "name"),
    [("5.17.0", "gradient_checkpointing"), ("5.23.0.dev0", "activation_checkpointing")],
)
def test_the_argument_that_messages_name(release: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(TrainingArguments("out", use_cpu=True), checkpointing_argument())
    monkeypatch.setattr(releases, "version", lambda package: release)
    assert f"({name}=False)" in message(checkpointed(), CASE_4)


@newer
def test_a_planner_switches_it_off_and_on_again() -> None:
    memory = {"memory": {"mode": "adaptive"}}
    model = checkpointed(every_n_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def on() -> list[bool]:
        return [bool(layer.gradient_checkpointing) for layer in model.model.layers]

    before = on()
    with apply(model, memory, optimizer=optimizer):
        assert not any(on())
    assert on() == before
    assert any(before)
    with pytest.raises(PlanError, match="optimizer"):
        apply(model, memory)
    assert on() == before
    with apply(model, {"memory": {"mode": "smart_swap"}}, optimizer=optimizer):
        assert on() == before


# Under the Trainer.


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"bf16": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_trainer_has_the_numbers_of_gradient_checkpointing_alone(
    make_trainer: Make, settings: dict[str, Any]
) -> None:
    settings = {"max_steps": 5, "gradient_checkpointing": True, **settings}
    plain = make_trainer(None, callback=False, **settings)
    plain.train()
    for case in (CASE_1, CASE_2, CASE_3):
        trainer = make_trainer(case, **settings)
        trainer.train()
        assert losses(trainer) == losses(plain)
        assert grad_norms(trainer) == grad_norms(plain)
        layer = trainer.model.model.layers[0]
        assert layer.gradient_checkpointing
        assert "forward" not in vars(layer)


@dataclass
class OnByDefault(ActSwapTrainingArguments):
    """As TRL's, ms-swift's and Axolotl's arguments."""

    gradient_checkpointing: bool = True


def trained_on_by_default(folder: Path, case: Any) -> Trainer:
    args = OnByDefault(str(folder), actswap=case, max_steps=3, seed=3, **SHORT_ON_CPU)
    trainer = Trainer(small_llama(), args, train_dataset=Tokens())
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("case", "takes_over"),
    [(CASE_4, True), (FULL_RECOMPUTE, True), (CASE_3, True), (INPUTS_ALONE, False), ({}, False)],
    ids=["mix", "recompute", "swap", "inputs of checkpoints", "nothing"],
)
def test_a_plan_takes_the_place_of_a_default(
    case: Any, takes_over: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = trained_on_by_default(tmp_path, None)
    trainer = trained_on_by_default(tmp_path, case)
    said = [line for line in caplog.messages if "(OnByDefault has it on by default)" in line]
    assert len(said) == takes_over
    assert losses(trainer) == losses(plain) != []
    assert trainer.args.gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in trainer.model.model.layers)


@pytest.mark.parametrize("words", [["--gradient_checkpointing", "true"], ["FILE"]], ids=["option", "file"])
def test_what_the_user_wrote_is_not_overruled(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("gradient_checkpointing: true\n")
    monkeypatch.setattr("sys.argv", ["train", *(str(file) if word == "FILE" else word for word in words)])
    with pytest.raises(PlanError, match="gradient_checkpointing: expected left out, or no, beside a plan"):
        trained_on_by_default(tmp_path, CASE_4)
    trained_on_by_default(tmp_path, CASE_3)  # the inputs of the checkpoints are swapped


def test_other_methods_that_move_activations(tmp_path: Path) -> None:
    class ActivationCpuOffloadCallBack(TrainerCallback):
        """Of the name of ms-swift's."""

    args = ActSwapTrainingArguments(str(tmp_path), actswap=CASE_4, **SHORT_ON_CPU)
    args.activation_offloading = True  # type: ignore[attr-defined]
    trainer = Trainer(small_llama(), args, train_dataset=Tokens(), callbacks=[ActivationCpuOffloadCallBack()])
    with pytest.raises(PlanError) as caught:
        trainer.train()
    where = ["callbacks: activation_cpu_offload", "activation_offloading"]
    assert [problem.where for problem in caught.value.problems] == where


def test_the_trainer_stops_before_the_first_step(make_trainer: Make) -> None:
    trainer = make_trainer(CASE_4, gradient_checkpointing=True)
    with pytest.raises(PlanError, match="Use recompute_config and switch gradient checkpointing off"):
        trainer.train()
    assert trainer.state.global_step == 0
