"""Model families, as data: MindFormers' names for the ops of Hugging Face layers.

Each table maps a path in MindFormers' layer (`spec: Llama layer of mindformers.models.llama`, and the
Megatron-core names of its later versions) to op paths of the Hugging Face layer. ``None`` means that the
reference has such an op and we have none: a rule that names it has no effect, and the plan says so. A
target that ends in ``.*`` stands for every function called directly by that module: what an activation
module computes has the activation's name, which the reference always spells ``silu``.

Targets that a given layer does not have (the dense MLP in an MoE layer) are passed over for that layer.
"""

from __future__ import annotations

from collections.abc import Mapping

Targets = str | tuple[str, ...] | None
NameTable = Mapping[str, Targets]

DEFAULT_SWAP_PATTERN = r".*\.flash_attention"
DEFAULT_SELECT_PATTERNS = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
DEFAULT_COMM_PATTERNS = (r".*\.norm",)

ATTENTION_MODULES = ("self_attn", "attention")
"""Names of the attention module inside a layer."""

EXPERTS_MODULE = "experts"
"""Name of the module that holds the routed experts of an MoE block."""

_UNMATCHED_ATTENTION = ("apply_rotary_emb", "merger_head_transpose", "transpose", "reshape", "cast", "cat")


def _attention(hf: str, wq: str, wk: str, wv: str, wo: str) -> dict[str, Targets]:
    table: dict[str, Targets] = {
        "attention": hf,
        "attention.flash_attention": f"{hf}.flash_attention",
        "attention.flash_attention.flash_attention": f"{hf}.flash_attention",
    }
    for name, module in (("wq", wq), ("wk", wk), ("wv", wv), ("wo", wo)):
        table[f"attention.{name}"] = f"{hf}.{module}"
        table[f"attention.{name}.matmul"] = f"{hf}.{module}.linear"
        table[f"attention.{name}.reshape"] = None
    table.update({f"attention.{name}": None for name in _UNMATCHED_ATTENTION})
    return table


def _norms(attention_norm: str, ffn_norm: str) -> dict[str, Targets]:
    return {
        "attention_norm": attention_norm,
        "attention_norm.norm": attention_norm,
        "ffn_norm": ffn_norm,
        "ffn_norm.norm": ffn_norm,
    }


def _feed_forward(w1: str, w2: str, w3: str | None, activation: str, mul: Targets) -> dict[str, Targets]:
    table: dict[str, Targets] = {
        "feed_forward": "mlp",
        "feed_forward.mul": mul,
        "feed_forward.w1": (f"mlp.{w1}", f"mlp.{activation}"),
        "feed_forward.w1.matmul": f"mlp.{w1}.linear",
        "feed_forward.w1.reshape": None,
        "feed_forward.w1.activation": f"mlp.{activation}",
        "feed_forward.w1.activation.silu": f"mlp.{activation}.*",
    }
    for name, module in (("w2", w2), ("w3", w3)):
        table[f"feed_forward.{name}"] = f"mlp.{module}" if module else None
        table[f"feed_forward.{name}.matmul"] = f"mlp.{module}.linear" if module else None
        table[f"feed_forward.{name}.reshape"] = None
    table["feed_forward.reshape"] = table["feed_forward.cast"] = None
    return table


_MEGATRON = {
    "self_attention": "attention",
    "self_attention.flash_attention": "attention.flash_attention",
    "self_attention.core_attention": "attention.flash_attention",
    "self_attention.core_attention.flash_attention": "attention.flash_attention",
    "self_attention.linear_proj": "attention.wo",
    "mlp": "feed_forward",
    "mlp.mul": "feed_forward.mul",
    "mlp.activation_func": "feed_forward.w1.activation",
    "mlp.activation_func.silu": "feed_forward.w1.activation.silu",
    "mlp.linear_fc2": "feed_forward.w2",
    "pre_mlp_layernorm": "ffn_norm",
}


def megatron_names(table: NameTable) -> NameTable:
    """Return the names of MindFormers' Megatron-core layers for the ops of ``table``."""
    return {new: table[old] for new, old in _MEGATRON.items() if old in table}


_LLAMA_ATTENTION = _attention("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
_LLAMA_NORMS = _norms("input_layernorm", "post_attention_layernorm")
_LLAMA_MLP = _feed_forward("gate_proj", "down_proj", "up_proj", "act_fn", "mlp.mul")

# The order of definition counts: of several siblings that a pattern matches, the reference logs the last.
LLAMA: NameTable = {**_LLAMA_NORMS, **_LLAMA_ATTENTION, **_LLAMA_MLP, "add": "add"}

GEMMA: NameTable = {
    **_norms("input_layernorm", "pre_feedforward_layernorm"),
    **_LLAMA_ATTENTION,
    **_LLAMA_MLP,
    "add": "add",
}

GPT_NEOX: NameTable = {
    **_LLAMA_NORMS,
    **_attention("attention", "query_key_value", "query_key_value", "query_key_value", "dense"),
    **_feed_forward("dense_h_to_4h", "dense_4h_to_h", None, "act", None),
    "add": "add",
}

PHI3: NameTable = {
    **_LLAMA_NORMS,
    **_attention("self_attn", "qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
    **_feed_forward("gate_up_proj", "down_proj", "gate_up_proj", "activation_fn", "mlp.mul"),
    "add": "add",
}

_EXPERTS: dict[str, Targets] = {
    **_LLAMA_MLP,
    "feed_forward.mul": ("mlp.mul", "mlp.experts.mul", "mlp.shared_experts.mul"),
    "feed_forward.w1.activation.silu": (
        "mlp.act_fn.*",
        "mlp.experts.act_fn.*",
        "mlp.shared_experts.act_fn.*",
    ),
    "feed_forward.router": "mlp.gate",
}

MOE: NameTable = {**_LLAMA_NORMS, **_LLAMA_ATTENTION, **_EXPERTS, "add": "add"}

DEEPSEEK: NameTable = {
    **_LLAMA_NORMS,
    **_attention("self_attn", "q_b_proj", "kv_b_proj", "kv_b_proj", "o_proj"),
    **_EXPERTS,
    "add": "add",
}

FAMILIES: Mapping[str, NameTable] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gemma3_text": GEMMA,
    "gpt_neox": GPT_NEOX,
    "phi3": PHI3,
    "mixtral": MOE,
    "qwen3_moe": MOE,
    "deepseek_v3": DEEPSEEK,
}
"""``config.model_type`` -> MindFormers' names. A family that is not here is tried with Llama's."""


def names_of(model_type: str) -> NameTable:
    """Return the name table of a family; Llama's for an unknown one."""
    return FAMILIES.get(model_type, LLAMA)
