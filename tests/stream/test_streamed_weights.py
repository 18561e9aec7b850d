"""Streamed sequences with the frozen weights of layers on the host: the same bits, once a chunk and pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap import apply
from hf_actswap.engine import AppliedPlan
from tests.engine.recording_transfer import RecordingTransfer
from tests.stream.streamed_models import LENGTH, SIZES, STREAMED, TOKENS, step

HOST: dict[str, Any] = {"memory": {"weights": "host"}}
CHUNKS = -(-LENGTH // TOKENS)


def lora(layers: int = 4) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": layers}))
    settings: Any = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**settings)).train()


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"recompute_config": {"recompute": [2]}},
        {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": [1]}]}},
    ],
    ids=["whole layers", "some layers kept", "swap"],
)
def test_bits_and_bytes(beside: dict[str, Any]) -> None:
    model, bare = lora(), lora()
    with apply(bare, STREAMED | beside):
        expected = [step(bare) for _ in range(3)]
    applied = apply(model, STREAMED | beside | HOST, transfer=RecordingTransfer())
    assert isinstance(applied, AppliedPlan)
    weights = applied.weights
    assert weights is not None
    totals = []
    for loss, gradients in expected:
        found_loss, found = step(model)
        assert torch.equal(found_loss, loss)
        assert found.keys() == gradients.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
        totals.append(weights.stats())
    (size,) = set(weights.sizes_bytes.values())
    # Forward alone: all layers. Then without those that stay at the turns, two of each.
    each = CHUNKS * (4 + 2 * 4 - 4) * size
    later = [now - before for before, now in pairwise(totals)]
    assert [one.prefetched_bytes for one in later] == [each, each]
    assert [one.late_prefetches for one in later] == [0, 0], "a layer is always asked for ahead"
    applied.remove()


@pytest.mark.parametrize("layers", [1, 2])
def test_no_more_layers_than_the_window(layers: int) -> None:
    model, bare = lora(layers), lora(layers)
    with apply(bare, STREAMED):
        loss, expected = step(bare)
    with apply(model, STREAMED | HOST) as applied:
        found_loss, found = step(model)
        assert applied.stats().prefetched_bytes > 0
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
