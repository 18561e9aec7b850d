"""``tile_config`` under the Trainer, in an Accelerate loop, and beside the planner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Trainer

import hf_actswap
from hf_actswap import ActSwapTrainingArguments
from hf_actswap.engine import TiledLogits
from hf_actswap.report.write_report import write_report
from tests.engine.test_tiled_loss import Meter
from tests.engine.tiny_models import tiny_llama as a_llama
from tests.quick_cases import quick_first

from .conftest import SHORT_ON_CPU, Tokens, losses, tiny_llama

TILES: dict[str, Any] = {
    "tile_config": {"loss": {"tokens": 5}, "tile": {"op_name": ["mlp", "input_layernorm"], "tokens": 5}}
}


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The types of the logits that models give."""
    seen: list[type] = []
    forward = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        if hasattr(out, "logits") and not isinstance(out.logits, FakeTensor):
            seen.append(type(out.logits))
        return out

    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    return seen


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
        pytest.param({"bf16": True, "average_tokens_across_devices": False}, marks=pytest.mark.slow),
    ],
    ids=["items in batch", "label smoothing", "autocast"],
)
def test_the_trainer_trains_as_without(
    make_trainer: Callable[..., Trainer], settings: dict[str, Any], shapes: list[type]
) -> None:
    data = Tokens()
    runs = {}
    for name, config in (("whole", None), ("tiled", TILES)):
        torch.manual_seed(0)
        trainer = make_trainer(config, data=data, max_steps=4, **settings)
        shapes.clear()
        trainer.train()
        runs[name] = losses(trainer)
        assert set(shapes) == {TiledLogits if config else torch.Tensor}
        assert "forward" not in vars(trainer.model.lm_head), "the head is its own again"
    assert len(runs["tiled"]) == 4
    assert runs["tiled"] == pytest.approx(runs["whole"], rel=1e-3 if "bf16" in settings else 1e-6)


WIKITEXT = Path(__file__).resolve().parents[3] / "shared" / "wikitext-2" / "valid.txt"
LONG, LONG_VOCABULARY = 10_000, 4096
LONG_TILES = """
recompute_config: {recompute: true}
tile_config:
  loss: auto
  tile: [{op_name: [feed_forward, attention_norm, ffn_norm, final_norm]}]
"""


@pytest.mark.slow
@pytest.mark.skipif(not WIKITEXT.exists(), reason="the text is not in the repository")
def test_ten_thousand_tokens_of_wikitext(tmp_path: Path) -> None:
    """By the Trainer, from YAML: less than a quarter of the peak of checkpointing alone, the same losses."""
    words = WIKITEXT.read_text(encoding="utf-8").split()
    ids = torch.tensor([crc32(word.encode()) % LONG_VOCABULARY for word in words])
    blocks = ids[: len(ids) // LONG * LONG].view(-1, LONG)
    data = [{"input_ids": block, "labels": block} for block in blocks]
    (tmp_path / "tiles.yaml").write_text(LONG_TILES, encoding="utf-8")
    found = []
    for config in ({"recompute_config": {"recompute": True}}, str(tmp_path / "tiles.yaml")):
        sizes = {"hidden_size": 64, "intermediate_size": 224, "max_position_embeddings": LONG}
        model = a_llama(vocab_size=LONG_VOCABULARY, **sizes)
        args = ActSwapTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            max_steps=3,
            actswap=config,
            learning_rate=1e-3,
            **SHORT_ON_CPU,
        )
        trainer = Trainer(model=model, args=args, train_dataset=data)
        with Meter(model) as counted:
            trainer.train()
        found.append((losses(trainer), counted.peak_bytes))
    (whole, whole_bytes), (tiled, tiled_bytes) = found
    assert tiled == pytest.approx(whole, rel=1e-5)
    assert tiled[-1] < tiled[0]
    assert 4 * tiled_bytes < whole_bytes


@pytest.mark.parametrize("reads", quick_first([True, False], 1))
def test_evaluation_inside_training(make_trainer: Callable[..., Trainer], reads: bool) -> None:
    found = []
    for config in (None, TILES):
        trainer = make_trainer(config, max_steps=2, eval_strategy="steps", eval_steps=1, learning_rate=1e-3)
        if reads:
            trainer.compute_metrics = lambda seen: {
                "right": float((seen.predictions.argmax(-1) == seen.label_ids).mean()),
                "sum": float(seen.predictions.sum()),
            }
        trainer.train()
        found.append([entry for entry in trainer.state.log_history if "eval_loss" in entry])
    assert len(found[0]) == 2
    for whole, tiled in zip(*found, strict=True):
        for key in ("eval_loss", *(("eval_right", "eval_sum") if reads else ())):
            assert tiled[key] == pytest.approx(whole[key], rel=1e-5)


def test_the_plan_and_the_peak_are_logged(
    make_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hf_actswap"):
        metrics = make_trainer({"log": "full", **TILES}, max_steps=5).train().metrics
    assert "tiles of 5 tokens" in caplog.text
    assert "Nothing is swapped" not in caplog.text
    last = caplog.records[-1].getMessage()
    assert last.startswith("Peak memory ")
    assert "(what it would be without tiles or chunks is not known)" in last
    assert "actswap_peak_gib" in metrics
    assert "actswap_saved_gib" not in metrics
    assert "without a plan" not in write_report(tmp_path / "out").page.read_text()


@pytest.mark.parametrize("order", quick_first(["prepare", "before", "after"], 2))
def test_accelerate_loop(order: str, tmp_path: Path) -> None:
    runs = []
    for config in ({}, TILES):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
        model: Any = tiny_llama()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = accelerator.prepare(torch.utils.data.DataLoader(Tokens(16), batch_size=2))
        applied: Any
        if order == "prepare":
            prepared = hf_actswap.prepare(accelerator, model, config, optimizer)
            model, optimizer, applied = prepared.model, prepared.optimizer, prepared.applied
        else:
            applied = hf_actswap.apply(model, config) if order == "before" else None
            model, optimizer = accelerator.prepare(model, optimizer)
            applied = applied or hf_actswap.apply(model, config)
        run = []
        for batch in loader:
            with accelerator.accumulate(model):
                out = model(**batch)
                assert isinstance(out.logits, TiledLogits) == bool(config), "in fp32, and still not made"
                assert out.logits.dtype == torch.float32
                accelerator.backward(out.loss)
                optimizer.step()
                optimizer.zero_grad()
            run.append(out.loss.item())
        applied.remove()
        runs.append(run)
    assert runs[1] == pytest.approx(runs[0], rel=1e-3)


def test_the_planner_plans_beside_it() -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = {"mode": "smart_swap", "budget_gib": 1, "warmup_steps": 1, "search_steps": 1}
    applied = hf_actswap.apply(model, {**TILES, "memory": memory}, optimizer=optimizer)
    ids = Tokens(2).ids
    for _ in range(5):
        out = model(input_ids=ids, labels=ids)
        assert isinstance(out.logits, TiledLogits)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {str(tile) for tile in applied.plan.tiles} == {"tiles of 5 tokens"}
    assert len(applied.plan.tiles) == 1 + 2 * 4
    applied.remove()
    assert "forward" not in vars(model.lm_head)


def test_adaptive_tiles_what_does_not_fit(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """The first backward runs out of memory, and its step is run again in tiles."""
    ids = torch.randint(0, 1024, (4, 2560), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    budget_bytes = 24_000_000
    memory = {"mode": "adaptive", "budget_gib": budget_bytes / 2**30, "warmup_steps": 1, "search_steps": 1}
    runs = []
    for config in (None, {"memory": memory}):
        model = a_llama(vocab_size=1024, num_hidden_layers=2, max_position_embeddings=2560)
        trainer = make_trainer(config, model, data=data, max_steps=3, per_device_train_batch_size=1)
        with caplog.at_level(logging.INFO, logger="hf_actswap"):
            metrics = trainer.train().metrics
        runs.append(losses(trainer))
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert metrics["actswap_peak_gib"] * 2**30 <= budget_bytes
    assert "a micro-batch ran out of memory" in caplog.text
    assert "tile_config head: asked nothing, got tiles: no mix of keep, swap and recompute" in caplog.text
    assert "adaptive: stable" in caplog.text
    assert "forward" not in vars(trainer.model.lm_head)
