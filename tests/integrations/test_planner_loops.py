"""The planner in loops that Accelerate drives, and under TRL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hf_actswap
from hf_actswap import ActSwapCallback, PlanError
from hf_actswap.planner import Planner

from .conftest import SHORT_ON_CPU, losses, tiny_llama
from .test_planner_training import SHORT, Blocks, Watch, planned


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()


def train(config: Any, micro_batches: int, steps: int = 7) -> tuple[list[float], list[str]]:
    """Train with `hf_actswap.prepare`; return the loss of each micro-batch and the phase of each step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    bare = tiny_llama()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    prepared = hf_actswap.prepare(accelerator, bare, config, optimizer)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Blocks(), batch_size=4))
    found: list[float] = []
    phases: list[str] = []
    with prepared.applied as applied:
        for number, batch in zip(range(micro_batches * steps), loader, strict=False):
            if number % micro_batches == 0 and isinstance(applied, Planner):
                phases.append(applied.phase)
            with accelerator.accumulate(prepared.model):
                loss = prepared.model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.model.parameters(), 1.0)
                prepared.optimizer.step()
                prepared.optimizer.zero_grad()
            found.append(loss.item())
    return found, phases


@pytest.mark.parametrize("micro_batches", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_accumulate(micro_batches: int) -> None:
    """A step ends when the optimizer has stepped, not when Accelerate's was asked to."""
    expected, _ = train({}, micro_batches)
    found, phases = train(planned("adaptive"), micro_batches)
    assert found == expected
    assert phases == ["warm-up", "warm-up", "search", "search", "stable", "stable", "stable"]


@pytest.mark.slow
def test_states_of_the_optimizer() -> None:
    expected, _ = train({}, 1)
    assert train(planned(preference="memory_saving"), 1)[0] == expected


def test_it_needs_the_optimizer() -> None:
    with pytest.raises(PlanError, match="optimizer=optimizer"):
        hf_actswap.prepare(Accelerator(cpu=True), tiny_llama(), planned())


@pytest.mark.slow
def test_supervised_fine_tuning_with_adapters(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from peft import LoraConfig

    rows = [{"input_ids": row.tolist()} for row in Blocks(32).ids]

    def make(callbacks: list[Any], folder: str) -> Any:
        args = trl.SFTConfig(
            output_dir=str(tmp_path / folder),
            max_steps=7,
            per_device_train_batch_size=4,
            gradient_checkpointing=False,
            max_length=64,
            bf16=False,
            **SHORT_ON_CPU,
        )
        return trl.SFTTrainer(
            model=tiny_llama(),
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
            callbacks=callbacks,
        )

    plain = make([], "plain")
    plain.train()
    memory = {**SHORT, "mode": "smart_swap", "reduce_by_gib": 300_000 / 2**30}  # TRL's loss needs much
    trainer = make([ActSwapCallback({"memory": memory})], "planned")
    watch = Watch(trainer)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert watch.phases[-1] == "stable"
    assert watch.rows


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, 64)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
