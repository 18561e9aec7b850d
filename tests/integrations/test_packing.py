"""TRL's packed and padding-free batches under a plan: the training is the one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_actswap import ActSwapCallback

from .conftest import SHORT_ON_CPU, losses, tiny_llama
from .test_planner_loops import tokenizer

WAYS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "packing_strategy": "bfd"},
    "packed, cut anywhere": {"packing": True, "packing_strategy": "wrapped"},
    "padding-free": {"padding_free": True, "max_length": None},
}
PLAN = {
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention", "backward_prefetch": 5, "layers": [0]}],
    },
    "recompute_config": {"recompute": [1], "select_recompute": {"feed_forward": [0]}},
    "memory": {"min_tensor_mib": 1e-6},
}


@pytest.mark.parametrize("way", WAYS)
def test_supervised_fine_tuning(way: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(4, 20, (40,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(2, 60, (size,), generator=generator).tolist()} for size in sizes]

    def train(callbacks: list[Any], folder: str) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
        args = trl.SFTConfig(
            output_dir=str(tmp_path / folder),
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_checkpointing=False,
            bf16=False,
            **{**SHORT_ON_CPU, "max_length": 32, **WAYS[way]},
        )
        model = tiny_llama()
        model.config.use_cache = False
        calls: list[Any] = []
        model.register_forward_pre_hook(lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True)
        trainer = trl.SFTTrainer(
            model=model,
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=callbacks,
        )
        trainer.train()
        return losses(trainer), {name: item.clone() for name, item in model.state_dict().items()}, calls

    expected, weights, calls = train([], "plain")
    restarts = [
        bool((call["position_ids"].diff(dim=-1) != 1).any()) for call in calls if "position_ids" in call
    ]
    assert any(restarts) == (way != "packed, cut anywhere")
    callback = ActSwapCallback(PLAN)
    found, trained, _ = train([callback], "under a plan")
    assert found == expected
    assert [name for name in weights if not torch.equal(weights[name], trained[name])] == []
