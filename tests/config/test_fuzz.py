"""Random documents: each is a configuration or a `ConfigError`, and none takes a second."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_actswap.config import ActSwapConfig, load_config
from hf_actswap.config.keys import (
    FOREIGN_SECTIONS,
    MEMORY_KEYS,
    MODE_FLAGS,
    OUR_SECTIONS,
    PARALLEL_KEYS,
    RECOMPUTE_KEYS,
    SETTINGS,
    SWAP_KEYS,
)
from hf_actswap.config.yaml_text import MAX_NODES, MAX_TEXT_BYTES
from hf_actswap.errors import ConfigError

LIMIT_S = 3.0
"""Of the processor: six times what the longest document takes here; what was quadratic took far more."""

INNER_KEYS = [*SWAP_KEYS, *RECOMPUTE_KEYS, *PARALLEL_KEYS, *MEMORY_KEYS, *SETTINGS, *MODE_FLAGS]
OUTER_KEYS = [*OUR_SECTIONS, *("model", "model_config", "num_layers", "parallel", "context", "<<")]
RULE_KEYS = ["op_name", "backward_prefetch", "layers"]
WORDS = st.sampled_from(
    [
        *(
            "attention",
            r"attention\.flash_attention",
            "mlp.act_fn",
            ".*.norm",
            "(a+)+",
            "[",
            "a{1,",
            "auto",
            "Auto",
        ),
        *(
            "smart_swap",
            "adaptive",
            "performance",
            "off",
            "yes",
            "~",
            "1:30",
            "0x1F",
            "1e400",
            "2025-13-01",
            ".nan",
            "-.inf",
        ),
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 99)
    | st.integers()
    | st.floats()
    | WORDS
    | st.text(max_size=12)
)
OTHER_KEYS = [*RULE_KEYS, "pipeline_config", "pipeline_interleave", *sorted(FOREIGN_SECTIONS)[:9]]
KEYS = st.sampled_from([*OUTER_KEYS, *INNER_KEYS, *OTHER_KEYS])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS | st.text(max_size=6) | st.integers(0, 3), inner, max_size=5)
    ),
    max_leaves=12,
)
RULES = st.lists(st.dictionaries(st.sampled_from(RULE_KEYS), VALUES, max_size=4), max_size=3)
SECTIONS = st.dictionaries(st.sampled_from(INNER_KEYS) | st.text(max_size=6), VALUES | RULES, max_size=5)
DOCUMENTS = st.dictionaries(
    st.sampled_from([*OUTER_KEYS, *MODE_FLAGS]) | st.text(max_size=6), SECTIONS | VALUES, max_size=5
)

SIGNS = st.sampled_from(
    [
        *"{}[]:,#&*!|>'\"%@`?-~ \t\n\r\0\x85\u2028\ufeff\ud800",
        *("\n  ", ": ", "- ", "<<: ", "*a", "&a ", "---\n", "...\n", "%YAML 9.9\n"),
        *("!!python/object:os.system ", "!!set ", "!!omap ", "!!binary ", "!!timestamp "),
    ]
)


def written(document: dict[str, Any], as_json: bool, flow: bool) -> str:
    if as_json:
        return json.dumps(document)
    return yaml.safe_dump(document, default_flow_style=flow, allow_unicode=True, sort_keys=False)


TEXTS = st.builds(written, DOCUMENTS, st.booleans(), st.booleans())
PIECES = SIGNS | KEYS | WORDS | st.text(max_size=4) | st.integers(-3, 99).map(str)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A document with a few pieces put in, cut out or repeated."""
    text = draw(TEXTS)
    for _ in range(draw(st.integers(1, 5))):
        start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
        middle = (
            draw(PIECES) if draw(st.booleans()) else text[start : start + length] * draw(st.integers(0, 3))
        )
        text = text[:start] + middle + text[start + length :]
    return text


SOUP = st.lists(PIECES, max_size=40).map("".join)


@st.composite
def long(draw: st.DrawFn) -> str:
    """A piece again and again, up to the limits of a document."""
    head, piece, tail = draw(SOUP), draw(st.lists(PIECES, min_size=1, max_size=6).map("".join)), draw(SOUP)
    times = min(draw(st.integers(1, MAX_NODES)), MAX_TEXT_BYTES // max(1, 4 * len(piece)))
    number = draw(st.booleans())
    return head + "".join(f"{piece}{index}" if number else piece for index in range(times)) + "\n" + tail


def read(source: Any) -> ActSwapConfig | ConfigError:
    start = time.thread_time()  # the machine may have other work
    try:
        result: ActSwapConfig | ConfigError = load_config(source)
    except ConfigError as error:
        result = error
    assert time.thread_time() - start < LIMIT_S, "too slow"
    if isinstance(result, ConfigError):
        assert result.problems
        assert all(problem.where and problem.expected for problem in result.problems)
        assert all(str(problem).isprintable() for problem in result.problems)
    return result


def check(source: Any) -> None:
    found = read(source)
    if isinstance(found, ActSwapConfig):
        assert load_config(found.to_yaml()) == found


def check_text(text: str) -> None:
    check(text + "\n")  # a text of one line may be a name: of a file, or on the Hub


def check_mapping(document: dict[Any, Any]) -> None:
    before = repr(document)  # a NaN is unequal to itself
    check(document)
    assert repr(document) == before
    check_text(yaml.safe_dump(json.loads(json.dumps(document))))


def examples(count: int, documents: st.SearchStrategy[Any], verdict: Any) -> None:
    settings(max_examples=count)(given(documents)(verdict))()


COUNTS = [pytest.param(300, id="300"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_random_texts(count: int) -> None:
    examples(max(count * 3 // 5, 300), damaged() | SOUP | st.text(max_size=60), check_text)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_random_mappings(count: int) -> None:
    documents = DOCUMENTS | st.dictionaries(SCALARS.filter(bool), VALUES, max_size=3)
    examples(max(count // 5, 300), documents, check_mapping)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_random_long_texts(count: int) -> None:
    examples(count // 10, long(), check_text)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
def test_random_files(count: int, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"

    def verdict(content: bytes) -> None:
        file.write_bytes(content)
        read(file)

    texts = TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass"))
    examples(
        count // 10,
        st.binary(max_size=80) | texts | st.tuples(texts, st.binary(max_size=9)).map(b"".join),
        verdict,
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "recompute_config:\n" + "".join(f"  sel{i}_ect_recompute: 1\n" for i in range(4900)), id="near"
        ),
        pytest.param("".join(f"{'k' * 900}{i}: 1\n" for i in range(250)), id="long keys"),
        pytest.param(f"recompute_config: {{select_recompute: ['{'a.*' * 80_000}']}}\n", id="long op path"),
        pytest.param("a: 1" + "\n" * 260_000, id="line breaks"),
        pytest.param("".join(f"{i}.5: 1\n" for i in range(4900)), id="numbers as keys"),
    ],
)
def test_documents_that_were_slow(text: str) -> None:
    assert isinstance(read(text), ConfigError)


@pytest.mark.parametrize("text", ['"\\U80001800": {}', 'a: "\\U01000100"', '"a\\uD800": 1'])
def test_documents_that_were_neither(text: str) -> None:
    found = read(text + "\n")
    assert isinstance(found, ConfigError)
    assert "\\U" not in text or "found a character beyond Unicode" in str(found)


def test_patterns_that_would_take_years_to_match() -> None:
    for pattern in (
        "(a+)+b",
        "(a|a)*b",
        "(?i)[a-z]",
        ".*" * 12 + "b",
        "(a|b)" * 9,
        "(?:(a))*",
        "((a{2}){3}){9}",
    ):
        found = read({"recompute_config": {"select_recompute": [pattern]}})
        assert isinstance(found, ConfigError), pattern
    for pattern in (
        "(q|k|v)_proj",
        ".*norm.*",
        "[*+?(]*x+",
        r"\(\(\(\(\(\*\*",
        "(?:self_)?attn",
        "layer(?=s)",
    ):
        assert isinstance(read({"recompute_config": {"select_recompute": [pattern]}}), ActSwapConfig), pattern
