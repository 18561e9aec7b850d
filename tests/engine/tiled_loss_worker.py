"""What each process of the two-process test of tiled losses runs; it is started afresh from this module."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_pt_utils import LabelSmoother

from hf_actswap import apply
from tests.engine.tiny_models import batch, tiny_llama

WORLD_SIZE = 2
TILES = {"tile_config": {"loss": {"tokens": 10}}}
KINDS = ("ddp", "unused", "static", "fsdp2", "fsdp2 head")


def steps(kind: str, smooth: bool, tiled: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Train two steps of two micro-batches; return the losses, the last gradients, and the adjustments."""
    rank = dist.get_rank()
    model: Any = tiny_llama(tie_word_embeddings=kind == "ddp", vocab_size=96)
    wrapped: nn.Module = model
    if kind.startswith("fsdp2"):
        parts = [*model.model.layers, *([model.lm_head] if kind == "fsdp2 head" else []), model]
        for part in parts:
            fully_shard(part)
    else:
        settings = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
        wrapped = DistributedDataParallel(model, **settings.get(kind, {}))
    applied = apply(wrapped, TILES if tiled else {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        for part in range(1 if kind == "static" else 2):
            ids = batch(4 * step + 2 * part + rank)
            if smooth:
                loss = LabelSmoother(0.1)(wrapped(input_ids=ids), ids, shift_labels=True)
            else:
                loss = wrapped(input_ids=ids, labels=ids).loss
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
    grads = {
        name: one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad.clone()
        for name, one in model.named_parameters()
    }
    applied.remove()
    return losses, grads, len(applied.plan.adjustments)


def train_on_rank(rank: int, folder: str) -> None:
    """Write ``<kind>.<smooth>.<tiled>.<rank>.pt``."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), WORLD_SIZE)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    try:
        for kind in KINDS:
            for smooth in (False, True):
                for tiled in (False, True):
                    found = steps(kind, smooth, tiled)
                    torch.save(found, Path(folder, f"{kind}.{smooth}.{tiled}.{rank}.pt"))
    finally:
        dist.destroy_process_group()
