"""Counted peaks of a checkpointed step in tiles, held against formulas in bytes per token for five families.

Each number is a tensor that is there at the peak, which is in the backward of one layer. The sizes are those
of Llama-3-8B in ratio; ``U`` is a hidden state. Where the vocabulary is as large in ratio too, the logits
decide the longest sequence without tiles: L + 192 hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_actswap import apply
from tests.engine.tiny_models import tiny
from tests.stream.test_host_sequence import DeviceMeter

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 224, 4, 1, 16
TOKENS, LAYERS, VOCABULARY, TILES = 2048, 2, 4 * 64, 16
EXPERTS, CHOSEN = 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"layer_types": ["full_attention"] * LAYERS, "attn_implementation": "eager"}),
    "phi3": ("Phi3", {}),
    "gemma3": (
        "Gemma3Text",
        {
            "query_pre_attn_scalar": HEAD_DIM,
            "final_logit_softcapping": 5.0,
            "layer_types": ["full_attention"] * LAYERS,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}),
}
"""Name -> family as of `tiny`, and settings."""

U, Q, K, M = 2 * HIDDEN, 2 * HEADS * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM, 2 * INNER
"""Bytes per token in bf16: a hidden state, queries, keys (or values), and one of the MLP's inner states."""
INPUTS = LAYERS * U + 2 * (2 * HEAD_DIM) + 8 + 8
"""What the layers were given, cosines and sines, positions, ids."""
ATTENTION = Q + K + K + Q + 4 * HEADS
"""What it saves: queries and keys after rotation, values, its output, and a log-sum-exp for each head."""
NORM = 2 * U + 4 + U + U
"""What a norm saves: its input in fp32, a root, the same divided by it, and its output for what reads it."""
NORM_BACKWARD = 2 * U + 5 * (2 * U)
"""The norm's input, and five states in fp32."""
MLP_BACKWARD = 6 * M
"""Gate, its activation, up; the gradient of their product, and those of its two factors."""
EXPERTS_BACKWARD = (
    (4 * EXPERTS + 4 + CHOSEN * (4 * 8 + 2 * 4))  # the router's choice and the order of tokens by expert
    + CHOSEN * (U + 2 * M + M + M + U)  # rows, gate and up, activation, product, output
    + CHOSEN * 3 * (2 * U)  # the output's gradient in fp32 for each choice
)
GEMMA_NORM = 2 * U + 4 + 2 * U
"""What Gemma's saves: its input in fp32, a root, and the same divided by it in fp32."""
OF_HEADS = {
    "qwen3": (3 * Q + 4 * HEADS) + (3 * K + 4 * KV_HEADS),
    "gemma3": (4 * Q + 4 * HEADS) + (4 * K + 4 * KV_HEADS),
}
"""What the norms of queries and keys save."""
FUSED = {"phi3": (Q + K) + Q}
"""Values are a part of what one projection makes, all of which stays; and a copy of attention's output."""
SUMS = 4 * 3 * HIDDEN * INNER // TOKENS
"""Sums of the gradients of the MLP's weights, in fp32."""
TIED = dict.fromkeys(("gemma2", "gemma3"), 2 * VOCABULARY * HIDDEN // TOKENS)
"""The head's gradient waits for that of the embedding, which is the same weight."""


SCORES = HEADS * TOKENS * (2 + 4 + 4 + 4) + 2 * TOKENS
"""Of eager attention in the backward of its softmax: the tanh that bounds the scores, probabilities in fp32,
the gradients of these and of the scores in fp32; and the mask, which is the same for all heads."""


def around_the_mlp(family: str) -> int:
    """Return what a layer has saved, and its output's gradient, where the backward of its MLP has ended."""
    saved = INPUTS + U + ATTENTION + OF_HEADS.get(family, 0) + FUSED.get(family, 0) + TIED.get(family, 0)
    if family == "gemma3":  # and the norms behind attention and ahead of the MLP, whose outputs products read
        return saved + (GEMMA_NORM + U) + GEMMA_NORM + (GEMMA_NORM + U)
    return saved + NORM


def with_the_loss_in_tiles(family: str) -> int:
    """The backward of a layer's MLP; Gemma's of the norm behind it, with what the MLP has saved."""
    if family == "gemma3":
        return around_the_mlp(family) + 4 * M + NORM_BACKWARD
    return around_the_mlp(family) + NORM + (EXPERTS_BACKWARD if family == "mixtral" else MLP_BACKWARD)


def and_the_mlp(family: str) -> int:
    """The backward of the norm beside it."""
    return around_the_mlp(family) + NORM_BACKWARD


def and_all_norms(family: str) -> int:
    """The backward of one tile of the MLP; Qwen3's of half of the heads of the queries' norm."""
    if family == "qwen3":
        of_tile = (Q + 2 * Q + Q + 5 * 2 * Q) * 2 // HEADS
        return INPUTS + 3 * U + 3 * Q + of_tile
    # Both norms' outputs, the state between attention and MLP, the MLP's gradient, and that of its input.
    found = INPUTS + 5 * U + ATTENTION + FUSED.get(family, 0) + TIED.get(family, 0)
    if family == "gemma3":
        found += Q + K + 2 * U  # inputs of the norms of heads, and of those behind attention and MLP
    if family == "mixtral":
        of_weights = (4 * 3 + 2 * 2) * EXPERTS * HIDDEN * INNER // TOKENS  # sums, one gradient, a copy
        return found + of_weights + (U + CHOSEN * (U + 6 * M)) // TILES
    if family == "phi3":
        return found + SUMS + 8 * HIDDEN * INNER // TOKENS + (3 * U + 6 * M) // TILES
    return found + SUMS + (3 * U + 7 * M) // TILES


LOSS: dict[str, Any] = {"loss": {"tokens": TOKENS // 8}}
MLP: dict[str, Any] = {"op_name": "feed_forward", "tokens": TOKENS // TILES}
PATHS = ["attention_norm", "ffn_norm", "final_norm"]
MORE_PATHS = {
    "qwen3": ["self_attn.q_norm", "self_attn.k_norm"],
    "gemma2": ["post_attention_layernorm", "post_feedforward_layernorm"],
    "gemma3": [
        *("self_attn.q_norm", "self_attn.k_norm"),
        *("post_attention_layernorm", "post_feedforward_layernorm"),
    ],
}


def tiles(family: str, row: str) -> dict[str, Any]:
    norms = {"op_name": [*PATHS, *MORE_PATHS.get(family, [])], "tokens": TOKENS // TILES}
    return LOSS | {"loss": {}, "MLP": {"tile": [MLP]}, "norms": {"tile": [MLP, norms]}}[row]


def counted_bytes(
    family: str, config: dict[str, Any], sections: dict[str, Any] | None = None, **sizes: Any
) -> int:
    """Return the peak of a second step, without weights, gradients and host memory."""
    name, settings = FAMILIES[family]
    model: Any = tiny(name, **{**SIZES, **settings, **sizes}).to(torch.bfloat16)
    ids, threads = torch.randint(1, model.config.vocab_size, (1, TOKENS)), torch.get_num_threads()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with apply(model, {"recompute_config": {"recompute": True}, "tile_config": config, **(sections or {})}):
        torch.set_num_threads(1)  # kernels of several threads make buffers
        with DeviceMeter(model) as counted:
            model(input_ids=ids, labels=ids).loss.backward()
            counted.peak_bytes = 0
            model(input_ids=ids, labels=ids).loss.backward()
        torch.set_num_threads(threads)
    return counted.peak_bytes


QUICK = {("llama", "norms"), ("gemma3", "norms")}
ROWS: dict[str, Callable[[str], int]] = {
    "loss": with_the_loss_in_tiles,
    "MLP": and_the_mlp,
    "norms": and_all_norms,
}


@pytest.mark.parametrize(
    ("family", "row"),
    [
        pytest.param(family, row, marks=() if (family, row) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        if family != "gemma2"
        for row in ROWS
    ],
)
def test_the_peak_is_that_of_the_formula(family: str, row: str) -> None:
    found = counted_bytes(family, tiles(family, row))
    assert found == pytest.approx(ROWS[row](family) * TOKENS, rel=0.02)


@pytest.mark.slow
def test_each_layer_keeps_its_input_and_no_more() -> None:
    two, six = (counted_bytes("llama", LOSS, num_hidden_layers=layers) for layers in (2, 6))
    assert six - two == pytest.approx(4 * U * TOKENS, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 6])
def test_with_inputs_swapped_the_peak_is_that_of_one_layer(layers: int) -> None:
    swap = {"swap": True, "op_swap": [], "recompute_input": True, "default_prefetch": 1}
    found = counted_bytes("llama", LOSS, {"swap_config": swap}, num_hidden_layers=layers)
    expected = with_the_loss_in_tiles("llama") - (LAYERS - 1) * U
    assert found == pytest.approx(expected * TOKENS, rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["loss", "norms"])
def test_the_scores_of_eager_attention_decide_whatever_runs_in_tiles(row: str) -> None:
    found = counted_bytes("gemma2", tiles("gemma2", row))
    # The normed input, queries, keys (one head for all), the gradients of values and of the residual.
    expected = INPUTS + TIED["gemma2"] + SCORES + 2 * U + 2 * Q + K
    if row == "loss":
        expected += GEMMA_NORM
    assert found == pytest.approx(expected * TOKENS, rel=0.001)


@pytest.mark.slow
def test_without_tiles_the_logits_are_the_peak() -> None:
    assert 185 < counted_bytes("llama", {}, vocab_size=31 * HIDDEN) / TOKENS / U < LAYERS + 192
