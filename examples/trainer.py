# %% [markdown]
"""Train with the Hugging Face Trainer; activations are swapped and recomputed as `trainer.yaml` says.

    python examples/trainer.py

It needs no GPU and no network: the model is a tiny Llama with random weights, and the text is below. With
your own model, only the line that makes the arguments differs from any other script.
"""

# %%
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, default_data_collator, set_seed

from hf_actswap import ActSwapTrainingArguments

CONFIG = str(Path(__file__).with_name("trainer.yaml"))

# %% [markdown]
# The model and the data. In place of this: `AutoModelForCausalLM.from_pretrained(...)` and a data set.

# %%
TEXT = """Backward needs what forward computed, in the opposite order. What is needed last can wait in host
memory, and come back while the layers after it are busy. What is cheap to compute need not be kept at all.
"""
BLOCK = 64

set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
)
stream = torch.tensor(list((TEXT * 16).encode()))  # one token a byte
blocks = stream[: len(stream) // BLOCK * BLOCK].view(-1, BLOCK)
data = [{"input_ids": block, "labels": block} for block in blocks]

# %% [markdown]
# The training. The arguments tell the Trainer what to do: the plan is put on the model and printed when the
# training begins, and removed when it ends. Losses and gradients are bitwise those of the same training
# without it.

# %%
args = ActSwapTrainingArguments(
    output_dir=tempfile.mkdtemp(),
    actswap=CONFIG,
    max_steps=20,
    per_device_train_batch_size=4,
    learning_rate=3e-3,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=default_data_collator)
trainer.train()

# %% [markdown]
# The last line says what was saved. The Trainer's log, and so TensorBoard and every other tracker, has the
# bytes that were moved.

# %%
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(
            f"step {entry['step']:2}: loss {entry['loss']:.3f}, swapped out "
            f"{entry['actswap_offloaded_gib'] * 1024:.3f} MiB and back "
            f"{entry['actswap_prefetched_gib'] * 1024:.3f}, "
            f"recomputed {entry['actswap_recomputes']} regions"
        )
