"""TRL's trainers with TRL's own defaults and a plan: the losses stay bitwise equal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from hf_actswap import with_actswap

from .conftest import CASE_3, CASE_4, SHORT_ON_CPU, losses, tiny_llama
from .test_planner_loops import tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = [f"w{number}" for number in range(2, 60)]
REASON = "is off while the planner decides what is recomputed; it is on again after it."


def text(start: int, count: int) -> str:
    return " ".join(WORDS[(start + 3 * index) % len(WORDS)] for index in range(count))


def plain_rows(number: int) -> dict[str, Any]:
    return {"text": text(number, 8 + number % 9)}


def pair(number: int) -> dict[str, Any]:
    return {"prompt": text(number, 4), "chosen": " " + text(number, 7), "rejected": " " + text(number + 5, 6)}


def judged(number: int) -> dict[str, Any]:
    good = bool(number % 2)
    return {"prompt": text(number, 4), "completion": " " + text(number + good, 6), "label": good}


def scorer() -> Any:
    config = tiny_llama().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def model_of_language() -> Any:
    model = tiny_llama()
    model.config.pad_token_id = 0
    model.warnings_issued = {}  # TRL 0.24 writes there, and transformers 5 has none
    return model


TRAININGS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "SFT": (model_of_language, plain_rows),
    "DPO": (model_of_language, pair),
    "Reward": (scorer, pair),
    "KTO": (model_of_language, judged),
}
AUTO = {"memory": {"mode": "adaptive", "search_steps": 2, "warmup_steps": 1, "min_tensor_mib": 0.0001}}
MIX = {**CASE_4, "memory": {"min_tensor_mib": 0.0001}}


def of_trl(name: str) -> Any:
    try:
        return getattr(trl, name)
    except RuntimeError as error:  # TRL 0.24 takes any package for installed beside transformers 5.6
        pytest.skip(f"this TRL does not import it beside this transformers: {error}")


def trained(kind: str, folder: Path, actswap: Any = None, **more: Any) -> Any:
    """Train with the arguments that TRL gives by default, but for the settings of a short run on the CPU."""
    make, row = TRAININGS[kind]
    arguments = getattr(trl, f"{kind}Config")
    given = {"max_steps": 7, "per_device_train_batch_size": 2, "bf16": False, **SHORT_ON_CPU}
    reference = {"ref_model": make()} if kind in ("DPO", "KTO") else {}
    if actswap is not None:
        arguments, given = with_actswap(arguments), {**given, "actswap": actswap}
    trainer = of_trl(f"{kind}Trainer")(
        model=make(),
        args=arguments(output_dir=str(folder), **{**given, **more}),
        train_dataset=datasets.Dataset.from_list([row(number) for number in range(24)]),
        processing_class=tokenizer(),
        **reference,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return trainer


def checkpointed(model: Any) -> list[bool]:
    return [bool(item.gradient_checkpointing) for item in model.modules() if hasattr(item, "self_attn")]


@pytest.mark.parametrize("kind", TRAININGS)
def test_the_defaults_of_trl_beside_a_planner(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = trained(kind, tmp_path / "plain")
    assert plain.args.gradient_checkpointing
    caplog.set_level(logging.INFO, logger="hf_actswap")
    trainer = trained(kind, tmp_path / "auto", AUTO)
    assert losses(trainer) == losses(plain) != []
    said = [record.getMessage() for record in caplog.records if REASON in record.getMessage()]
    assert len(said) == 1
    assert "_checkpointing is off" in said[0]
    assert trainer.args.gradient_checkpointing
    assert checkpointed(trainer.model) == checkpointed(plain.model) == [True] * 4
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[key]), key


@pytest.mark.parametrize("kind", TRAININGS)
def test_swap_beside_checkpointing_and_a_mix_without_it(kind: str, tmp_path: Path) -> None:
    plain = trained(kind, tmp_path / "plain")
    for name, case, more in (
        ("swap", {**CASE_3, "memory": {"min_tensor_mib": 0.0001}}, {}),
        ("mix", MIX, {"gradient_checkpointing": False}),
    ):
        trainer = trained(kind, tmp_path / name, case, **more)
        assert losses(trainer) == losses(plain) != [], name
        for key, value in trainer.model.state_dict().items():
            assert torch.equal(value, plain.model.state_dict()[key]), (name, key)
        saved = [entry["actswap_saved_gib"] for entry in trainer.state.log_history if "loss" in entry]
        assert saved[-1] > 0
