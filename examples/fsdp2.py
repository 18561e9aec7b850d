"""FSDP2 shards the weights over two processes, and activations are swapped: PyTorch without the Trainer.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 examples/fsdp2.py

It needs no GPU and no network: on a CPU the processes communicate with gloo, on GPUs with NCCL. The model is
a tiny Llama with random weights, and the text is below. Call `hf_actswap.apply` after `fully_shard` or before
it. The weights that FSDP2 gathers for a layer are never moved, only what the layer computes from them.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import hf_actswap

CONFIG = {
    "swap_config": {
        "swap": True,
        "layer_swap": [{"backward_prefetch": 20, "layers": [1, 2]}],
        "op_swap": [{"op_name": "attention", "backward_prefetch": 20, "layers": [0]}],
    },
    "recompute_config": {"select_recompute": {"feed_forward": [0]}},
}
TEXT = """Backward needs what forward computed, in the opposite order. What is needed last can wait in host
memory, and come back while the layers after it are busy. What is cheap to compute need not be kept at all.
"""
BLOCK, BATCH, STEPS = 64, 4, 10


def main() -> None:
    """Train ten steps on each process's own part of the text; rank 0 prints what it swapped."""
    on_gpu = torch.accelerator.is_available()
    if on_gpu:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    set_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    ).to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    stream = torch.tensor(list((TEXT * 32).encode()), device=device)  # one token a byte
    blocks = stream[: len(stream) // BLOCK * BLOCK].view(-1, BLOCK)[rank::ranks]
    with hf_actswap.apply(model, CONFIG) as applied:
        before = applied.stats()
        for step in range(STEPS):
            batch = blocks[torch.arange(step * BATCH, (step + 1) * BATCH) % len(blocks)]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = applied.stats()
            moved, before = total - before, total
            if rank == 0:
                print(
                    f"step {step + 1:2}: loss {loss.item():.3f}, rank 0 of {ranks} swapped {moved.offloads} "
                    f"storages of {moved.offloaded_bytes:,} bytes and recomputed {moved.recomputes} regions"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
