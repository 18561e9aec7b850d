"""The embedded corpus: the same text every time, and nothing of the evaluation part in training."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import corpus
import pytest


@pytest.fixture(scope="module")
def embedded() -> corpus.Corpus:
    return corpus.load_corpus()


def test_it_has_some_hundred_kilobytes_of_which_about_a_tenth_is_held_out(embedded: corpus.Corpus) -> None:
    train, evaluation = (sum(map(len, part)) for part in (embedded.train, embedded.evaluation))
    assert 300_000 < train + evaluation < 3_000_000
    assert 0.03 < evaluation / (train + evaluation) < 0.3


def test_no_paragraph_occurs_twice(embedded: corpus.Corpus) -> None:
    paragraphs = [line for text in embedded.train + embedded.evaluation for line in text.splitlines()]
    assert len(paragraphs) == len(set(paragraphs))
    assert all(corpus.is_prose(paragraph) for paragraph in paragraphs)


def test_another_process_reads_the_same_text(embedded: corpus.Corpus, recipes: Path) -> None:
    script = "import corpus, zlib; print(zlib.crc32(repr(corpus.load_corpus()).encode()))"
    seed = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(recipes)}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | seed, capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) == zlib.crc32(repr(embedded).encode())


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        ("Return the number of elements that the given list holds at this moment.", True),
        ('He said: it is a long sentence that ends in a quotation, "as here."', True),
        ("Too short to count.", False),
        ("This one has enough words in it but no full stop at its end", False),
        (">>> print the words of a session that somebody typed in long ago.", False),
        ("stmt ::= a rule of the grammar that is written as if it were prose.", False),
        ("x[0] = {1: 2, 3: 4}; y[1] = {5: 6, 7: 8}; z[2] = {9: 10}; w = (1, 2, 3);", False),
    ],
)
def test_prose_is_told_from_code(paragraph: str, expected: bool) -> None:
    assert corpus.is_prose(paragraph) is expected


def test_paragraphs_are_unwrapped() -> None:
    text = "First line of a paragraph that goes\n   on in the next one.\n\n\nname = 3\n\nAnother: no."
    assert corpus.prose_of(text) == ["First line of a paragraph that goes on in the next one."]


def test_a_python_without_texts_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_topics", lambda: iter(()))
    monkeypatch.setattr(corpus, "_docstrings", lambda: iter(()))
    with pytest.raises(RuntimeError, match="pass a text of your own: --dataset PATH"):
        corpus.load_corpus()
