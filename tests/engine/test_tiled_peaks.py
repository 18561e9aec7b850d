"""Counted peaks of a checkpointed step in hidden states, with head and loss, MLP and norms in tiles.

The sizes are Llama-3-8B's in ratio, with 4 layers. Without Liger the logits decide the longest sequence; then
one layer's backward does, then its MLP, then its norms.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap import apply

HIDDEN, TOKENS, LAYERS = 64, 2048, 4
VOCABULARY = 31 * HIDDEN
HIDDEN_STATE_BYTES = TOKENS * HIDDEN * 2


class Counted(TorchDispatchMode):
    """The bytes of all storages that ops have made and that live."""

    def __init__(self, known: Any) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen = {item.untyped_storage()._cdata for item in known}

    def _free(self, key: int, size_bytes: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor and not leaf.is_meta:
                storage = leaf.untyped_storage()
                key, size_bytes = storage._cdata, storage.nbytes()
                if key not in self._seen:
                    self._seen.add(key)
                    self.live_bytes += size_bytes
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    weakref.finalize(storage, self._free, key, size_bytes)
        return out


LOSS = {"loss": {"tokens": TOKENS * HIDDEN // (2 * VOCABULARY)}}
MLP = {"op_name": "feed_forward", "tokens": TOKENS // 16}
NORMS = {"op_name": ["attention_norm", "ffn_norm", "final_norm"], "tokens": TOKENS // 16}


@pytest.mark.parametrize(
    ("tiles", "least", "most"),
    [
        ({}, 185, 200),
        (LOSS, 30, LAYERS + 35),
        ({**LOSS, "tile": [MLP]}, 20, LAYERS + 22),
        ({**LOSS, "tile": [MLP, NORMS]}, 10, LAYERS + 14.3),
    ],
    ids=["checkpointing", "loss", "loss and MLP", "loss, MLP and norms"],
)
def test_peak_in_hidden_states(tiles: dict[str, Any], least: float, most: float) -> None:
    """The upper bounds are what a sketch of the same tiles had; ``LAYERS`` of them are layers' inputs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=7 * HIDDEN // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=TOKENS,
    )
    model = LlamaForCausalLM(config).bfloat16().train()
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with apply(model, {"recompute_config": {"recompute": True}, "tile_config": tiles}):
        model(input_ids=ids, labels=ids).loss.backward()
        known = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), ids]
        with Counted(known) as counted:
            model(input_ids=ids, labels=ids).loss.backward()
    assert least < counted.peak_bytes / HIDDEN_STATE_BYTES < most
