"""How the decoders of Hugging Face are divided, as data.

A decoder layer has blocks (attention, the MLP). A block's column-parallel projections read the output of one
norm, and its row-parallel projection ends it. Everything else of a layer, the norms and the residual stream,
works token by token and holds, under sequence parallelism, a part of the sequence.

A family that is not here is read off the model's own ``base_model_tp_plan`` (see `tensor_plan`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Columns(enum.Enum):
    """How the output features of a column-parallel projection are divided."""

    PLAIN = "in equal parts"
    QUERY = "by query heads"
    KEY_VALUE = "by key and value heads; fewer of them than ranks are replicated"
    FUSED_HEADS = "by heads, each of which has its q, k and v side by side"
    FUSED_QKV = "all of q by heads, then k, then v"
    FUSED_PAIR = "two halves (gate and up), each in equal parts"


@dataclass(frozen=True)
class Block:
    """One block of a layer.

    Args:
        path: of its module inside the layer.
        columns: projection inside the block -> how it is divided.
        rows: projections that end the block.
        norm: path inside the layer of the norm whose output only this block reads; ``None``: not known, the
            input is taken at the block itself.
        summed: modules inside the block that all ranks hold alike and each applies to its own heads.
        is_attention: whether heads are divided.
    """

    path: str
    columns: Mapping[str, Columns]
    rows: tuple[str, ...]
    norm: str | None = None
    summed: tuple[str, ...] = ()
    is_attention: bool = False


@dataclass(frozen=True)
class Family:
    """One kind of decoder: the blocks of a layer, and the norm behind the last layer."""

    blocks: tuple[Block, ...]
    final_norm: str


def _attention(norm: str = "input_layernorm", summed: tuple[str, ...] = ()) -> Block:
    columns = {"q_proj": Columns.QUERY, "k_proj": Columns.KEY_VALUE, "v_proj": Columns.KEY_VALUE}
    return Block("self_attn", columns, ("o_proj",), norm, summed, is_attention=True)


def _mlp(norm: str = "post_attention_layernorm") -> Block:
    columns = {"gate_proj": Columns.PLAIN, "up_proj": Columns.PLAIN}
    return Block("mlp", columns, ("down_proj",), norm)


HEAD_NORMS = ("q_norm", "k_norm")

LLAMA = Family((_attention(), _mlp()), "norm")
QWEN3 = Family((_attention(summed=HEAD_NORMS), _mlp()), "norm")
GEMMA2 = Family((_attention(), _mlp("pre_feedforward_layernorm")), "norm")
GEMMA3 = Family((_attention(summed=HEAD_NORMS), _mlp("pre_feedforward_layernorm")), "norm")
GPT_NEOX = Family(
    (
        Block(
            "attention",
            {"query_key_value": Columns.FUSED_HEADS},
            ("dense",),
            "input_layernorm",
            is_attention=True,
        ),
        Block("mlp", {"dense_h_to_4h": Columns.PLAIN}, ("dense_4h_to_h",), "post_attention_layernorm"),
    ),
    "final_layer_norm",
)
PHI3 = Family(
    (
        Block(
            "self_attn", {"qkv_proj": Columns.FUSED_QKV}, ("o_proj",), "input_layernorm", is_attention=True
        ),
        Block("mlp", {"gate_up_proj": Columns.FUSED_PAIR}, ("down_proj",), "post_attention_layernorm"),
    ),
    "norm",
)

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt_neox": GPT_NEOX,
    "phi3": PHI3,
    "mixtral": LLAMA,
    "qwen3_moe": QWEN3,
}
"""``config.model_type`` -> how it is divided. A block with routed experts is known by its ``experts``."""

EXPERTS, ROUTER = "experts", "gate"
"""Names of the modules of a block with routed experts."""

EXPERT_COLUMNS, EXPERT_ROWS = "gate_up_proj", "down_proj"
"""Parameters of the experts, ``[E, 2I, H]`` and ``[E, H, I]``: both are divided along ``I``."""

EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""Those of transformers' implementations that take any size of ``I`` from the parameters themselves."""
