"""Tiny causal language models of all families of transformers, alike in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 96, 32, 48, 2, 4, 2, 8

_DEPTHS = ("num_hidden_layers", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "embedding_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), INNER),
    **dict.fromkeys(_DEPTHS, LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **{"num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "global_head_dim": HEAD_SIZE},
    **{"max_position_embeddings": 64, "sliding_window": 6, "is_decoder": True, "tie_word_embeddings": False},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "num_expert_group"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"output_router_logits": True, "router_aux_loss_coef": 0.5},
}
_LATENT: dict[str, Any] = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"index_head_dim": 8, "index_n_heads": 8, "index_topk": 8},
}
_MIXERS: dict[str, Any] = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "state_size": 8, "ssm_state_size": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4, "n_groups": 1},
}
_NO_RANDOMNESS = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "emb_pdrop"),
    *("dropout", "activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"),
    *("resid_dropout", "residual_dropout", "embed_dropout", "classifier_dropout", "decoder_layerdrop"),
    *("router_jitter_noise", "input_jitter_noise"),
)
_COMMON = {**_SIZES, **_EXPERTS, **_LATENT, **_MIXERS, **dict.fromkeys(_NO_RANDOMNESS, 0.0)}

_LATENT_HEADS = {"num_key_value_heads": HEADS, "head_dim": 4}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_CONVOLUTION_FIRST = {"layer_types": ["conv", "full_attention"]}
_WINDOW_HEADS = {
    **{"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": KV_HEADS, "swa_head_dim": HEAD_SIZE}
}
_BYTES = {
    **{name: _SIZES[name] for name in ("vocab_size", "num_hidden_layers", "num_attention_heads")},
    **{"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "dropout": 0.0},
    "hidden_size_global": 64,
}

_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "youtu", "axk1", "axk2"), _LATENT_HEADS),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3"), _LATENT_HEADS),
    **dict.fromkeys(("dots3_note_text", "hy_v4"), _LATENT_HEADS),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _LATENT_HEADS | _LINEAR_FIRST | _DENSE_FIRST),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR_FIRST),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONVOLUTION_FIRST),
    **{family: {"rotary_dim": 4} for family in ("gptj", "codegen")},
    **{family: {"output_router_logits": False} for family in ("deepseek_v4", "flint")},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "blt": {
        **dict.fromkeys(("patcher_config", "encoder_config", "decoder_config"), _BYTES),
        "global_config": {**_BYTES, "hidden_size": 64, "head_dim": 16},
        **{"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "ctrl": {"dff": INNER},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": KV_HEADS, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": INNER, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma2": {"attn_implementation": "eager", "query_pre_attn_scalar": HEAD_SIZE},
    "gemma3_text": {"query_pre_attn_scalar": HEAD_SIZE},
    "gemma3n_text": {
        **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 8},
        **{"vocab_size_per_layer_input": VOCABULARY, "activation_sparsity_pattern": [0.5, 0.0]},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_text": {
        **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
        **{"vocab_size_per_layer_input": VOCABULARY},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granite": {"residual_multiplier": 0.5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    **dict.fromkeys(("inkling_text", "inkling2_text"), _WINDOW_HEADS),
    "jamba": {
        f"{what}_layer_{part}": n for what in ("attn", "expert") for part, n in (("offset", 1), ("period", 2))
    },
    "longcat_flash": {**_LATENT_HEADS, "zero_expert_num": 2},
    "mamba2": {"head_dim": 8, "num_heads": 8},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_group": 1,
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"mlp_only_layers": [0], "norm_topk_prob": True},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{
            "indexer_compress_ratio": 2,
            "hc_lowrank": 8,
            "ngram_vocab_size_base": 64,
            "ple_embed_dim": HIDDEN,
        },
        **{"split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 2},
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "roc_bert": {
        f"{what}_{of}": n
        for what in ("pronunciation", "shape")
        for of, n in (("vocab_size", 64), ("embed_dim", 16))
    },
    "xlnet": {"d_head": HEAD_SIZE, "n_head": HEADS},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        **{"num_mem_blocks": 1, "n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_headdim": 16},
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Where the common sizes do not do: what a family's configuration asks for besides, or otherwise."""

_INPUTS = ["emu3", "fuyu", "git", "got_ocr2", "mllama", "moshi", "moss_transcribe_diarize", "phi4_multimodal"]
_INPUTS_AROUND_TEXT = [
    "dots3_note",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
]

NOT_TESTED = {
    **dict.fromkeys(_INPUTS, "it needs images or sound"),
    **dict.fromkeys(
        _INPUTS_AROUND_TEXT, "it needs images or sound; its language model (`..._text`) is tested"
    ),
    "gemma3": "it needs images; `tests/parallel/test_patch_ways.py` divides one between 2 ranks",
    "llama4": "it needs images; rejected at tp 2: pass its `language_model`, which is `llama4_text`",
    **dict.fromkeys(("musicgen", "musicgen_melody"), "its language model is inside another model"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "it reads hidden states of another model"
    ),
    **dict.fromkeys(("internlm3", "iquestcoder", "gpt-sw3"), "it uses the classes of another family"),
    "reformer": "it draws random numbers that no seed determines",
    "cpmant": "its `input_ids` have a format of their own",
    "xlstm": "its states do not follow the batch in training",
}
"""Families of transformers that no tiny model is made of here, and why."""

FAMILIES = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_TESTED)))
"""``model_type`` of all others."""

QUICK = (
    *("llama", "qwen3", "qwen3_next", "mixtral", "gemma3_text", "gemma3n_text", "phi3", "gpt2", "gpt_neox"),
    *("gpt_oss", "bloom", "falcon", "cohere2", "deepseek_v3", "llama4_text"),
)
"""Of the most used those whose layers differ most."""
QUICK_BOTH_WAYS = ("llama", "mixtral", "gpt2", "bloom")
"""Those that are quickly tested without sequence parallelism too."""
MOST_USED = (
    *QUICK,
    *("qwen2", "qwen3_moe", "mistral", "gemma", "gemma2", "phi", "opt", "olmo2", "granite", "glm4"),
    *("glm4_moe", "deepseek_v2", "smollm3", "starcoder2"),
)


def tiny_model(family: str, seed: int = 3, **settings: Any) -> Any:
    """Return a model in float32, in training mode, with random norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_configuration(family, settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model.train()


def _configuration(family: str, settings: dict[str, Any]) -> Any:
    """Make one of the common sizes that it knows, under the names that it calls them."""
    kind: Any = CONFIG_MAPPING[family]
    aliases, known = getattr(kind, "attribute_map", {}), kind().to_dict()
    own = {**_OWN.get(family, {}), **settings}
    taken = {aliases.get(name, name) for name in own}
    sizes = {
        aliases.get(name, name): size for name, size in _COMMON.items() if aliases.get(name, name) in known
    }
    return kind(**{name: size for name, size in sizes.items() if name not in taken}, **own)


def configuration_of_depth(family: str, layers: int) -> Any:
    """Return the configuration of a tiny model with more layers: those of the usual one, in turn."""
    kind: Any = CONFIG_MAPPING[family]
    aliases, known = getattr(kind, "attribute_map", {}), kind().to_dict()
    depths = {aliases.get(name, name) for name in _DEPTHS}
    own = {
        name: value * (layers // LAYERS) if isinstance(value, list) and len(value) == LAYERS else value
        for name, value in _OWN.get(family, {}).items()
    }
    return _configuration(family, {**own, **dict.fromkeys(depths & known.keys(), layers)})
