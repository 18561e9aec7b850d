"""From text to blocks: nothing is lost before the last remainder, and the tokenizer gives every text back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_options import DataArguments, ModelArguments, RecipeError
from recipe_tokens import (
    END_OF_TEXT,
    TokenBlocks,
    load_tokenizer,
    perplexity,
    streamed_blocks,
    token_stream,
    tokenizer_source,
    train_bpe,
    unigram_entropy,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast, default_data_collator

datasets = pytest.importorskip("datasets", reason="only the recipes need it")

ROWS = [f"Row {number} speaks of rows and of the number {number}.\n" for number in range(2500)]


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return train_bpe(ROWS, vocab_size=400)


@given(text=st.text())
def test_any_text_comes_back_from_the_bpe(bpe: PreTrainedTokenizerFast, text: str) -> None:
    assert bpe.decode(bpe(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_the_bpe_is_of_the_size_asked_for_and_compresses(bpe: PreTrainedTokenizerFast) -> None:
    assert len(bpe) == 400
    assert bpe.eos_token == bpe.bos_token == bpe.pad_token == END_OF_TEXT
    assert len(bpe(ROWS[7])["input_ids"]) < len(ROWS[7]) / 2


def test_a_vocabulary_without_room_for_the_bytes_is_rejected() -> None:
    with pytest.raises(RecipeError) as caught:
        train_bpe(ROWS, vocab_size=256)
    assert str(caught.value) == "--vocab_size 256: a byte-level tokenizer needs at least 257."


def test_the_other_processes_read_what_the_first_one_wrote(tmp_path: Path) -> None:
    model = ModelArguments(vocab_size=300)
    with pytest.raises(RecipeError, match="No tokenizer could be loaded from"):
        load_tokenizer(model, ROWS, tmp_path, train=False, reuse=False)
    first = load_tokenizer(model, ROWS, tmp_path, train=True, reuse=False)
    other = load_tokenizer(model, [], tmp_path, train=False, reuse=False)
    resumed = load_tokenizer(model, [], tmp_path, train=True, reuse=True)
    assert first.get_vocab() == other.get_vocab() == resumed.get_vocab()
    assert AutoTokenizer.from_pretrained(tmp_path)(ROWS[3])["input_ids"] == first(ROWS[3])["input_ids"]
    fresh = load_tokenizer(ModelArguments(vocab_size=280), ROWS, tmp_path, train=True, reuse=False)
    assert len(fresh) == 280


@pytest.mark.parametrize(
    ("model", "source"),
    [
        (ModelArguments(), "bpe"),
        (ModelArguments(config_name="c"), "c"),
        (ModelArguments(config_name="c", tokenizer_name="bpe"), "bpe"),
        (ModelArguments(model_name_or_path="m"), "m"),
        (ModelArguments(model_name_or_path="m", tokenizer_name="t"), "t"),
    ],
)
def test_whose_tokenizer(model: ModelArguments, source: str) -> None:
    assert tokenizer_source(model) == source


def test_an_unknown_tokenizer_is_told_what_to_do(tmp_path: Path) -> None:
    model = ModelArguments(tokenizer_name=str(tmp_path))
    with pytest.raises(RecipeError, match="train one on the text: --tokenizer_name bpe"):
        load_tokenizer(model, ROWS, tmp_path, train=True, reuse=False)


def test_the_stream_is_every_row_in_order(
    bpe: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    stream = token_stream(ROWS, bpe, DataArguments())
    assert stream.dtype == np.int32
    assert bpe.decode(stream, clean_up_tokenization_spaces=False) == "".join(ROWS)
    table = datasets.Dataset.from_dict({"text": ROWS})
    np.testing.assert_array_equal(token_stream(table, bpe, DataArguments()), stream)
    np.testing.assert_array_equal(
        token_stream(table.select(range(40, 60)), bpe, DataArguments()),
        token_stream(ROWS[40:60], bpe, DataArguments()),
    )


def test_no_rows_give_an_empty_stream(bpe: PreTrainedTokenizerFast) -> None:
    assert token_stream([], bpe, DataArguments()).tolist() == []
    assert token_stream(["", ""], bpe, DataArguments()).tolist() == []


@given(tokens=st.integers(4, 60), block_size=st.integers(2, 7), limit=st.none() | st.integers(-2, 9))
def test_blocks_are_the_stream_without_its_remainder(tokens: int, block_size: int, limit: int | None) -> None:
    stream = np.arange(tokens, dtype=np.int32)
    expected = tokens // block_size if limit is None else min(limit, tokens // block_size)
    if expected < 1:
        with pytest.raises(RecipeError, match="give no block of"):
            TokenBlocks(stream, block_size, limit)
        return
    blocks = TokenBlocks(stream, block_size, limit)
    assert len(blocks) == expected
    joined = [token for index in range(len(blocks)) for token in blocks[index]["input_ids"].tolist()]
    assert joined == list(range(expected * block_size))


def test_a_stream_gives_the_same_blocks_in_another_order(bpe: PreTrainedTokenizerFast) -> None:
    """But for what is left of each 1,000 rows."""
    stream = datasets.IterableDataset.from_generator(lambda: ({"text": row} for row in ROWS))
    data = DataArguments(block_size=16)
    expected = [
        block
        for first in range(0, len(ROWS), 1000)
        for block in TokenBlocks(token_stream(ROWS[first : first + 1000], bpe, data), 16).blocks.tolist()
    ]
    blocks = streamed_blocks(stream, bpe, data, seed=3)
    found = [list(row["input_ids"]) for row in blocks]
    assert found != expected
    assert sorted(found) == sorted(expected)
    assert found == [list(row["labels"]) for row in blocks]
    blocks.set_epoch(1)
    assert [list(row["input_ids"]) for row in blocks] != found
    few = streamed_blocks(stream, bpe, DataArguments(block_size=16, max_train_samples=5), seed=3)
    assert sorted(list(row["input_ids"]) for row in few) == sorted(expected[:5])


@pytest.mark.parametrize("settings", [{"block_size": 1}, {"max_train_samples": 0}, {"max_train_samples": -1}])
def test_a_stream_that_gives_no_block_is_rejected(
    settings: dict[str, int], bpe: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(RecipeError, match=f"--{next(iter(settings))}"):
        streamed_blocks(None, bpe, DataArguments(**settings), seed=3)


def test_no_more_is_read_of_a_stream_than_is_asked_for(bpe: PreTrainedTokenizerFast) -> None:
    read = []

    def rows() -> Iterator[dict[str, str]]:
        for row in ROWS:
            read.append(row)
            yield {"text": row}

    stream = datasets.IterableDataset.from_generator(rows)
    whole = token_stream(ROWS, bpe, DataArguments())
    part = token_stream(stream, bpe, DataArguments(), limit=100)
    np.testing.assert_array_equal(part, whole[: len(part)])
    assert len(part) >= 100
    assert len(read) == 1000
    np.testing.assert_array_equal(token_stream(stream, bpe, DataArguments()), whole)


def test_labels_are_a_copy_and_blocks_collate() -> None:
    blocks = TokenBlocks(np.arange(12, dtype=np.int32), 4)
    sample = blocks[1]
    sample["labels"][0] = -100
    assert sample["input_ids"].tolist() == blocks[1]["labels"].tolist() == [4, 5, 6, 7]
    batch = default_data_collator([blocks[0], blocks[2]])
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_a_text_of_too_few_tokens_is_rejected() -> None:
    with pytest.raises(RecipeError) as caught:
        TokenBlocks(np.arange(7, dtype=np.int32), 8)
    assert str(caught.value) == (
        "7 tokens give no block of 8 (limit: None); use more text, a smaller --block_size or a larger limit."
    )
    with pytest.raises(RecipeError, match="at least 2 tokens are needed to predict one"):
        TokenBlocks(np.arange(7, dtype=np.int32), 1)


def test_entropy_and_perplexity() -> None:
    assert unigram_entropy(np.array([5, 0, 5, 0, 9, 9, 2, 2], dtype=np.int32)) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([3, 3, 3], dtype=np.int32)) == 0
    skewed = np.array([1, 1, 1, 0], dtype=np.int32)
    assert unigram_entropy(skewed) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e6) == math.inf
