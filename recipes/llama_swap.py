"""Pretrain a Llama on text with activations swapped, recomputed, or both, as one YAML file says.

    accelerate launch recipes/llama_swap.py [CONFIG.yaml|CONFIG.json] [--argument value ...]

Without arguments it trains a small Llama with random weights on wikitext-2 from the Hub, with the default
swap strategy. A file may have sections of hf_actswap (files of MindFormers' documents work unchanged) and any
argument of the recipe or of the Trainer; the command line overrides the file. ``--actswap none`` trains with
a plain Trainer. With ``parallel_config`` in the file several processes hold one model. For more see
`README.md` beside this file.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from recipe_arguments import parse_arguments
from recipe_checkpoints import StateLast, faults_of, last_complete_checkpoint
from recipe_options import DataArguments, ModelArguments, RecipeError
from recipe_stop import Stop
from recipe_texts import load_texts
from recipe_tokens import (
    TokenBlocks,
    load_tokenizer,
    perplexity,
    streamed_blocks,
    token_stream,
    unigram_entropy,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_actswap import ActSwapConfig, ActSwapTrainer, stage_from_config, stage_from_pretrained
from hf_actswap.errors import ActSwapError
from hf_actswap.integrations.parallel_checkpoint import checkpoint_fact
from hf_actswap.parallel.rank_agreement import LostRankError, failing_together, shared_store
from hf_actswap.plan import load_config_or_plan

logger = logging.getLogger("llama_swap")

SHORTEST_POSITION_RANGE = 2048


def reject_independent_processes(args: TrainingArguments) -> None:
    """Raise an error if the launcher started several processes that would each train alone.

    Accelerate starts them so, without an error, on a machine without accelerator when its configuration says
    MULTI_GPU and the script does not set the CPU: independent trainings would write to the same folder.

    Raises:
        RecipeError: ``WORLD_SIZE`` is above 1 and the Trainer sees one process.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and args.world_size == 1:
        raise RecipeError(
            f"The launcher started {started} processes, but each of them would train alone. "
            "On CPU pass --use_cpu true (or set ACCELERATE_USE_CPU=true); else start one process."
        )


def checkpoint_to_resume(args: TrainingArguments) -> str | None:
    """Resolve ``--resume_from_checkpoint``: a path, or ``last`` (``true``) for the newest in ``output_dir``
    that was written to its end.

    Raises:
        RecipeError: the path does not exist.
    """
    asked = args.resume_from_checkpoint
    if asked is None or str(asked).lower() in ("false", "none"):
        return None
    if str(asked).lower() in ("true", "last"):
        folder = Path(str(args.output_dir))
        last = last_complete_checkpoint(folder) if folder.is_dir() else None
        if last is None:
            logger.warning(
                "There is no whole checkpoint in %s yet: training starts from the beginning.", args.output_dir
            )
        return last
    if not Path(asked).is_dir():
        raise RecipeError(
            f"--resume_from_checkpoint: there is no folder {asked} (`last` finds the newest one)."
        )
    for fault in faults_of(Path(asked)):
        logger.warning("%s was not written to its end: %s.", asked, fault)
    return str(asked)


def llama_config(model: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int) -> LlamaConfig:
    """Return the configuration of a Llama of the sizes given."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads or model.num_heads,
        intermediate_size=model.intermediate_size or 16 * math.ceil(model.hidden_size * 8 / 3 / 16),
        max_position_embeddings=max(block_size, SHORTEST_POSITION_RANGE),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_model(
    model: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    actswap: Any = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Load weights, or initialise them at random from a named configuration or from the size options.

    In a pipeline each process reads, or makes, the weights of its own stage, unless the vocabulary must grow.
    Random weights of a pipeline come from ``seed`` alone: they are the same in any number of stages, but not
    those of a run without a pipeline, which draws them from the global generator.

    Raises:
        RecipeError: the model cannot be loaded, or its sizes do not fit together.
        ActSwapError: the model cannot be divided into stages.
    """
    how: dict[str, Any] = {} if model.dtype is None else {"dtype": model.dtype}
    if model.attn_implementation is not None:
        how["attn_implementation"] = model.attn_implementation
    try:
        if named := model.model_name_or_path or model.config_name:
            config = AutoConfig.from_pretrained(named, revision=model.model_revision)
        else:
            config = llama_config(model, tokenizer, block_size)
        asked = load_config_or_plan(actswap or {})
        in_stages = isinstance(asked, ActSwapConfig) and asked.parallel_config.runs_pipeline
        if in_stages and len(tokenizer) > config.get_text_config().vocab_size:
            logger.info("The vocabulary must grow: each process opens the whole model.")
            in_stages = False
        if source := model.model_name_or_path:
            how["revision"] = model.model_revision
            built = stage_from_pretrained(AutoModelForCausalLM, source, asked if in_stages else {}, **how)
        elif in_stages:
            built = stage_from_config(AutoModelForCausalLM, config, asked, seed, **how)
        else:
            built = AutoModelForCausalLM.from_config(config, **how)
    except (OSError, ValueError) as error:
        raise RecipeError(f"The model cannot be built: {error}") from error
    if len(tokenizer) > built.get_input_embeddings().weight.shape[0]:
        built.resize_token_embeddings(len(tokenizer))
    built.config.use_cache = False  # a key-value cache serves generation only
    return built


def prepare_data(
    model: ModelArguments, data: DataArguments, args: TrainingArguments, *, resumed: bool
) -> tuple[PreTrainedTokenizerBase, Any, TokenBlocks | None, dict[str, float]]:
    """Read, tokenize and cut the text.

    Returns:
        The tokenizer, the training blocks (`TokenBlocks`, or `streamed_blocks`), the evaluation blocks
        (``None`` without ``do_eval``), and numbers to judge the loss by: tokens, ``train_unigram_entropy``,
        and ``ln_vocab`` in nats. Of a stream neither its tokens nor their entropy are known.

    Raises:
        RecipeError: see `load_texts`, `load_tokenizer` and `TokenBlocks`; a stream without ``max_steps``, or
            with nothing to evaluate on.
    """
    if data.streaming and args.do_train and args.max_steps <= 0:
        raise RecipeError(
            "--streaming: how many blocks there are is not known. Say when it ends: --max_steps N."
        )
    with args.main_process_first(desc="tokenizer and token cache"):
        texts = load_texts(data)
        if args.do_eval and texts.evaluation is None:
            raise RecipeError(
                "--streaming holds no rows out, and the data has no validation part: --validation_file PATH, "
                "or --do_eval false."
            )
        tokenizer = load_tokenizer(
            model, texts.train, Path(args.output_dir), train=args.local_process_index == 0, reuse=resumed
        )
        facts = {"ln_vocab": math.log(len(tokenizer))}
        if data.streaming:
            train_blocks = streamed_blocks(texts.train, tokenizer, data, args.seed)
        else:
            stream = token_stream(texts.train, tokenizer, data)
            train_blocks = TokenBlocks(stream, data.block_size, data.max_train_samples)
            facts["train_tokens"] = train_blocks.blocks.size
            facts["train_unigram_entropy"] = unigram_entropy(train_blocks.blocks.ravel())
        eval_blocks = None
        if args.do_eval:
            limit = data.max_eval_samples and data.max_eval_samples * data.block_size
            eval_stream = token_stream(texts.evaluation, tokenizer, data, limit)
            eval_blocks = TokenBlocks(eval_stream, data.block_size, data.max_eval_samples)
        facts["eval_tokens"] = eval_blocks.blocks.size if eval_blocks else 0
    return tokenizer, train_blocks, eval_blocks, facts


def report_evaluation(trainer: Trainer, prefix: str, metrics: Mapping[str, float]) -> None:
    """Print and write an evaluation's metrics as ``<prefix>_loss``, ``<prefix>_perplexity`` and so on."""
    renamed = {name.replace("eval", prefix, 1): value for name, value in metrics.items()}
    renamed[f"{prefix}_perplexity"] = perplexity(metrics["eval_loss"])
    trainer.log_metrics(prefix, renamed)
    trainer.save_metrics(prefix, renamed)


def train(trainer: Trainer, checkpoint: str | None) -> None:
    """Train, save model and tokenizer, and write the metrics, an evaluation at the start included."""
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.save_state()
    for entry in trainer.state.log_history:
        if entry["step"] == 0 and "eval_loss" in entry:
            report_evaluation(trainer, "eval_before", {name: entry[name] for name in entry if name != "step"})
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)


def run(argv: Sequence[str], callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train and evaluate as ``argv`` says; the model, tokenizer and metrics are left in ``output_dir``.

    Raises:
        RecipeError: the run cannot start as asked.
        ActSwapError: the file, the command line or the plan is wrong.
    """
    with shared_store():  # used until a process group exists
        model_args, data_args, args = parse_arguments(argv)
    logging.getLogger("llama_swap").setLevel(logging.INFO if args.process_index == 0 else logging.WARNING)
    logging.getLogger("hf_actswap").setLevel(logging.INFO)
    with failing_together("start", args.ddp_timeout) as facts:
        reject_independent_processes(args)
        checkpoint = checkpoint_to_resume(args)
        facts["resume_from_checkpoint"] = checkpoint_fact(checkpoint, args.output_dir)
    # It runs inside train(): after evaluate() alone, accelerate takes the model for prepared and does not
    # wrap it for training, and several processes would each train alone without an error.
    if data_args.eval_before and args.do_eval and checkpoint is None:
        args.eval_on_start = True
    set_seed(args.seed)

    with failing_together("data and model", args.ddp_timeout):
        tokenizer, train_blocks, eval_blocks, metrics = prepare_data(
            model_args, data_args, args, resumed=checkpoint is not None
        )
        model = build_model(model_args, tokenizer, data_args.block_size, args.actswap, args.seed)
    logger.info("%s with %.2f M parameters", type(model).__name__, model.num_parameters() / 1e6)
    if isinstance(args.actswap, dict):  # for those who compare with MindFormers' files of log lines
        args.actswap.setdefault("log", "full")
    trainer_class = Trainer if args.actswap is None else ActSwapTrainer
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=train_blocks if args.do_train else None,
        eval_dataset=eval_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[StateLast(), *callbacks],
    )
    trainer.log_metrics("data", metrics)
    trainer.save_metrics("data", metrics)
    if args.do_train:
        train(trainer, checkpoint)
    if args.do_eval:
        report_evaluation(trainer, "eval", trainer.evaluate())


def main() -> None:
    """Run with the command line's arguments; errors that the user can fix are printed without a traceback."""
    stop = Stop()
    stop.listen()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        run(sys.argv[1:], [stop])
    except (RecipeError, ActSwapError, LostRankError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    # First free the model and its data-parallel wrapper: freed after the process group, they may hang.
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
