"""The configurations of our rows, as data: what is kept, swapped and recomputed in each, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def swap_everything(prefetch: int | str) -> dict[str, Any]:
    """All that any layer saves."""
    return {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": prefetch, "layers": True}]}}


def recipe_with_auto(name: str) -> Callable[[int], dict[str, Any]]:
    """Return a recipe's swap section with every prefetch ``auto``, less the layers that a model lacks."""

    def config(layers: int) -> dict[str, Any]:
        document = yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))
        rules = [_with_auto(rule, layers) for rule in document["swap_config"]["op_swap"]]
        return {"swap_config": {"swap": True, "op_swap": [rule for rule in rules if rule["layers"]]}}

    return config


def _with_auto(rule: Mapping[str, Any], layers: int) -> dict[str, Any]:
    present = [layer for layer in rule["layers"] if layer < layers]
    return {**rule, "backward_prefetch": "auto", "layers": present}


MIXED = {
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": True}]},
    "recompute_config": {
        "select_recompute": {
            r"feed_forward\.mul": True,
            r"feed_forward\.w1\.activation\.silu": True,
            r".*_norm": True,
        }
    },
}
"""Recompute what is cheap, swap the rest."""

_ELEMENTWISE = {
    r"input_layernorm\..*": True,
    r"post_attention_layernorm\..*": True,
    r"mlp\.act_fn\.silu": True,
    r"mlp\.mul": True,
}
ELEMENTWISE = {"recompute_config": {"select_recompute": _ELEMENTWISE}}
"""All elementwise ops of a layer recomputed, nothing else. The rotation of q and k stays: run again it would
hold as much as it drops."""

FUSED = {"recompute_config": {"select_recompute": _ELEMENTWISE, "fused": True}}


def eager_mix(layers: int) -> dict[str, Any]:
    """Swap x, q, k, v, the attention output and the sum after it; recompute gate, up and elementwise ops.

    What is swapped is dear to compute again, and about as much as the link hides at 8,192 tokens (of a 7B
    layer 6 hidden states of 64 MiB, where 6.5 go meanwhile). The last layer keeps its share, because
    backward asks for it at once. The reference would keep what a recomputed op reads (x, and the sum).
    """
    swapped = list(range(max(1, layers - 1)))
    products = {r"mlp\.gate_proj\.linear": True, r"mlp\.up_proj\.linear": True}
    return {
        "swap_config": {
            "swap": True,
            "layer_swap": [{"backward_prefetch": 30, "layers": swapped}],
            "select_recompute_input": True,
        },
        "recompute_config": {"select_recompute": {**_ELEMENTWISE, **products}},
    }


COMPILED_MIX: dict[str, Any] = {
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 60, "layers": True}]},
    "recompute_config": {
        "select_recompute": {
            "feed_forward": True,
            r"input_layernorm\.mul": True,
            r"post_attention_layernorm\.mul": True,
        }
    },
}
"""Of a compiled layer of 16 hidden states (7B shapes) it rebuilds 10: gate, up, their product and both normed
inputs. Six are swapped: x, q, k, v, the attention core's output and its projection. At 8,192 tokens they are
6.4 GB, 117 ms of a link that has about 110 ms of forward to hide them in, and the two products done again are
29 ms on top of 329 (HF checkpointing: 502); at 32,768 tokens 176 ms of 247, and 43 on top of 740 (1060)."""

COMPILED_LEAN_MIX: dict[str, Any] = {
    **COMPILED_MIX,
    "recompute_config": {
        "select_recompute": {
            **COMPILED_MIX["recompute_config"]["select_recompute"],
            "attention": True,
        },
        "select_recompute_exclude": {r"attention\.flash_attention": True},
    },
}
"""It rebuilds q, k and v too: half the bytes on the link for 16 ms more at 8,192 tokens (24 at 32,768)."""
