"""Tiny models of every family that is divided, alike in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 96, 32, 48, 2, 4, 2, 8

_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
_WINDOW = {"sliding_window": 6}
_GEMMA = {"head_dim": HEAD_SIZE, "query_pre_attn_scalar": HEAD_SIZE, **_WINDOW}

_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {**_WINDOW, "head_dim": HEAD_SIZE}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {**_GEMMA, "attn_implementation": "eager"}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _GEMMA),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"hidden_dropout": 0.0}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {**_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "head_dim": HEAD_SIZE,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
    ),
    "granite": (GraniteConfig, GraniteForCausalLM, {"residual_multiplier": 0.5}),
}
"""``granite`` is of no known family: it is read off its plan."""

FAMILIES = [name for name in _KINDS if name != "granite"]


def tiny_model(kind: str, seed: int = 3, **settings: Any) -> Any:
    """Return a model in float32, in training mode, with random norms and biases too."""
    config_class, model_class, own = _KINDS[kind]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shape, **own, **settings}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model.train()
