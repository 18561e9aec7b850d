"""What each process of the two-process test of tiles runs; it is started afresh from this module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_pt_utils import LabelSmoother

from hf_actswap import PlanError, apply
from tests.engine.tiny_models import batch, forward, tiny_llama
from tests.processes import join_group

WORLD_SIZE = 2
TILES: dict[str, dict[str, Any]] = {
    "loss": {"loss": {"tokens": 10}},
    "modules": {"tile": {"op_name": ["feed_forward", "attention_norm", "ffn_norm"], "tokens": 10}},
}
KINDS = {
    "loss": ("ddp", "unused", "static", "fsdp2", "fsdp2 lm_head", "fsdp2 with a tail"),
    "modules": (
        *("ddp", "unused", "static", "fsdp2", "fsdp2 mlp", "fsdp2 gate_proj"),
        *("ddp unequal", "fsdp2 unequal"),
    ),
}
"""What runs in tiles -> wrappers; FSDP2 also with a part of its own for the modules of that name.

``unequal``: the second rank's sequences are half as long, and so are its numbers of tiles.
"""
CASES = [
    (what, kind, smooth)
    for what, kinds in KINDS.items()
    for kind in kinds
    for smooth in ((False, True) if what == "loss" else (False,))
]
SLOW = [
    case for case in CASES if case[1] in ("unused", "static", "fsdp2 mlp") or case == ("loss", "ddp", True)
]


def steps(kind: str, smooth: bool, tiles: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Train two steps of two micro-batches; return the losses, the last gradients, and the adjustments."""
    rank = dist.get_rank()
    model: Any = tiny_llama(tie_word_embeddings=kind == "ddp", vocab_size=96)
    wrapped: nn.Module = model
    if kind.startswith("fsdp2"):
        _, _, own = kind.partition(" ")
        if own == "with a tail":  # as Accelerate does
            fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
        for name, part in reversed(list(model.named_modules())):  # parts before what holds them
            if part in (model, *model.model.layers) or (own and name.endswith(own)):
                fully_shard(part)
    else:
        settings = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
        wrapped = DistributedDataParallel(model, **settings.get(kind, {}))
    applied = apply(wrapped, {"tile_config": tiles})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        for part in range(1 if kind == "static" else 2):
            ids = batch(4 * step + 2 * part + rank)
            if kind.endswith("unequal"):
                ids = ids[:, : ids.shape[1] // (rank + 1)]
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


def said_of_fsdp1(tiles: dict[str, Any]) -> str:
    """Return what tiles of a model in FSDP1's layers are told."""
    model: Any = tiny_llama()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    try:
        apply(model, {"tile_config": tiles})
    except PlanError as error:
        return str(error)
    return "nothing"


def train_on_rank(slow_too: bool, rank: int, folder: str) -> None:
    """Write ``<what>.<kind>.<smooth>.<tiled>.<rank>.pt`` and ``fsdp1.<rank>.pt``."""
    torch.set_num_threads(1)
    join_group(rank, folder, WORLD_SIZE, limit_s=60)
    try:
        for what, kind, smooth in [case for case in CASES if slow_too or case not in SLOW]:
            for tiled in (False, True):
                found = steps(kind, smooth, TILES[what] if tiled else {})
                torch.save(found, Path(folder, f"{what}.{kind}.{smooth}.{tiled}.{rank}.pt"))
        said = {what: said_of_fsdp1(tiles) for what, tiles in TILES.items()}
        torch.save(said, Path(folder, f"fsdp1.{rank}.pt"))
    finally:
        dist.destroy_process_group()


def zero_steps(stage: int, tiles: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Train two steps under DeepSpeed; return the losses, the first gradients, and what runs whole."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model = tiny_llama()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    applied = apply(engine.module, {"tile_config": tiles})
    losses, grads = [], {}
    for step in range(2):
        loss = forward(engine, 2 * step + dist.get_rank())
        engine.backward(loss)
        grads = grads or {name: safe_get_full_grad(one).clone() for name, one in model.named_parameters()}
        engine.step()
        losses.append(loss.item())
    applied.remove()
    engine.destroy()
    return losses, grads, [f"{item.got}: {item.reason}" for item in applied.plan.adjustments]


def train_under_zero(rank: int, folder: str) -> None:
    """Write ``zero<stage>.<tiled>.<rank>.pt``."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    join_group(rank, folder, WORLD_SIZE, limit_s=60)
    try:
        for stage in (2, 3):
            for tiled in (False, True):
                found = zero_steps(stage, {**TILES["loss"], **TILES["modules"]} if tiled else {})
                torch.save(found, Path(folder, f"zero{stage}.{tiled}.{rank}.pt"))
    finally:
        dist.destroy_process_group()
