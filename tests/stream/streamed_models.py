"""Tiny models of several families, and steps through them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY, LENGTH, TOKENS, IGNORED = 100, 50, 16, -100
STREAMED: dict[str, Any] = {"stream_config": {"tokens": TOKENS}}
"""Not a divisor of the length: the last chunk has two tokens."""
PACKED = torch.cat([torch.arange(size) for size in (3, 21, 8, 1, 17)])
"""Positions of documents in one chunk, over two and over borders; one of one token."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_EAGER = {"num_local_experts": 4, "experts_implementation": "eager"}  # grouped products have no float64

FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, **more)),
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "gemma2, windows and softcapping": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, sliding_window=11)
    ),
    "gemma3, windows": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=11, layer_types=_SLIDING)
    ),
    "mistral, windows over chunks": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, head_dim=8, sliding_window=23)
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "mixtral, no balancing loss": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **_EAGER)),
    "llama4, blocks": lambda: Llama4ForCausalLM(
        Llama4TextConfig(
            **{**SIZES, "num_hidden_layers": 4},
            head_dim=8,
            intermediate_size_mlp=48,
            attention_chunk_size=12,
            num_local_experts=2,
        )
    ),
}


def made(family: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Return a model in training mode, the same at each call."""
    torch.manual_seed(0)
    return FAMILIES[family](**more).to(dtype).train()


def data(length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return ids and labels of two rows, some labels ignored, also around the borders of chunks."""
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :7] = labels[1, 15:18] = IGNORED
    return {"input_ids": ids, "labels": labels}


def step(model: Any, **given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a step; return the loss, and the gradients by name."""
    model.zero_grad()
    loss = model(**{**data(), **given}).loss
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients that there are, by name."""
    return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


class InFloat64(TorchFunctionMode):
    """What a model of float64 weights computes in fp32 (norms, softmaxes, angles) is computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def truth_of(model: Any, **given: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the same step in float64 throughout."""
    with InFloat64():
        return step(copy.deepcopy(model).double(), **given)[1]


def as_exact(
    streamed: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> bool:
    """Whether streamed fp32 gradients are within 1e-6 of a whole step's, or as close to the truth as these.

    Two rounded results may differ by more than 1e-6 where each of them is further than that from the truth.
    """
    near = furthest(streamed, whole) <= 1e-6
    return near or furthest(streamed, truth) <= 1.5 * furthest(whole, truth)


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference of a gradient in norm; zeros but for rounding have none."""
    assert found.keys() == expected.keys()
    largest = max(float(one.norm()) for one in expected.values())
    return max(
        float((found[name].to(one.dtype) - one).norm() / one.norm())
        for name, one in expected.items()
        if one.norm() > 1e-6 * largest
    )
