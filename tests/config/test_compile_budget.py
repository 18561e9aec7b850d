"""``compile_budget``: one share, or one for each layer."""

from __future__ import annotations

import pytest

from hf_actswap import ConfigError, load_config


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.3", 0.3), ("1", 1.0), ("0", 0.0), ("[1, 0.5, 0]", (1.0, 0.5, 0.0)), ("null", None)],
)
def test_values(text: str, value: object) -> None:
    config = load_config(f"recompute_config: {{compile_budget: {text}}}")
    assert config.recompute_config.compile_budget == value
    assert load_config(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1.5", "expected a number from 0 to 1, or a list with one for each layer, found 1.5"),
        ("-0.1", "expected a number from 0 to 1, or a list with one for each layer, found -0.1"),
        ("30", "found 30. Percent are written as a share: 0.3."),
        ("true", "found true"),
        (".nan", "found nan"),
        ("[]", "found an empty list"),
        ("[0.5, half]", "compile_budget[1]: expected a number from 0 to 1, found 'half'"),
        ("{0: 0.5}", "expected a number from 0 to 1, or a list with one for each layer"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        load_config(f"recompute_config: {{compile_budget: {text}}}")
    assert words in str(rejected.value)
