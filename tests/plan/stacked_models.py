"""Tiny models with two stacks of layers, a decoder and another one, and training steps of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_actswap import model_structure
from hf_actswap.releases import is_since

IDS = torch.randint(3, 58, (2, 12), generator=torch.Generator().manual_seed(1))
IMAGE_TOKEN, IMAGE_TOKENS = 60, 4
_ENCODER = "encoder" if is_since("transformers", "5.6") else "vision_model.encoder"
TOWER = f"model.vision_tower.{_ENCODER}.layers"
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def gemma3() -> nn.Module:
    """A vision tower of 4 layers beside a decoder of 2."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    config = Gemma3Config(
        text_config=_TEXT,
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,
        boi_token_index=61,
        eoi_token_index=62,
        image_token_id=IMAGE_TOKEN,
    )
    return Gemma3ForConditionalGeneration(config)


def bart() -> nn.Module:
    return BartForConditionalGeneration(
        BartConfig(**_SEQ2SEQ, forced_eos_token_id=2, max_position_embeddings=32)
    )


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, **sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    )


def whisper() -> nn.Module:
    return WhisperForConditionalGeneration(
        WhisperConfig(**_SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=32)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gemma3": gemma3, "bart": bart, "t5": t5, "whisper": whisper}
STACKS = {
    "gemma3": ("model.language_model.layers", TOWER, 4),
    "bart": ("model.decoder.layers", "model.encoder.layers", 3),
    "t5": ("decoder.block", "encoder.block", 3),
    "whisper": ("model.decoder.layers", "model.encoder.layers", 3),
}
"""Decoder, the other stack and its layers; each decoder has 2."""


def tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


@cache
def shape_of(name: str) -> Any:
    return model_structure(tiny(name))


def batch_of(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": IDS}
    if name != "gemma3":
        return {"input_ids": IDS, "labels": IDS}
    ids = torch.cat([torch.full((2, IMAGE_TOKENS), IMAGE_TOKEN), IDS], 1)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    kinds = (ids == IMAGE_TOKEN).long()
    return {"input_ids": ids, "labels": ids, "pixel_values": images, "token_type_ids": kinds}


def without_cache(model: nn.Module) -> nn.Module:
    """As a plan has it: with a cache, T5 computes its keys in another layout, and rounds otherwise."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model


def step(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = model(**batch_of(name)).loss
    loss.backward()
    found = {key: item.grad.clone() for key, item in model.named_parameters() if item.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
