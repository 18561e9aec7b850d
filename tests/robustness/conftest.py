"""A small training of the recipe in which everything counts: swap, recomputation, dropout, two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

CONFIG = """\
log: full
swap_config:
  swap: true
  op_swap:
    - {op_name: attention, backward_prefetch: 20, layers: [0, 1]}
    - {op_name: feed_forward, backward_prefetch: 15, layers: [1]}
recompute_config:
  select_recompute: {feed_forward: [0]}
"""


@pytest.fixture(scope="session")
def arguments(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> list[str]:
    """Arguments of the recipe; dropout, so that the random states count too."""
    folder = tmp_path_factory.mktemp("recipe")
    LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    ).save_pretrained(folder / "model")
    (folder / "config.yaml").write_text(CONFIG)
    text = (repository / "docs" / "parallel.md").read_text(encoding="utf-8")
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return [
        str(folder / "config.yaml"),
        *("--dataset", str(folder / "text.txt"), "--config_name", str(folder / "model")),
        *("--tokenizer_name", "bpe", "--vocab_size", "300", "--block_size", "32"),
        *("--per_device_train_batch_size", "2", "--logging_steps", "1", "--do_eval", "false"),
        *("--use_cpu", "true", "--disable_tqdm", "true", "--seed", "3", "--learning_rate", "0.005"),
    ]
