"""Flags of other programs become a configuration, each line with what it means."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import yaml

from hf_actswap import ConfigError, load_config, model_structure, resolve_plan
from hf_actswap.config.flags import Converted, convert_flags, flags_of_command, read_flags
from hf_actswap.plan import ModelStructure
from tests.docs.pages import script, text_of
from tests.engine.tiny_models import NUM_LAYERS, tiny_llama

MAKE = script("make_flags")
AUTO = {"backward_prefetch": "auto", "layers": True}
INPUTS = {
    "swap_config": {"swap": True, "recompute_input": True, "default_prefetch": "auto", "op_swap": []},
    "recompute_config": {"recompute": True},
}
STATES = {"mode": "smart_swap", "preference": "memory_saving"}

CASES: dict[str, dict[str, Any]] = {
    "--recompute-granularity full": {"recompute_config": {"recompute": True}},
    "--recompute-granularity=full --recompute-method uniform --recompute-num-layers 1": {
        "recompute_config": {"recompute": True}
    },
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2": {
        "recompute_config": {"recompute": [2]}
    },
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
    "--pipeline-model-parallel-size 2": {
        "recompute_config": {"recompute": [1, 1]},
        "parallel_config": {"pipeline_stage": 2},
    },
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --num-layers 4 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": {
        "recompute_config": {"recompute": [[1, 1], [1, 1]]},
        "parallel_config": {"pipeline_stage": 2, "pp_interleave_num": 2},
    },
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --num-layers 4 "
    "--pipeline-model-parallel-size 2 --swap-attention --swap-modules self_attention": {
        "swap_config": {"swap": True, "op_swap": [{"op_name": "attention", **AUTO}]},
        "recompute_config": {"recompute": [0, 2]},
        "parallel_config": {"pipeline_stage": 2},
    },
    "--recompute-granularity selective": {
        "recompute_config": {"select_recompute": {r"attention\.flash_attention": True}}
    },
    "--recompute-granularity selective --recompute-modules layernorm mlp": {
        "recompute_config": {
            "select_recompute": {"feed_forward": True, "attention_norm": True, "ffn_norm": True}
        }
    },
    "--recompute-activation-function --recompute-activation-function-num-layers 3": {
        "recompute_config": {
            "select_recompute": {r"feed_forward\.mul": [3], r"feed_forward\.w1\.activation\.silu": [3]}
        }
    },
    "--swap-attention": {
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": name, **AUTO} for name in ("attention_norm", "attention", "ffn_norm")],
        }
    },
    "--swap-optimizer --swap-optimizer-times 16": {"memory": STATES},
    "--smart-swap": {"memory": {"mode": "smart_swap"}},
    "--adaptive-memory-optimization --swap-optimizer": {
        "memory": {"mode": "adaptive", "preference": "memory_saving"}
    },
    "--adaptive-recompute-device-size 40960": {"memory": {"mode": "adaptive", "budget_gib": 40.0}},
    "--cpu-offloading --cpu-offloading-num-layers 2": {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": "auto", "layers": [0, 1]}]}
    },
    "--fine-grained-activation-offloading --offload-modules core_attn": {
        "swap_config": {"swap": True, "op_swap": [{"op_name": r"attention\.flash_attention", **AUTO}]}
    },
    "--tensor-model-parallel-size 8 --sequence-parallel": {
        "parallel_config": {"tensor_parallel_size": 8, "sequence_parallel_enabled": True}
    },
    "--pipeline-model-parallel-size 2 --num-layer-list 3,1": {
        "parallel_config": {"pipeline_stage": 2, "offset": [1, -1]}
    },
    '{"activation_checkpointing": {"cpu_checkpointing": true, "profile": false}}': INPUTS,
    '{"activation_checkpointing": {"partition_activations": true}}': {
        "recompute_config": {"recompute": True, "recompute_slice_activation": True}
    },
    "gradient_checkpointing: true\nactivation_offloading: true": INPUTS,
    "gradient_checkpointing: offload\nbf16: true": INPUTS,
    "--gradient_checkpointing false --activation_offloading": {
        "swap_config": {"swap": True, "layer_swap": [AUTO]}
    },
    "tiled_mlp: true\nchunked_cross_entropy: true\nlayer_offloading: true": {
        "tile_config": {"loss": "auto", "tile": [{"op_name": "feed_forward"}]},
        "memory": {"weights": "host"},
    },
}


@pytest.fixture(scope="module")
def structure() -> ModelStructure:
    return model_structure(tiny_llama())


@pytest.mark.parametrize("flags", CASES)
def test_what_flags_become(flags: str, structure: ModelStructure) -> None:
    found = convert_flags(read_flags(flags))
    assert found.document == CASES[flags]
    assert yaml.safe_load(found.to_yaml()) == CASES[flags]
    assert "&id" not in found.to_yaml()
    assert resolve_plan(load_config(CASES[flags]), structure).num_layers == NUM_LAYERS


def test_each_line_says_what_it_means() -> None:
    found = convert_flags(flags_of_command("--swap-attention --recompute-granularity full"))
    lines = found.to_yaml().splitlines()
    assert lines[:3] == [
        "swap_config:",
        "  # --swap-attention: norms and attention are swapped.",
        "  swap: true",
    ]
    assert "  # --swap-attention, too." in lines
    for above, line in pairwise(lines):
        if line.startswith("  ") and line[2].isalpha():
            assert above.startswith("  #")
    assert max(map(len, lines)) < 80


SCRIPT = """\
#!/bin/bash
# --smart-swap was tried
TP=8; PP=2
LAYERS=4
ARGS="
    --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size $PP \\
    --num-layers ${LAYERS} \\
    --recompute-granularity full --recompute-method block \\
    --recompute-num-layers ${COUNT:-1} \\
    --lr 1.25e-6 --distribute-saved-activations
"
torchrun $DISTRIBUTED pretrain_gpt.py $ARGS --recompute-in-bubble --swap-everything | tee x.log
"""


def converted(text: str) -> Converted:
    return convert_flags(read_flags(text))


def test_a_script() -> None:
    found = converted(SCRIPT)
    assert found.document == {
        "recompute_config": {"recompute": [1, 1], "recompute_slice_activation": True},
        "parallel_config": {"tensor_parallel_size": 8, "pipeline_stage": 2},
    }
    assert found.without == [
        "--recompute-in-bubble: a layer is recomputed when backward reaches it, not in bubbles.",
        "--swap-everything is not known here.",
    ]
    assert found.unknown == 2  # --num-layers, --lr
    assert found.to_yaml().endswith("# Not converted: --swap-everything is not known here.\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size $TP", r"--tensor-model-parallel-size: expected a whole number, found"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
            "--pipeline-model-parallel-size 2 --swap-attention",
            r"--num-layers: expected a whole number, found nothing",
        ),
    ],
)
def test_missing_numbers_are_named(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(flags)


def test_values_without_a_counterpart_are_named() -> None:
    found = converted("--recompute-granularity selective --recompute-modules core_attn engram")
    assert found.without == [
        "--recompute-modules engram: known are core_attn, mlp, moe, layernorm, moe_act, mla_up_proj, "
        "shared_experts."
    ]


def test_the_page_has_the_tables() -> None:
    page = text_of(MAKE.PAGE)
    assert MAKE.with_tables(page) == page, "run: python docs/make_flags.py"
