"""What each process of the FSDP2 tests runs; a module of its own, because it is started afresh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hf_actswap import MemoryPlan, load_config, model_structure, resolve_plan
from hf_actswap.engine import BlockingTransfer, Copy, HostBuffer, Resources, install
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    on,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.processes import run_cases

WORLD_SIZE = 2
STEPS = 2
LAYERS = range(NUM_LAYERS)

PLANS: dict[str, MemoryPlan | str | None] = {
    "nothing": None,
    "attention_swapped": plan_of(*swap_rows(["self_attn"], LAYERS, 5)),
    "layers_swapped": swap_everything(5),
    "layers_swapped_on_use": swap_everything(0),
    "layers_recomputed": plan_of(*recompute_rows([""], LAYERS), *swap_rows(["output"], LAYERS, 5)),
    "ops_recomputed": plan_of(*recompute_rows(["mlp", "self_attn"], [1, 2]), *swap_rows([""], [0, 3], 5)),
    "case_4": CASES["case_4"],
}


Sharding = Literal["gathered once", "gathered twice", "whole"]
"""`reshard_after_forward` False and True; the model without FSDP."""

Order = Literal["sharded, installed", "sharded, applied", "applied, sharded"]
"""When a plan comes on: `install` with the structure from before sharding, or `apply` after or before it."""


@dataclass(frozen=True)
class Case:
    """One training run of the launch."""

    plan: str
    sharding: Sharding = "gathered twice"
    order: Order = "sharded, installed"

    @property
    def file_stem(self) -> str:
        return f"{self.plan}-{self.sharding}-{self.order}".replace(" ", "_").replace(",", "")


CASES_RUN: tuple[Case, ...] = (
    *(Case(plan, sharding) for sharding in ("gathered twice", "whole") for plan in PLANS),
    *(Case(plan, "gathered once") for plan in ("nothing", "layers_swapped", "ops_recomputed")),
    *(
        Case(plan, order=order)
        for order in get_args(Order)[1:]
        for plan in ("attention_swapped", "layers_swapped")
    ),
)


@dataclass
class Result:
    """What one rank saw of one case; bytes and gradients of the last step."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    offloaded_bytes: int
    weights_moved: list[str]
    left_over: tuple[int, int]


class _ReadingTransfer(BlockingTransfer):
    """Remembers what it copied, byte for byte: FSDP2 takes the memory of gathered weights away later."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copied: list[bytes] = []

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        self.copied.append(_bytes(source))
        return super().offload(source, host)


def run_on_rank(rank: int, folder: str) -> None:
    """Train each case."""
    run_cases(rank, folder, WORLD_SIZE, {case.file_stem: partial(_train, rank, case) for case in CASES_RUN})


def _train(rank: int, case: Case, _: object) -> Result:
    model, plan, transfer = tiny_llama(use_cache=False), PLANS[case.plan], _ReadingTransfer()
    shape = model_structure(model)
    applied = on(model, plan, transfer) if case.order == "applied, sharded" else None
    if case.sharding != "whole":
        _shard(model, case.sharding == "gathered twice")
    if case.order == "sharded, installed" and plan is not None:
        fitting = plan if isinstance(plan, MemoryPlan) else resolve_plan(load_config(plan), shape)
        applied = install(model, fitting, shape, Resources(transfer))
    elif case.order == "sharded, applied":
        applied = on(model, plan, transfer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    result = Result([], {}, 0, [], (0, 0))
    for step in range(STEPS):
        optimizer.zero_grad()
        transfer.copied.clear()
        before = applied.stats().offloaded_bytes if applied is not None else 0
        weights = _contents(model)
        generator = torch.Generator().manual_seed(WORLD_SIZE * step + rank)
        ids = torch.randint(0, 64, (2, 16), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        result.losses.append(loss.item())
        result.grads = {name: _local(parameter.grad).clone() for name, parameter in model.named_parameters()}
        result.weights_moved = [weights[data] for data in transfer.copied if data in weights]
        if applied is not None:
            stats = applied.stats()
            result.offloaded_bytes = stats.offloaded_bytes - before
            result.left_over = (stats.live_swaps, stats.host_bytes)
        optimizer.step()
    if applied is not None:
        applied.remove()
    return result


def _shard(model: nn.Module, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    if not isinstance(model, FSDPModule):
        raise AssertionError("the model was not sharded")


def _contents(model: nn.Module) -> dict[bytes, str]:
    """What each weight would look like as a whole if it were moved, and its name."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        found[_bytes(whole.full_tensor() if isinstance(whole, DTensor) else whole)] = name
    return found


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().view(torch.uint8).numpy().tobytes()  # numpy pins the storage: of a clone
