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


FULL = {"recompute_config": {"recompute": True}}


@pytest.mark.parametrize(
    ("script", "document"),
    [
        ('A="--recompute-granularity full"\ntorchrun p.py $A', FULL),
        ('A="--bf16"\nA="$A --recompute-granularity full"\nA+=" --lr 1"\ntorchrun p.py ${A}', FULL),
        ('A=(--bf16 # --swap-attention\n)\nA+=(--recompute-granularity full)\nrun p "${A[@]}" "$@"', FULL),
        ("torchrun p.py --recompute-granularity full   # --swap-attention is off", FULL),
        ('echo "use --swap-attention"\ntorchrun p.py --recompute-granularity full 2>&1 | tee f', FULL),
        ('B="--swap-attention"\ntorchrun p.py --recompute-granularity full > log', FULL),
        ("cat <<END > f\n--swap-attention\nEND\nrun p --recompute-granularity full", FULL),
        ("bash -c 'torchrun p.py --recompute-granularity full'", FULL),
        ("torchrun p.py --recompute-granularity full --name 'no --swap-attention'", FULL),
        ('export A="--recompute-granularity full"', FULL),
        ("run() { torchrun p.py --recompute-granularity full; }", FULL),
        ("case $1 in a) A='--recompute-granularity full';; esac; torchrun p.py $A", FULL),
    ],
)
def test_flags_are_what_a_command_is_given(script: str, document: dict[str, Any]) -> None:
    assert convert_flags(flags_of_command(script)).document == document


def test_what_a_script_names_but_gives_to_no_command_is_named() -> None:
    found = converted('B="--swap-attention"; echo "--swap-optimizer --lr"\ntorchrun p.py --bf16')
    assert found.without == [
        "--swap-optimizer: no command is given it.",
        "--swap-attention: no command is given it.",
    ]


BLOCK = "torchrun p.py --recompute-granularity full --recompute-method=block --recompute-num-layers"


@pytest.mark.parametrize(
    ("script", "count", "assumed"),
    [
        (f'{BLOCK}="${{R:-6}}"', 6, ["nothing here sets $R; its default is taken (6)"]),
        (f"N=${{N:-4}}\n{BLOCK} $N", 4, ["nothing here sets $N; its default is taken (4)"]),
        (f"N=${{1:-2}}\n{BLOCK} ${{N}}", 2, ["nothing here sets $1; its default is taken (2)"]),
        (f"R=3\n{BLOCK} ${{R:-6}} 2>&1", 3, []),
        (f"N=$((32/4))\n{BLOCK} $N $MORE", 8, []),
        (f'L=32; P=4\n{BLOCK} "$((2 * (L / $P) - ${{P}}))"', 12, []),
        (f"if x; then N=1; else N=2; fi\n{BLOCK} $N", 2, ["N is set more than once; the last is taken"]),
        (
            f"{BLOCK} 1\n{BLOCK} 2",
            2,
            ["commands give --recompute-num-layers several values; the last is taken"],
        ),
    ],
)
def test_numbers_of_variables(script: str, count: int, assumed: list[str]) -> None:
    found = converted(script)
    assert found.document == {"recompute_config": {"recompute": [count]}}
    assert found.assumed == assumed
    assert found.to_yaml().count("# Taken for granted: ") == len(assumed)


@pytest.mark.parametrize("written", ["$((N/4))", "$(nproc)", "$((4/0))", "$((2**9))"])
def test_a_number_that_cannot_be_computed_is_named(written: str) -> None:
    with pytest.raises(ConfigError) as raised:
        converted(f"{BLOCK} {written}")
    assert f"found {written}. Write the number itself there" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "document", "without"),
    [
        ("fsdp_config: {fsdp_activation_checkpointing: true}", FULL, []),
        (
            "args: {recompute_granularity: full, recompute_method: block, recompute_num_layers: 2}",
            {"recompute_config": {"recompute": [2]}},
            [],
        ),
        (
            "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}",
            FULL,
            [],
        ),
        (
            "--gradient_checkpointing true --gradient_checkpointing_kwargs '{\"use_reentrant\": true}'",
            FULL,
            ["gradient_checkpointing_kwargs.use_reentrant: true: recomputation here is not reentrant."],
        ),
        (
            "--gradient_checkpointing_kwargs {offload",
            {},
            ["--gradient_checkpointing_kwargs is no mapping that can be read, in JSON or YAML."],
        ),
        (
            "--adaptive-recompute-device-size -1",
            {},
            ["--adaptive-recompute-device-size -1: this is MindSpeed's word for no planner."],
        ),
        (
            "--recompute-method block",
            {},
            ["--recompute-method block: no effect without --recompute-granularity."],
        ),
    ],
)
def test_sections_and_flags_that_others_read(text: str, document: object, without: list[str]) -> None:
    found = converted(text)
    assert found.document == document
    assert found.without == without


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"a": }', "a.json: expected valid JSON, found Expecting value: line 1"),
        ("a.yaml", "a: true\n  b: [", "a.yaml: expected valid YAML, found mapping values are not allowed"),
        ("a.yml", "- a", "a.yml: expected settings \\(keys with values\\), found a list"),
        ("a.json", "[1]", "a.json: expected settings"),
        ("a.py", "x = 1", "a.py: expected a shell script, or settings in JSON or YAML, found Python"),
    ],
)
def test_a_file_is_what_its_name_says(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_flags(text, name)


def test_a_script_is_no_settings() -> None:
    assert not read_flags("swap_attention: true", "a.sh").given
    assert convert_flags(read_flags("swap_attention: true", "a.yaml")).document


def test_the_page_has_the_tables() -> None:
    page = text_of(MAKE.PAGE)
    assert MAKE.with_tables(page) == page, "run: python docs/make_flags.py"
