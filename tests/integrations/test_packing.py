"""TRL's packed and padding-free batches under a plan: the training is the one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from hf_actswap import ActSwapCallback
from hf_actswap.engine import TiledLogits

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


TILES: dict[str, Any] = {
    "tile_config": {"loss": {"tokens": 5}, "tile": {"op_name": ["mlp", "input_layernorm"], "tokens": 5}}
}


def fine_tuned(settings: dict[str, Any], callback: ActSwapCallback | None, folder: Path) -> Any:
    """Fine-tune a tiny model with TRL; return the trainer, the weights, and the arguments of each call."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(4, 20, (40,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(2, 60, (size,), generator=generator).tolist()} for size in sizes]
    args = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        bf16=False,
        **{**SHORT_ON_CPU, "max_length": 32, **settings},
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
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    return losses(trainer), {name: item.clone() for name, item in model.state_dict().items()}, calls


@pytest.mark.parametrize("way", WAYS)
def test_supervised_fine_tuning(way: str, tmp_path: Path) -> None:
    expected, weights, calls = fine_tuned(WAYS[way], None, tmp_path / "plain")
    restarts = [
        bool((call["position_ids"].diff(dim=-1) != 1).any()) for call in calls if "position_ids" in call
    ]
    assert any(restarts) == (way != "packed, cut anywhere")
    found, trained, _ = fine_tuned(WAYS[way], ActSwapCallback(PLAN), tmp_path / "under a plan")
    assert found == expected
    assert [name for name in weights if not torch.equal(weights[name], trained[name])] == []


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_supervised_fine_tuning_in_tiles(smoothing: float, tmp_path: Path, monkeypatch: Any) -> None:
    """TRL computes its own loss from the head's weight, in tiles of its own; smoothed it reads the logits."""
    settings = {**WAYS["packed"], "label_smoothing_factor": smoothing}
    settings |= {"loss_type": "nll"} if smoothing else {}  # older releases of TRL do not smooth their default
    expected, weights, _ = fine_tuned(settings, None, tmp_path / "plain")
    seen: list[type] = []
    smooth = LabelSmoother.__call__
    monkeypatch.setattr(
        LabelSmoother,
        "__call__",
        lambda self, out, *args, **kwargs: (
            seen.append(type(out["logits"])) or smooth(self, out, *args, **kwargs)
        ),
    )
    found, trained, _ = fine_tuned(settings, ActSwapCallback(TILES), tmp_path / "in tiles")
    assert set(seen) == ({TiledLogits} if smoothing else set())
    assert found == pytest.approx(expected, rel=1e-5)
    for name, one in weights.items():
        torch.testing.assert_close(trained[name], one, rtol=1e-3, atol=1e-5)
