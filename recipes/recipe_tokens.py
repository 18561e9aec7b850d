"""Turns text into blocks of tokens: a tokenizer, a flat stream, and equal blocks cut from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from recipe_options import DataArguments, ModelArguments, RecipeError
from recipe_texts import Rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

BPE = "bpe"
END_OF_TEXT = "<|endoftext|>"
BPE_TRAINING_ROWS = 1_000_000
"""More rows than this teach a small vocabulary nothing and cost minutes."""
ROWS_PER_BATCH = 1000
SHUFFLED_BLOCKS = 1000

TokenIds = npt.NDArray[np.int32]


def train_bpe(rows: Rows, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: any text comes back exactly from ``decode(encode(text))``.

    Args:
        rows: the training text.
        vocab_size: at most so many tokens, the 256 bytes and ``<|endoftext|>`` (begin, end and padding)
            included; a short text may give fewer.

    Raises:
        RecipeError: ``vocab_size`` has no room for the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise RecipeError(
            f"--vocab_size {vocab_size}: a byte-level tokenizer needs at least {len(alphabet) + 1}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    batches = batches_of_text(rows)
    tokenizer.train_from_iterator(islice(batches, BPE_TRAINING_ROWS // ROWS_PER_BATCH), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def is_streamed(rows: Rows) -> bool:
    """Whether rows are read anew each time, and their number is not known."""
    return not hasattr(rows, "__len__")


def batches_of_text(rows: Rows) -> Iterator[list[str]]:
    """Yield the rows in lists of `ROWS_PER_BATCH`."""
    if is_streamed(rows):
        yield from (batch["text"] for batch in rows.iter(ROWS_PER_BATCH))
        return
    for start in range(0, len(rows), ROWS_PER_BATCH):
        batch = rows[start : start + ROWS_PER_BATCH]
        yield batch if isinstance(batch, list) else batch["text"]


def tokenizer_source(model: ModelArguments) -> str:
    """Return the name of the tokenizer to load, or `BPE`."""
    return model.tokenizer_name or model.model_name_or_path or model.config_name or BPE


def load_tokenizer(
    model: ModelArguments, rows: Rows, folder: Path, *, train: bool, reuse: bool
) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or train it on ``rows`` and leave it in ``folder`` for the other processes.

    Args:
        model: names the tokenizer.
        rows: the training text.
        folder: where a trained tokenizer is written and read.
        train: whether this process trains a tokenizer; other processes call later and read the one written.
        reuse: whether a run is resumed: then the tokenizer in ``folder`` is read if there is one.

    Raises:
        RecipeError: the tokenizer cannot be loaded.
    """
    source = tokenizer_source(model)
    if source == BPE:
        if train and not (reuse and (folder / "tokenizer.json").is_file()):
            train_bpe(rows, model.vocab_size).save_pretrained(folder)
        source = str(folder)
    try:
        return AutoTokenizer.from_pretrained(source, revision=model.model_revision)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RecipeError(
            f"No tokenizer could be loaded from '{source}': {reason}\n"
            "Name one with --tokenizer_name, or train one on the text: --tokenizer_name bpe."
        ) from error


def token_stream(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, data: DataArguments, limit: int | None = None
) -> TokenIds:
    """Tokenize all rows and join them, in order; return the token ids, shape [tokens].

    Special tokens are only those that the tokenizer itself adds (a `bpe` one adds none). The stream is held
    in memory, 4 bytes a token. It ends with the row that gives it ``limit`` tokens.
    """

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": tokenizer(batch["text"], return_attention_mask=False)["input_ids"]}

    if not isinstance(rows, list) and not is_streamed(rows):
        rows = rows.map(
            tokenize,
            batched=True,
            num_proc=data.preprocessing_num_workers,
            remove_columns=["text"],
            load_from_cache_file=not data.overwrite_cache,
            desc="Tokenizing",
        ).with_format("numpy")
        lists = (ids for start in range(0, len(rows), ROWS_PER_BATCH) for ids in _ids(rows, start))
    else:
        lists = (ids for batch in batches_of_text(rows) for ids in tokenize({"text": batch})["input_ids"])
    tokens, pieces = 0, []
    for ids in lists:
        pieces.append(np.asarray(ids, dtype=np.int32))
        tokens += len(ids)
        if limit is not None and tokens >= limit:
            break
    return _joined(pieces)


def streamed_blocks(rows: Any, tokenizer: PreTrainedTokenizerBase, data: DataArguments, seed: int) -> Any:
    """Return a ``datasets.IterableDataset`` of blocks like those of `TokenBlocks`, cut while it is read.

    They are shuffled in a buffer of `SHUFFLED_BLOCKS`, anew in each epoch. What `ROWS_PER_BATCH` rows leave
    is dropped.

    Args:
        rows: a ``datasets.IterableDataset``.
        seed: of the order.

    Raises:
        RecipeError: blocks of less than two tokens, or the limit leaves none.
    """

    def cut_up(batch: dict[str, list[str]]) -> dict[str, Any]:
        ids = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        cut = _blocks(_joined([np.asarray(one, dtype=np.int64) for one in ids]), data.block_size)
        return {"input_ids": cut, "labels": cut}

    if data.block_size < 2:
        raise _too_short(data.block_size)
    limit = data.max_train_samples
    if limit is not None and limit < 1:
        raise RecipeError(f"--max_train_samples {limit} leaves no block to train on.")
    blocks = rows.map(cut_up, batched=True, batch_size=ROWS_PER_BATCH, remove_columns=["text"])
    if limit is not None:
        blocks = blocks.take(limit)
    return blocks.shuffle(seed=seed, buffer_size=SHUFFLED_BLOCKS)


def _too_short(block_size: int) -> RecipeError:
    return RecipeError(f"--block_size {block_size}: at least 2 tokens are needed to predict one.")


def _joined(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)


def _blocks(stream: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    count = len(stream) // size
    return stream[: count * size].reshape(count, size)


def _ids(rows: Any, start: int) -> Any:
    return rows[start : start + ROWS_PER_BATCH]["input_ids"]


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Consecutive blocks of a token stream; the remainder is dropped, labels equal inputs.

    Args:
        stream: token ids, shape [tokens].
        block_size: number of tokens in a block.
        limit: the most blocks to use, from the beginning; ``None``: all.

    Raises:
        RecipeError: the stream is shorter than one block, or the limit leaves none.
    """

    def __init__(self, stream: TokenIds, block_size: int, limit: int | None = None) -> None:
        if block_size < 2:
            raise _too_short(block_size)
        self.blocks = _blocks(stream, block_size)[: None if limit is None else max(limit, 0)]
        if not len(self.blocks):
            raise RecipeError(
                f"{len(stream)} tokens give no block of {block_size} (limit: {limit}); "
                "use more text, a smaller --block_size or a larger limit."
            )

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = torch.from_numpy(self.blocks[index].astype(np.int64))
        return {"input_ids": block, "labels": block.clone()}


def unigram_entropy(stream: TokenIds) -> float:
    """Return the entropy of token frequencies in nats: the loss of the best model that ignores context."""
    counts = np.bincount(stream)
    shares = counts[counts > 0] / len(stream)
    return float(-(shares * np.log(shares)).sum())


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, or infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
