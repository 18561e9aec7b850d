"""Where an op path is split into levels, and which paths are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_actswap.config import split_op_path
from hf_actswap.config.layer_values import op_path_fault


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        # the reference's separator, which alone separates where it occurs
        (r"attention\.flash_attention", ("attention", "flash_attention")),
        (r".*\.flash_attention", (".*", "flash_attention")),
        (r"feed_forward\.w1\.activation\.silu", ("feed_forward", "w1", "activation", "silu")),
        (r".*\.norm", (".*", "norm")),
        (r"a.b\.c", ("a.b", "c")),
        (r"a.*\.b.c", ("a.*", "b.c")),
        (r"attention_norm\..*", ("attention_norm", ".*")),
        (r"\.attention", ("", "attention")),
        (r"attention\.", ("attention", "")),
        (r"a\.\.b", ("a", "", "b")),
        (r"[a\.b]", ("[a", "b]")),
        # plain dots
        ("attention", ("attention",)),
        ("attention.flash_attention", ("attention", "flash_attention")),
        ("mlp.act_fn", ("mlp", "act_fn")),
        ("self_attn.q_proj.matmul", ("self_attn", "q_proj", "matmul")),
        ("a..b", ("a", "", "b")),
        (".attention", ("", "attention")),
        ("attention.", ("attention", "")),
        ("", ("",)),
        (".", ("", "")),
        # a quantifier keeps its dot
        (".*", (".*",)),
        (".*.flash_attention", (".*", "flash_attention")),
        ("atten.*", ("atten.*",)),
        ("mlp.+", ("mlp.+",)),
        ("mlp.w.?.mul", ("mlp", "w.?", "mul")),
        ("w.{1}.matmul", ("w.{1}", "matmul")),
        ("mlp.*.norm", ("mlp.*", "norm")),
        ("a.(b|c)", ("a", "(b|c)")),
        ("attention|feed_forward", ("attention|feed_forward",)),
        # a class keeps its dots
        ("w[1.3].matmul", ("w[1.3]", "matmul")),
        ("[^.]*.mul", ("[^.]*", "mul")),
        ("[].].mul", ("[].]", "mul")),
        ("[^].].mul", ("[^].]", "mul")),
        (r"[\].].mul", (r"[\].]", "mul")),
        (r"\[a.b", (r"\[a", "b")),
        (r"\\[.].b", (r"\\[.]", "b")),
        ("[.b", ("[.b",)),
        ("w\\d.matmul", ("w\\d", "matmul")),
        ("a\\", ("a\\",)),
    ],
)
def test_split(text: str, segments: tuple[str, ...]) -> None:
    assert split_op_path(text) == segments


@given(st.text(alphabet="ab.\\[]^*+?{}()|", max_size=12))
def test_split_loses_only_separators(text: str) -> None:
    separator = "\\." if "\\." in text else "."
    assert separator.join(split_op_path(text)) == text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (r"attention\.flash_attention", ""),
        (".*.norm", ""),
        ("[[a]", ""),
        ("", "an empty text"),
        (".attention", "'.attention', which has an empty level"),
        (r"a\.\.b", r"'a\.\.b', which has an empty level"),
        ("*", "'*', which is malformed: nothing to repeat at position 0"),
        (
            "a.(b",
            "'a.(b', which is malformed in level '(b': missing ), unterminated subpattern at position 0",
        ),
        ("[a", "'[a', which is malformed: unterminated character set at position 0"),
        (
            r"w1\.x{3,2}",
            r"'w1\.x{3,2}', which is malformed in level 'x{3,2}': "
            "min repeat greater than max repeat at position 2",
        ),
    ],
)
def test_fault(text: str, fault: str) -> None:
    assert op_path_fault(text) == fault


@given(st.text(max_size=20))
def test_any_text_has_a_verdict(text: str) -> None:
    assert isinstance(op_path_fault(text), str)
