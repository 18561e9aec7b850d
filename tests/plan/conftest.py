"""Tiny models of every family, their structures, and gradients to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_actswap import MemoryPlan, load_config, model_structure, resolve_plan
from hf_actswap.plan import ModelStructure

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}

FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "gpt_neox": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 8},
    "deepseek_v3": {  # layer 0 is dense, the others are mixtures of experts
        **_EXPERTS,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 2,
    },
}

OTHER_SIZES: dict[str, dict[str, Any]] = {
    "bert": {},
    "electra": {"embedding_size": 16},
    "bart": {
        "d_model": 16,
        **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "phi": {},
    "starcoder2": {},
    "bloom": {"n_layer": 2, "n_head": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 8},
    "longcat_flash": {  # two attentions, norms and dense networks in a layer, each pair a list
        **{"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 8},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
        **{"v_head_dim": 8, "head_dim": 4, "ffn_hidden_size": 24, "num_hidden_layers": 4},  # attentions
    },
    "qwen3_next": {  # a layer of linear attention, then one of attention
        **_EXPERTS,
        "num_experts": 4,
        "head_dim": 8,
        "shared_expert_intermediate_size": 8,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""Families that call things otherwise than those of MindFormers."""

_CLASSES = {"bert": AutoModelForMaskedLM, "electra": AutoModelForMaskedLM, "bart": AutoModelForSeq2SeqLM}

MakeModel = Callable[..., nn.Module]
MakeStructure = Callable[..., ModelStructure]
MakePlan = Callable[..., MemoryPlan]
Gradients = Callable[[nn.Module], dict[str, torch.Tensor]]


def _tiny_model(family: str = "llama", num_layers: int = 2) -> nn.Module:
    sizes = {**_SIZES, "num_hidden_layers": num_layers, **{**FAMILY_SIZES, **OTHER_SIZES}[family]}
    torch.manual_seed(0)
    auto_class = _CLASSES.get(family, AutoModelForCausalLM)
    model: nn.Module = auto_class.from_config(CONFIG_MAPPING[family](**sizes))
    return model.train()


@cache
def _tiny_structure(family: str = "llama", num_layers: int = 2) -> ModelStructure:
    return model_structure(_tiny_model(family, num_layers))


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: on a busy machine, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_model() -> MakeModel:
    """(family, num_layers) -> a new model with random weights, always the same ones."""
    return _tiny_model


@pytest.fixture(scope="session")
def tiny_structure() -> MakeStructure:
    """(family, num_layers) -> the model structure of such a model."""
    return _tiny_structure


@pytest.fixture(scope="session")
def plan_of() -> MakePlan:
    """(mapping, family, num_layers) -> the plan of its YAML text, which must survive the way through JSON."""

    def resolve(document: Any, family: str = "llama", num_layers: int = 4) -> MemoryPlan:
        shape = _tiny_structure(family, num_layers)
        plan = resolve_plan(load_config(yaml.safe_dump(document, sort_keys=False)), shape)
        assert resolve_plan(load_config(document), shape) == plan
        assert MemoryPlan.from_json(plan.to_json()) == plan
        return plan

    return resolve


@pytest.fixture(scope="session")
def gradients() -> Gradients:
    """model -> loss and gradients of one training step on fixed tokens, by parameter name."""

    def step(model: nn.Module) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
        model.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **found}

    return step
