"""The Trainer's own ``torch_compile``, whole and by regions: the plan goes on what the Trainer calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Trainer, TrainerCallback

from hf_actswap import ActSwapCallback, PlanError, releases
from hf_actswap.integrations.callback import called_model

from .conftest import CASE_1, CASE_2, CASE_3, FULL_RECOMPUTE, grad_norms, losses, tiny_llama

Make = Callable[..., Trainer]
COMPILE = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 4}
EVERY_LAYER = {
    "log": "full",
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": True}]},
}
AUTO = {
    "log": "full",
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": "auto", "layers": True}]},
}
WHOLE, REGIONAL = "whole", "regional"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    start_anew()
    yield
    start_anew()


def start_anew() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def compiling(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a Trainer that compiles the model ``whole`` or ``regional``; Accelerate reads the environment."""

    def make(way: str, actswap: Any, **settings: Any) -> Trainer:
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(way == REGIONAL))
        return make_trainer(actswap, **{**COMPILE, **settings})

    return make


def compiler_work() -> tuple[Any, dict[str, int]]:
    return counters["stats"].get("unique_graphs"), dict(counters["graph_break"])


def swapped_bytes(trainer: Trainer) -> list[float]:
    return [entry["actswap_offloaded_gib"] for entry in trainer.state.log_history if "loss" in entry]


def hooks_of(model: torch.nn.Module) -> dict[str, Any]:
    return {
        name: (len(module._forward_hooks), len(module._forward_pre_hooks), module._compiled_call_impl)
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(
    ("way", "case", "settings"),
    [
        pytest.param(WHOLE, CASE_1, {"bf16": True}, marks=pytest.mark.slow),
        pytest.param(WHOLE, AUTO, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param(
            WHOLE,
            EVERY_LAYER,
            {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
            marks=pytest.mark.slow,
        ),
        (REGIONAL, CASE_1, {"bf16": True}),
        pytest.param(REGIONAL, CASE_2, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param(
            REGIONAL,
            CASE_2,
            {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_same_digits_same_graphs_no_breaks(
    compiling: Make, way: str, case: dict[str, Any], settings: dict[str, Any]
) -> None:
    if way == REGIONAL and settings.get("bf16") and not releases.compiled_regions_are_called():
        pytest.skip("this Accelerate calls no compiled layers in mixed precision, with a plan or without")
    plain = compiling(way, None, callback=False, **settings)
    plain.train()
    work = compiler_work()
    weights = {name: value.clone() for name, value in plain.model.state_dict().items()}
    start_anew()
    trainer = compiling(way, case, **settings)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert grad_norms(trainer) == grad_norms(plain)
    assert trainer.model.state_dict().keys() == weights.keys()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert compiler_work() == work
    assert work[0] > 0
    assert work[1] == {}
    assert min(swapped_bytes(trainer)) > 0
    assert len(set(swapped_bytes(trainer))) == 1
    for ours, theirs in ((trainer.model, plain.model), (trainer.model_wrapped, plain.model_wrapped)):
        assert hooks_of(ours) == hooks_of(theirs)


def test_regions_have_fates_of_their_own(compiling: Make) -> None:
    """Two layers of four: half of what all four are."""
    everything = compiling(REGIONAL, EVERY_LAYER, max_steps=1)
    everything.train()
    inner = {
        "log": "full",
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": [1, 2]}]},
    }
    half = compiling(REGIONAL, inner, max_steps=1)
    half.train()
    assert swapped_bytes(everything)[0] == 2 * swapped_bytes(half)[0] > 0


def test_whole_layers_are_recomputed_by_regions(compiling: Make) -> None:
    plain = compiling(REGIONAL, None, callback=False)
    plain.train()
    trainer = compiling(REGIONAL, FULL_RECOMPUTE)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert grad_norms(trainer) == grad_norms(plain)
    assert counters["graph_break"] == {}


@pytest.mark.parametrize(
    ("way", "case", "words"),
    [
        (
            WHOLE,
            CASE_2,
            ("one fate for all layers where the whole model is compiled", "regional compilation"),
        ),
        (WHOLE, FULL_RECOMPUTE, ("layers that are compiled one by one", "regional compilation")),
        (WHOLE, CASE_3, ("whole layers where layers are compiled", "self_attn", "mlp")),
        (REGIONAL, CASE_3, ("whole layers where layers are compiled", "self_attn", "layer_swap")),
    ],
)
def test_what_cannot_be_told_apart_stops_before_the_first_step(
    compiling: Make, way: str, case: dict[str, Any], words: tuple[str, ...]
) -> None:
    trainer = compiling(way, case)
    with pytest.raises(PlanError) as rejected:
        trainer.train()
    assert [word for word in words if word not in str(rejected.value)] == []
    assert trainer.state.global_step == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", [WHOLE, REGIONAL])
def test_a_second_training_and_a_callback_added_later(compiling: Make, way: str) -> None:
    plain = compiling(way, None, callback=False)
    plain.train()
    first = losses(plain)
    plain.train()
    trainer = compiling(way, None, callback=False)
    callback = ActSwapCallback(EVERY_LAYER)
    trainer.add_callback(callback)
    callback.bind(trainer)
    trainer.train()
    assert losses(trainer) == first
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert min(swapped_bytes(trainer)) > 0
    assert counters["graph_break"] == {}


@pytest.mark.parametrize("way", [pytest.param(WHOLE, marks=pytest.mark.slow), REGIONAL])
def test_everything_comes_off_after_an_exception(compiling: Make, way: str) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise OSError("after the first step")

    plain = compiling(way, None, callback=False, max_steps=1)
    plain.train()
    trainer = compiling(way, EVERY_LAYER)
    trainer.add_callback(Fails())
    with pytest.raises(OSError, match="after the first step"):
        trainer.train()
    assert hooks_of(trainer.model_wrapped) == hooks_of(plain.model_wrapped)
    assert hooks_of(trainer.model) == hooks_of(plain.model)


def test_the_called_model_is_the_compiled_one_or_the_given_one(compiling: Make) -> None:
    class Trained:
        model_wrapped: Any = None

    model = tiny_llama()
    assert called_model(None, model) is model
    trainer = Trained()
    assert called_model(trainer, model) is model
    trainer.model_wrapped = torch.nn.Sequential(model)
    assert called_model(trainer, model) is model
    trainer.model_wrapped = torch.compile(model, backend="aot_eager")
    assert called_model(trainer, model) is trainer.model_wrapped


def test_an_accelerate_that_does_not_call_the_compiled_layers_is_named(
    compiling: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = releases.version
    monkeypatch.setattr(releases, "version", lambda name: "1.14.0" if name == "accelerate" else known(name))
    with pytest.raises(PlanError, match=r"expected accelerate 1\.15 or newer beside a plan"):
        compiling(REGIONAL, CASE_1, bf16=True).train()
