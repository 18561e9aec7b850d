"""A training loop of your own under Accelerate, with swapped activations.

    python examples/accelerate_loop.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py     # on two GPUs

It needs no GPU and no network: the model is a tiny Llama with random weights, and the text is below.
`hf_actswap.prepare` replaces `accelerator.prepare` for the model and the optimizer; the loop does not change.
With `parallel_config: {tensor_parallel_size: 2}` in the configuration it also divides the model.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import hf_actswap

CONFIG = {
    "swap_config": {
        "swap": True,
        "op_swap": [
            {"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1, 2, 3]},
            {"op_name": "mlp.up_proj", "backward_prefetch": 15, "layers": [1, 2]},
        ],
    },
    "recompute_config": {"select_recompute": {"mlp.act_fn": [0, 3], "mlp.mul": [0, 3]}},
}
TEXT = """Backward needs what forward computed, in the opposite order. What is needed last can wait in host
memory, and come back while the layers after it are busy. What is cheap to compute need not be kept at all.
"""
BLOCK = 64


def main() -> None:
    """Train twenty steps of two micro-batches, and print what was swapped in each."""
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prepared = hf_actswap.prepare(accelerator, model, CONFIG, optimizer)
    model, optimizer = prepared.model, prepared.optimizer

    stream = torch.tensor(list((TEXT * 48).encode()))  # one token a byte
    blocks = stream[: len(stream) // BLOCK * BLOCK].view(-1, BLOCK)
    loader = accelerator.prepare(DataLoader(blocks, batch_size=4, shuffle=True, drop_last=True))

    accelerator.print("\n".join(prepared.applied.plan.log_lines()))
    before = prepared.applied.stats()
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:  # the last micro-batch of a step
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if number % 8 == 7:
            total = prepared.applied.stats()
            step, before = total - before, total
            accelerator.print(
                f"micro-batch {number + 1}: loss {loss.item():.3f}, since the last line {step.offloads} "
                f"storages of {step.offloaded_bytes:,} bytes swapped, {step.recomputes} regions recomputed"
            )
    prepared.applied.remove()  # the model is as it was
    accelerator.end_training()


if __name__ == "__main__":
    main()
