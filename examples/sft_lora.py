"""Fine-tune adapters (LoRA) with TRL's SFTTrainer and swapped activations.

    pip install trl peft
    python examples/sft_lora.py

It needs no GPU and no network: the model is a tiny Llama with random weights, the text is below, and a token
is a byte. The base weights are frozen and never moved; the tensors that the layers save for backward are.

By default TRL recomputes every layer (`gradient_checkpointing`), and nothing would be left to swap inside the
layers. So it is off here, and the configuration says what is recomputed.
"""

import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from hf_actswap import with_actswap

CONFIG = {
    "log": "full",  # all statistics in the Trainer's log
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1, 2]}],
    },
    "recompute_config": {"select_recompute": {"mlp.act_fn": [0, 1, 2, 3], "mlp.mul": [0, 1, 2, 3]}},
}
QUESTIONS = {
    "What is kept?": "Tensors that backward needs at once.",
    "What is swapped?": "Tensors that are needed late and expensive to compute.",
    "What is recomputed?": "Tensors that are cheap to compute.",
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes; nothing is trained or downloaded."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def main() -> None:
    """Train ten steps, and print what was swapped."""
    set_seed(0)
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    data = Dataset.from_list([{"prompt": ask, "completion": f" {say}"} for ask, say in QUESTIONS.items()] * 8)
    args = with_actswap(SFTConfig)(
        output_dir=tempfile.mkdtemp(),
        actswap=CONFIG,
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=128,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
    )
    # For `tensor_parallel_size` above 1: `class Trainer(ActSwapTrainerMixin, SFTTrainer)`.
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"),
    )
    trainer.model.print_trainable_parameters()
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(
                f"step {entry['step']:2}: loss {entry['loss']:.3f}, "
                f"swapped {entry['actswap_offloaded_gib'] * 1024:.3f} MiB, "
                f"recomputed {entry['actswap_recomputes']} regions"
            )


if __name__ == "__main__":
    main()
