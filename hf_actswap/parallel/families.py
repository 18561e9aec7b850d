"""How the decoders of Hugging Face are divided, as data.

A decoder layer has blocks (attention, the MLP). A block's column-parallel projections read one input, and its
row-parallel projection ends it. Everything else of a layer, the norms and the residual stream, works token by
token and holds, under sequence parallelism, a part of the sequence.

A model's projections are read off its own ``base_model_tp_plan``, else off the names of its modules
(`PATTERNS`). This module holds what neither of them says.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Columns(enum.Enum):
    """How the output features of a column-parallel projection are divided."""

    PLAIN = "in equal parts"
    QUERY = "by query heads"
    KEY_VALUE = "by key and value heads; fewer of them than ranks are replicated"
    FUSED_HEADS = "by key and value heads, each of which has its q, k and v side by side"
    FUSED_QKV = "all of q by heads, then k, then v"
    FUSED_PAIR = "two halves (gate and up), each in equal parts"
    GATHERED = "in equal parts, and gathered again: every rank goes on with all of them"


@dataclass(frozen=True)
class Block:
    """One block of a layer. All paths are inside the layer.

    Args:
        path: path of the module that gets the block's input; under sequence parallelism it is gathered there.
        columns: column-parallel projection, or parameter with a number per head -> how it is divided.
        rows: projections that end the block.
        norm: path of the norm whose output only this block reads; ``None``: not known, the input is taken at
            ``path``.
        is_attention: whether heads are divided.
        parameters: divided parameter of a module that keeps its class -> dim, and number of equal parts along
            it, each of which is divided (gate and up: 2).
        sums_output: whether shares are summed in the block's output, and not by the projections of ``rows``.
    """

    path: str
    columns: Mapping[str, Columns]
    rows: tuple[str, ...]
    norm: str | None = None
    is_attention: bool = False
    parameters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sums_output: bool = False


@dataclass(frozen=True)
class Family:
    """What must be known of a family to divide it, beyond the names of its modules and its own plan.

    Args:
        norms: path of a block in a layer -> the norm whose output only this block reads.
        styles: path of a projection in a layer -> how it is divided, in place of what its plan or name says.
        undivided: modules of a layer that stay whole.
        gathered: block -> attribute of its module; if the attribute is not zero, the block needs all features
            between its projections, and they are gathered.
        shares: module of a layer that is one `Block` as a whole -> its ``parameters``.
        token_wise: modules of a layer, besides norms and linear layers, that work token by token.
        token_arguments: arguments of a layer that have a row (ids: a number) for each token.
        sequence_dim: dim of the sequence in the hidden states that a layer gets.
        no_sequence: why layers cannot work on parts of the sequence; empty if they can.
        settings: values that the model's configuration must have for its layers to be divided.
    """

    norms: Mapping[str, str] = field(default_factory=dict)
    styles: Mapping[str, Columns] = field(default_factory=dict)
    undivided: tuple[str, ...] = ()
    gathered: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    token_wise: tuple[str, ...] = ()
    token_arguments: tuple[str, ...] = ()
    sequence_dim: int = -2
    no_sequence: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


PRE_NORM = Family({"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"})
GEMMA = Family({"self_attn": "input_layernorm", "mlp": "pre_feedforward_layernorm"})
HYPER_CONNECTIONS = Family(token_wise=("attn_hc", "ffn_hc"), token_arguments=("input_ids",), sequence_dim=-3)
ZAMBA = Family(token_arguments=("original_hidden_states",))

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe"), PRE_NORM),
    **dict.fromkeys(("gemma2", "gemma3_text"), GEMMA),
    **dict.fromkeys(("deepseek_v4", "hy_v4"), HYPER_CONNECTIONS),
    **dict.fromkeys(("zamba", "zamba2"), ZAMBA),
    "big_bird": Family(settings={"attention_type": "original_full"}),  # else heads draw what they attend to
    "blt": Family(no_sequence="it has several stacks of layers, over bytes and over patches"),
    "doge": Family(undivided=("self_attn",)),
    "gemma3n_text": Family(
        gathered={"mlp": "activation_sparsity"},
        token_wise=("altup", "laurel"),
        token_arguments=("per_layer_input",),
    ),
    "gemma4_text": Family(token_arguments=("per_layer_input",)),
    "gpt2": Family({"attn": "ln_1", "mlp": "ln_2"}),
    "gpt_bigcode": Family(styles={"attn.c_attn": Columns.FUSED_HEADS}),
    "gpt_neox": Family({"attention": "input_layernorm", "mlp": "post_attention_layernorm"}),
    "llama4_text": Family(
        shares={"feed_forward": {"experts.gate_up_proj": (2, 2), "experts.down_proj": (1, 1)}}
    ),
    "inkling2_text": Family(no_sequence="its layers read the outputs of all layers before them"),
    "prophetnet": Family(no_sequence="they are given several streams of tokens, one behind the other"),
    "qwen4_exp_text": Family(token_wise=("attn_hyper_connection", "mlp_hyper_connection")),
    "trocr": Family(undivided=("self_attn", "encoder_attn")),
    "zaya": Family(token_wise=("post_attention_residual_scale", "post_mlp_residual_scale")),
}
"""``config.model_type`` -> its `Family`. A family without a peculiarity needs no entry."""

_QKV = ("q_proj", "k_proj", "v_proj")
PATTERNS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((*_QKV, "gate_proj"), "o_proj"),
    ((*_QKV, "g_proj"), "o_proj"),
    *((_QKV, row) for row in ("o_proj", "out_proj", "dense", "Wo")),
    (("q_b_proj", "kv_b_proj"), "o_proj"),
    (("q_proj", "kv_b_proj"), "o_proj"),
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("Wq", "Wk", "Wv"), "dense"),
    (("Wqkv",), "out_proj"),
    (("query_key_value",), "dense"),
    (("qkv_proj",), "o_proj"),
    (("c_attn",), "c_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("input_linear",), "output_linear"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
    (("intermediate",), "output"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("w1", "w3"), "w2"),
    (("Wi",), "Wo"),
    (("0",), "2"),
)
"""Names of a module's column-parallel projections, and of the row-parallel one that ends them."""

KINDS: Mapping[str, Columns] = {
    **dict.fromkeys(("q_proj", "query", "Wq", "q_b_proj", "kv_b_proj"), Columns.QUERY),
    **dict.fromkeys(("k_proj", "v_proj", "key", "value", "Wk", "Wv"), Columns.KEY_VALUE),
    **dict.fromkeys(("qkv_proj", "Wqkv", "c_attn"), Columns.FUSED_QKV),
    "query_key_value": Columns.FUSED_HEADS,
    **dict.fromkeys(("gate_up_proj", "input_linear", "Wi"), Columns.FUSED_PAIR),
}
"""Last name in a projection's path -> how it is divided; all others are divided in equal parts."""

WIDE_NORMS: Mapping[str, str] = {
    "q_norm": "q_proj",
    "k_norm": "k_proj",
    "attn_sub_norm": "o_proj",
    "ffn_sub_norm": "down_proj",
}
"""Norm inside a block -> projection whose divided features it normalises, if it is over all of them."""

LOW_RANK = ("q_a_proj", "kv_a_proj_with_mqa")
"""Low-rank projections of latent attention, before the divided ones; every rank has them whole."""

HEAD_PARAMETERS = ("sinks",)
"""Parameters of an attention module that have a number for each query head."""

COUNTS: Mapping[str, str] = {
    **dict.fromkeys(("num_heads", "num_attention_heads", "n_head", "n_heads", "num_attn_heads"), "query"),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_heads"), "key_value"),
    **dict.fromkeys(
        ("embed_dim", "split_size", "all_head_size", "hidden_size", "d_model_size"), "query features"
    ),
    "kv_dim": "key_value features",
    "num_key_value_groups": "groups",
}
"""Attribute of an attention module -> the number that it holds."""

HEAD_ARGUMENTS = ("alibi", "position_bias")
"""Arguments of attention modules whose first dim goes over the heads (of one sequence after the other)."""

SOURCE_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Arguments of attention modules that hold another sequence, whose keys and values are attended to."""

LINEAR_CLASSES = ("Linear", "FalconLinear", "Conv1D")
"""Names of classes that multiply by a weight and add a bias; ``Conv1D`` has its weight as ``[in, out]``."""

EXPERTS = "experts"
"""Name of the module of routed experts."""

EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""Implementations of experts in transformers that read the size ``I`` from the parameters, so take any."""
