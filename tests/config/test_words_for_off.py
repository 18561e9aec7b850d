"""One word for off everywhere, tuples that YAML reads as text, and cuts that are said."""

from __future__ import annotations

from typing import Any

import pytest

from hf_actswap import ConfigError, load_config, model_structure, resolve_plan
from hf_actswap.plan import ModelStructure, load_config_or_plan
from tests.engine.tiny_models import tiny_llama

WORDS = ("off", "none", "no", "false", "False", "None", "OFF")
KEYS = {
    "swap_config": "{}",
    "recompute_config": "{}",
    "swap_config.swap": False,
    "swap_config.layer_swap": (),
    "swap_config.op_swap": (),
    "swap_config.recompute_input": False,
    "recompute_config.recompute": False,
    "recompute_config.select_recompute": False,
    "recompute_config.select_recompute_exclude": False,
    "recompute_config.mp_comm_recompute": False,
    "recompute_config.compile_budget": None,
    "parallel_config.sequence_parallel_enabled": False,
    "parallel_config.schedule": None,
    "tile_config.loss": "off",
    "tile_config.tile": (),
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


@pytest.mark.parametrize("word", [*WORDS, False])
def test_off_for_the_whole_configuration(word: Any) -> None:
    assert load_config(word) == load_config(None)
    assert load_config_or_plan(word) == load_config(None)
    assert load_config(word).source == "off"


@pytest.mark.parametrize(
    "key",
    ["swap_config.default_prefetch", "log", "parallel_config.tensor_parallel_size", "memory.preference"],
)
def test_a_key_that_cannot_be_off_says_so(key: str) -> None:
    for word in WORDS:
        with pytest.raises(ConfigError, match=rf"{key}: .*\. This key cannot be off"):
            load_config(yaml_of(key, word, True) if "." in key else f"{key}: {word}")


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


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("swap_config: {layer_swap: [{backward_prefetch: 2, layers: (0,1)}]}", "layer_swap[0].layers"),
        ("swap_config: {layer_swap: [{layers: (0, 1), backward_prefetch: 2}]}", "layer_swap[0].layers"),
        ("recompute_config: {select_recompute: {feed_forward: (0,1)}}", "select_recompute.feed_forward"),
        ("recompute_config: {recompute: [(0,1)]}", "recompute[0]"),
        ("recompute_config: {recompute: [(0,1), (0,1)]}", "recompute[0]"),
    ],
)
def test_a_tuple_in_flow_style(text: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    problem = caught.value.problems[0]
    assert problem.where.endswith(path)
    assert (problem.found, problem.hint) == ("'(0, 1)'", "Write a list: [0, 1].")
    assert len(caught.value.problems) == text.count("(")


@pytest.mark.parametrize(
    "style", ["{{op_name: {}, backward_prefetch: 2, layers: true}}", "{{op_name: [{}]}}"]
)
def test_a_tuple_of_op_names(style: str) -> None:
    rule = style.format("(attention, feed_forward)")
    with pytest.raises(ConfigError, match=r"Write a list: \[attention, feed_forward\]"):
        load_config(f"swap_config: {{swap: true, op_swap: [{rule}]}}")


def test_brackets_that_are_no_tuple_stay() -> None:
    text = "recompute_config: {select_recompute: {(w1|w3): true, 'w{1,2}': true}}"
    assert load_config(text).recompute_config.select_recompute == {"(w1|w3)": True, "w{1,2}": True}
    with pytest.raises(ConfigError, match=r"found '\(0'"):
        load_config("recompute_config: {recompute: [(0, 1]}")


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


for also, reason in (
    ({"op_swap": []}, "op_swap without entries: nothing is swapped"),
    ({"op_swap": [], "layer_swap": []}, "layer_swap and op_swap without entries: nothing is swapped"),
    (
        {"op_swap": [], "layer_swap": [{"backward_prefetch": 1, "layers": [0]}]},
        "the entries of layer_swap have their own backward_prefetch, and replace the default",
    ),
):
    CUTS[f"the default prefetch, {', '.join(also)}: {reason[:16]}"] = (
        {"swap_config": {"swap": True, "default_prefetch": 5, **also}},
        [f"swap_config.default_prefetch: asked 5, got no effect: {reason}"],
    )


@pytest.mark.parametrize("case", CUTS)
def test_cuts_are_said(case: str, structure: ModelStructure) -> None:
    document, expected = CUTS[case]
    assert [str(item) for item in resolve_plan(load_config(document), structure).adjustments] == expected
