"""The recipe's arguments beside the Trainer's own, and the defaults of the recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEFAULT_DATASET = "Salesforce/wikitext"
DEFAULT_DATASET_CONFIG = "wikitext-2-raw-v1"
LEARNING_RATE_FROM_SCRATCH = 1e-3

TRAINER_DEFAULTS: dict[str, Any] = {
    "output_dir": "output/llama_swap",
    "do_train": True,
    "do_eval": True,
    "num_train_epochs": 1.0,
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
    "ddp_find_unused_parameters": False,
    "prediction_loss_only": True,
}
"""Defaults of Trainer arguments in the recipe; `derived_defaults` adds those that depend on others."""


class RecipeError(ValueError):
    """The run cannot start as asked; the message says what to do."""


@dataclass
class ModelArguments:
    """Which model: weights by name, or a configuration by name, or a Llama of the sizes given here."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of pretrained weights to go on training."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a configuration; the weights are random."}
    )
    model_revision: str = field(
        default="main", metadata={"help": "Branch, tag or commit of the names above."}
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder of a tokenizer, or `bpe`: trained on the training text. Default: the "
            "name of the model or configuration; `bpe` for a model of given sizes."
        },
    )
    vocab_size: int = field(default=8192, metadata={"help": "Tokens of a `bpe` tokenizer, at most."})
    hidden_size: int = field(default=256, metadata={"help": "Width of the residual stream."})
    num_layers: int = field(
        default=4,
        metadata={
            "help": "Decoder layers. A file's model.model_config.num_layers counts where nothing else says."
        },
    )
    num_heads: int = field(default=4, metadata={"help": "Attention heads."})
    num_kv_heads: int | None = field(
        default=None, metadata={"help": "Key and value heads. Default: num_heads."}
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of the feed-forward. Default: 8/3 hidden_size, up to 16s."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "sdpa, eager, flash_attention_2, ..."}
    )
    dtype: str | None = field(
        default=None,
        metadata={"help": "Of the weights: float32, bfloat16, float16 or auto. For autocast use --bf16."},
    )


SIZE_OPTIONS = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")


@dataclass
class DataArguments:
    """Which text is read, and how it is cut into blocks of tokens."""

    dataset: str = field(
        default=DEFAULT_DATASET,
        metadata={"help": "Hub id; a local file or folder of text, JSON (lines) or parquet; or `sample`."},
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the Hub dataset, or subfolder of the local folder."}
    )
    validation_file: str | None = field(
        default=None,
        metadata={"help": "Local file or folder to evaluate on.", "aliases": ["--eval_dataset"]},
    )
    validation_split_percentage: int = field(
        default=5,
        metadata={"help": "Share of the training rows held out where the data has no validation part."},
    )
    text_column: str | None = field(
        default=None, metadata={"help": "Column of the text. Default: `text`, or the only column of strings."}
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read the text while training, shuffled in a buffer, and hold neither rows nor tokens. "
            "Needs --max_steps."
        },
    )
    block_size: int = field(default=256, metadata={"help": "Tokens of one training sample."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use so many blocks for training."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Use so many blocks for evaluation."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenize (JSON, parquet and Hub data)."}
    )
    overwrite_cache: bool = field(
        default=False, metadata={"help": "Tokenize again even if it is in the cache."}
    )
    eval_before: bool | None = field(
        default=None, metadata={"help": "Evaluate before training too. Default: as --do_eval."}
    )


@dataclass
class PlannerArguments:
    """MindSpeed's flags: they set ``memory.mode`` of the configuration."""

    smart_swap: bool = field(
        default=False,
        metadata={"help": "Plan what is kept, swapped and recomputed (memory.mode: smart_swap)."},
    )
    adaptive_memory_optimization: bool = field(
        default=False,
        metadata={"help": "The same, with no fate written by hand (memory.mode: adaptive)."},
    )
