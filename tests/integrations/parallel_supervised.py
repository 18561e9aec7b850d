"""LoRA under TRL's Trainer, with ours in front of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from hf_actswap import ActSwapCallback, ActSwapTrainerMixin
from tests.integrations.parallel_runs import InOrder, Rows, parallel, tiny_llama, train


class SupervisedTrainer(InOrder, ActSwapTrainerMixin, SFTTrainer):
    """TRL's, with ours in front."""


class OfTheUser(TrainerCallback):
    """Nothing; a callback of the user's beside ours."""


def supervised(folder: Path, size: int, data_parallel_size: int) -> dict[str, Any]:
    """LoRA under TRL's Trainer, which computes the loss from the head's weight itself."""
    rows = Rows()
    data = Dataset.from_list(
        [
            {"input_ids": row["input_ids"].tolist(), "labels": row["labels"].tolist()}
            for row in (rows[index] for index in range(24))
        ]
    )
    config = SFTConfig(
        output_dir=str(folder / f"supervised {size}"),
        max_steps=3,
        per_device_train_batch_size=4 // data_parallel_size,
        per_device_eval_batch_size=3,
        eval_strategy="steps",
        eval_steps=3,
        learning_rate=0.05,
        logging_steps=1,
        report_to="none",
        save_strategy="steps",
        save_steps=3,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=False,
        loss_type="nll",  # some releases of TRL have another default, which is rejected
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], init_lora_weights=True)
    trainer = SupervisedTrainer(
        model=get_peft_model(tiny_llama(), lora),
        args=config,
        train_dataset=data,
        eval_dataset=data.select(range(10)),
        processing_class=word_tokenizer(),
        callbacks=[ActSwapCallback(parallel(size)), OfTheUser()],
    )
    run = train(trainer)
    history = trainer.state.log_history
    told_by_trl = {
        name: [entry[name] for entry in history if name in entry]
        for name in ("entropy", "mean_token_accuracy", "num_tokens", "eval_entropy")
    }
    return {"run": run, "log": told_by_trl}


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {str(number): number for number in range(67)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token="1", pad_token="2"
    )
