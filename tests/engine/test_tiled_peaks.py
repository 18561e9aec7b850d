"""Counted peaks of a checkpointed step in hidden states, with head and loss, MLP and norms in tiles.

The sizes are Llama-3-8B's in ratio, with 4 layers. Without Liger the logits decide the longest sequence; then
one layer's backward does, then its MLP, then its norms.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_actswap import apply
from tests.engine.test_tiled_loss import Meter
from tests.engine.tiny_models import tiny_llama

HIDDEN, TOKENS, LAYERS = 64, 2048, 4
VOCABULARY = 31 * HIDDEN
HIDDEN_STATE_BYTES = TOKENS * HIDDEN * 2


LOSS = {"loss": {"tokens": TOKENS * HIDDEN // (2 * VOCABULARY)}}
MLP = {"op_name": "feed_forward", "tokens": TOKENS // 16}
NORMS = {"op_name": ["attention_norm", "ffn_norm", "final_norm"], "tokens": TOKENS // 16}


@pytest.mark.parametrize(
    ("tiles", "least", "most"),
    [
        pytest.param({}, 185, 200, marks=pytest.mark.slow),
        pytest.param(LOSS, 30, LAYERS + 35, marks=pytest.mark.slow),
        pytest.param({**LOSS, "tile": [MLP]}, 20, LAYERS + 22, marks=pytest.mark.slow),
        ({**LOSS, "tile": [MLP, NORMS]}, 10, LAYERS + 14.3),
    ],
    ids=["checkpointing", "loss", "loss and MLP", "loss, MLP and norms"],
)
def test_peak_in_hidden_states(tiles: dict[str, Any], least: float, most: float) -> None:
    """The upper bounds are what a sketch of the same tiles had; ``LAYERS`` of them are layers' inputs."""
    model = tiny_llama(
        torch.bfloat16,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=7 * HIDDEN // 2,
        num_hidden_layers=LAYERS,
        num_key_value_heads=1,
    )
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with apply(model, {"recompute_config": {"recompute": True}, "tile_config": tiles}):
        model(input_ids=ids, labels=ids).loss.backward()
        with Meter(model) as counted:
            model(input_ids=ids, labels=ids).loss.backward()
    assert least < counted.peak_bytes / HIDDEN_STATE_BYTES < most
