"""A tiny Llama, a data set and a Trainer around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, set_seed

from hf_actswap import ActSwapCallback, ActSwapTrainingArguments

FULL = {"log": "full"}
"""All statistics in the Trainer's log, the plan as a table, and a file of log lines for each rank."""

CASE_1 = {**FULL, "swap_config": {"swap": True, "default_prefetch": 10}}
CASE_2 = {**FULL, "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": [0, 3]}]}}
CASE_3 = {
    **FULL,
    "swap_config": {
        "swap": True,
        "op_swap": [
            {"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1, 2]},
            {"op_name": "attention", "backward_prefetch": 10, "layers": [3]},
            {"op_name": "feed_forward", "backward_prefetch": 15, "layers": [1, 2]},
        ],
    },
}
CASE_4 = {**CASE_3, "recompute_config": {"select_recompute": {"feed_forward": [0, 3]}}}
FULL_RECOMPUTE = {"recompute_config": {"recompute": True}}
CASES = {
    "case 1": CASE_1,
    "case 2": CASE_2,
    "case 3": CASE_3,
    "case 4": CASE_4,
    "full recompute": {**FULL, **FULL_RECOMPUTE},
}


@pytest.fixture(autouse=True)
def _accelerate_as_before() -> Iterator[None]:
    """Accelerate's state is one for the process: a test that compiles would leave the next one compiling."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random blocks; can be told to fail at one index."""

    def __init__(
        self, count: int = 64, fail_at: int | None = None, error: type[BaseException] = OSError
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 64, (count, 16), generator=generator)
        self.fail_at, self.error = fail_at, error

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.fail_at:
            raise self.error("the data loader fails here")
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


SHORT_ON_CPU: dict[str, Any] = {
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}
"""Arguments of a training of a few steps that says each loss and leaves nothing."""


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(
        actswap: Any, model: Any = None, callback: bool = True, data: Any = None, **more: Any
    ) -> Trainer:
        settings = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 20,
            "per_device_train_batch_size": 2,
            "seed": 3,
            **SHORT_ON_CPU,
        }
        args = ActSwapTrainingArguments(actswap=actswap, **{**settings, **more})
        return Trainer(
            model=model if model is not None else tiny_llama(),
            args=args,
            train_dataset=data or Tokens(),
            eval_dataset=Tokens(8),
            callbacks=[ActSwapCallback(args)] if callback else [],
        )

    return make


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def grad_norms(trainer: Trainer) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
