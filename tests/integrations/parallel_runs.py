"""Trainings of a tiny model that are compared over numbers of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    set_seed,
)

from hf_actswap import ActSwapCallback, ActSwapTrainer, ActSwapTrainingArguments
from tests.integrations.conftest import SHORT_ON_CPU

LENGTH, VOCABULARY, STEPS = 15, 67, 5


def parallel(size: int, **sections: Any) -> dict[str, Any]:
    """The configuration of so many ranks per model, and other sections."""
    if size == 1:
        return sections
    return {"parallel_config": {"tensor_parallel_size": size, "sequence_parallel_enabled": True}, **sections}


def tiny_llama() -> LlamaForCausalLM:
    """A vocabulary that no number of ranks divides, and fewer key heads than four ranks."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=64,
        )
    )


def tiny_mixtral() -> MixtralForCausalLM:
    """With the loss that balances its experts."""
    set_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=64,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
        )
    )


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random blocks of a length that no number of ranks divides, with unequal numbers of labels of -100."""

    def __init__(self, count: int = 48, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: (index * 5) % 13] = -100
        return {"input_ids": self.ids[index], "labels": labels}


class InOrder:
    """Batches in the order of the data, which is the same for any number of data ranks."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class OrderedTrainer(InOrder, ActSwapTrainer):
    """Ours."""


class OrderedStockTrainer(InOrder, Trainer):
    """The plain one."""


@dataclass
class Run:
    """What a training left: from the log, and whole weights (on ranks that write)."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    weights: dict[str, torch.Tensor]
    drift: float


def make(
    actswap: Any,
    folder: Path,
    kind: Callable[..., Trainer] = OrderedTrainer,
    model: Any = None,
    callbacks: list[Any] | None = None,
    data: Any = None,
    **more: Any,
) -> Any:
    """A Trainer; nothing of Accelerate's state is left of the one before."""
    AcceleratorState._reset_state(reset_partial_state=False)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "learning_rate": 0.01,
        "adam_epsilon": 1e-4,  # by default Adam makes a step of full size of a gradient that is mere rounding
        "seed": 3,
        **SHORT_ON_CPU,
    }
    args = ActSwapTrainingArguments(actswap=actswap, **{**settings, **more})
    return kind(
        model=tiny_llama() if model is None else model,
        args=args,
        train_dataset=data or Rows(),
        eval_dataset=Rows(10, seed=2),
        callbacks=[ActSwapCallback(args)] if callbacks is None else callbacks,
    )


def train(trainer: Any, resume: str | None = None) -> Run:
    """Train and read the log."""
    trainer.train(resume_from_checkpoint=resume)
    return read(trainer)


def read(trainer: Any) -> Run:
    """Read the log and the weights."""
    held = getattr(trainer, "parallel", None)
    history = trainer.state.log_history
    if held is None:
        weights, drift = {k: v.clone() for k, v in trainer.model.state_dict().items()}, 0.0
    else:
        weights, drift = held.patched.full_state_dict(), replica_drift(held)

    def column(name: str) -> list[float]:
        return [entry[name] for entry in history if name in entry]

    return Run(column("loss"), column("grad_norm"), column("eval_loss"), weights, drift)


def replica_drift(held: Any) -> float:
    """The largest difference between ranks of what they hold alike; parts are compared over data ranks."""
    largest = 0.0
    sharded = held.patched.sharded
    for name, parameter in held.patched.model.named_parameters():
        groups = [held.mesh.data_parallel_group]
        if name not in sharded:
            groups.append(held.mesh.tensor_parallel_group)
        for group in groups:
            own = parameter.detach()
            parts = [torch.empty_like(own) for _ in range(group.size())]
            torch.distributed.all_gather(parts, own.contiguous(), group=group)
            largest = max(largest, *((part - own).abs().max().item() for part in parts))
    return largest
