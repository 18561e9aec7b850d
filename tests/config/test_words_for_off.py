"""One word for off everywhere, tuples that YAML reads as text, and cuts that are said."""

from __future__ import annotations

from typing import Any

import pytest

from hf_actswap import ConfigError, load_config, model_structure, resolve_plan
from hf_actswap.plan import ModelStructure
from tests.engine.tiny_models import tiny_llama

WORDS = ("off", "none", "no", "false", "False", "None", "OFF")
KEYS = {
    "swap_config": "{}",
    "recompute_config": "{}",
    "swap_config.swap": False,
    "swap_config.recompute_input": False,
    "recompute_config.recompute": False,
    "recompute_config.select_recompute": False,
    "recompute_config.select_recompute_exclude": False,
    "recompute_config.mp_comm_recompute": False,
    "recompute_config.compile_budget": None,
    "parallel_config.sequence_parallel_enabled": False,
    "parallel_config.schedule": None,
    "tile_config.loss": "off",
    "stream_config.tokens": "off",
    "memory.mode": "off",
    "memory.budget_gib": None,
    "memory.margin_gib": None,
    "memory.min_tensor_mib": None,
    "memory.host_memory_gib": None,
    "memory.weights": "keep",
    "memory.bind_numa": False,
    "memory.optimizer_in_backward": False,
    "memory.plan_file": None,
}


def yaml_of(key: str, word: str, quoted: bool) -> str:
    section, dot, name = key.partition(".")
    value = f"'{word}'" if quoted else word
    return f"{section}: {{{name}: {value}}}" if dot else f"{section}: {value}"


@pytest.mark.parametrize("key", KEYS)
def test_each_word_means_off(key: str) -> None:
    section, _, name = key.partition(".")
    for word in WORDS:
        for quoted in (False, True):
            found = getattr(load_config(yaml_of(key, word, quoted)), section)
            if name:
                assert getattr(found, name) == KEYS[key], (word, quoted)
            else:
                assert found == getattr(load_config("{}"), section)


@pytest.mark.parametrize("word", WORDS)
def test_off_for_the_layers_of_a_rule(word: str) -> None:
    text = (
        f"swap_config: {{swap: true, layer_swap: [{{backward_prefetch: 1, layers: {word}}}]}}\n"
        f"recompute_config: {{select_recompute: {{feed_forward: {word}}}}}"
    )
    found = load_config(text)
    assert [rule.layers for rule in found.swap_config.layer_swap or ()] == [False]
    assert found.recompute_config.select_recompute == {"feed_forward": False}


def test_a_key_without_off_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: expected a whole number, at least 1"):
        load_config("parallel_config: {tensor_parallel_size: none}")


@pytest.mark.parametrize(
    "text",
    [
        "swap_config: {swap: true, layer_swap: [{backward_prefetch: 1, layers: (0, 1, 2)}]}".replace(
            "(0, 1, 2)", "'(0, 1, 2)'"
        ),
        "recompute_config:\n  recompute: (0, 1, 2)",
        "recompute_config:\n  recompute: (0, 1, 2,)",
        "parallel_config:\n  offset: (0, 1, 2)",
    ],
)
def test_a_tuple_is_no_list(text: str) -> None:
    with pytest.raises(ConfigError, match=r"Write a list: \[0, 1, 2\]"):
        load_config(text)


@pytest.fixture(scope="module")
def structure() -> ModelStructure:
    return model_structure(tiny_llama())


CUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a stage": (
        {"recompute_config": {"recompute": [9, 0]}, "parallel_config": {"pipeline_stage": 2}},
        [
            "recompute_config.recompute: asked 9 layers of stage 0, got 2: there are no more, and a number "
            "beyond them means all"
        ],
    ),
    "a chunk": (
        {
            "recompute_config": {"select_recompute": {"feed_forward": [[1, 5], [1, 1]]}},
            "parallel_config": {"pipeline_stage": 2, "pp_interleave_num": 2},
        },
        [
            "recompute_config.select_recompute feed_forward: asked 5 layers of stage 1, interleave 0, got 1: "
            "there are no more, and a number beyond them means all"
        ],
    ),
    "all": ({"recompute_config": {"recompute": [4]}}, []),
    "the default prefetch": (
        {
            "swap_config": {
                "swap": True,
                "default_prefetch": 5,
                "layer_swap": [{"backward_prefetch": 1, "layers": [0]}],
            }
        },
        [
            "swap_config.default_prefetch: asked 5, got no effect: the entries of layer_swap have "
            "their own backward_prefetch, and replace the default"
        ],
    ),
}


@pytest.mark.parametrize("case", CUTS)
def test_cuts_are_said(case: str, structure: ModelStructure) -> None:
    document, expected = CUTS[case]
    assert [str(item) for item in resolve_plan(load_config(document), structure).adjustments] == expected
