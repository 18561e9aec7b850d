"""``plan --fused-loss``: a training whose loss never has the logits of all tokens, whatever the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import TINY, Run

pytest.importorskip("scipy")

VOCABULARY, HIDDEN, TOKENS = 65536, 512, 8192
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
}
STEP = ("--seq", TOKENS, "--device", "H100")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few small layers below a large head."""
    folder = tmp_path_factory.mktemp("headed")
    (folder / "config.json").write_text(json.dumps({**TINY, **SIZES}))
    return folder


def found(run: Run, model: Path, *words: Any) -> dict[str, Any]:
    document = run("plan", model, *words, "--json").document
    assert document["ok"], document
    return dict(document)


def peak_bytes(document: dict[str, Any], name: str = "nothing") -> int:
    return int(document["predicted"][name]["peak_bytes"])


def test_it_is_predicted_as_the_loss_in_tiles(run: Run, model: Path, tmp_path: Path) -> None:
    tiled = tmp_path / "tiled.yaml"
    tiled.write_text(f"tile_config: {{loss: {{tokens: {TOKENS * HIDDEN // VOCABULARY}}}}}")
    whole, in_tiles = found(run, model, *STEP), found(run, model, tiled, *STEP)
    saved = tmp_path / "plan.json"
    fused = found(run, model, *STEP, "--fused-loss", "--save", saved)
    logits_bytes = TOKENS * VOCABULARY * 4  # in fp32
    assert peak_bytes(whole) > peak_bytes(fused) + logits_bytes
    assert peak_bytes(fused) == peak_bytes(in_tiles)
    assert fused["predicted"]["nothing"]["step_ms"] == in_tiles["predicted"]["nothing"]["step_ms"]
    assert fused["step"]["fused_loss"] is True
    assert json.loads(saved.read_text()).get("tiles", []) == []


def test_a_plan_in_tiles_leaves_the_loss_to_the_training(run: Run, model: Path, tmp_path: Path) -> None:
    asked, saved = tmp_path / "asked.yaml", tmp_path / "plan.json"
    asked.write_text("memory: {mode: adaptive, preference: performance}")
    step = (asked, *STEP, "--optimizer", "none", "--fused-loss")
    chosen = found(run, model, *step, "--budget", "1.5GiB", "--save", saved)
    assert chosen["chosen_tiles"] == {"loss": "off", "tile": [{"op_name": "feed_forward"}]}
    tiles = json.loads(saved.read_text())["tiles"]
    assert tiles
    assert all(tile["scope"] != "head" for tile in tiles)


def test_the_lines_say_it(run: Run, model: Path) -> None:
    assert ", fused loss" in run("plan", model, *STEP, "--fused-loss").out
