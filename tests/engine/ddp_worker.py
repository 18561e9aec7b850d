"""What each process of the two-process test runs; a module of its own, because it is started afresh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.engine.tiny_models import (
    CASES,
    Run,
    gradients,
    on,
    plan_of,
    recompute_rows,
    swap_everything,
    tiny_llama,
    tiny_neox,
)
from tests.processes import run_cases

WORLD_SIZE = 2
STEPS = 4


def _with_dropout() -> nn.Module:
    return tiny_neox(attn_implementation="eager", use_cache=False)


def _with_adapters() -> nn.Module:
    torch.manual_seed(1)
    asked = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(tiny_llama(), asked).train()


_FUNCTIONS = ["mlp.mul", "mlp.act_fn.silu", "self_attn.flash_attention", "mlp.up_proj.linear"]
_WITH_DROPOUT = ["attention.flash_attention", "post_attention_dropout", "mlp.act", "input_layernorm"]
GROUPS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "nothing": (
        tiny_llama,
        {
            **CASES,
            "case_4_before_wrapping": CASES["case_4"],
            "everything_swapped": swap_everything(3),
            "inputs_swapped": "swap_config: {swap: true, op_swap: [], recompute_input: true}\n"
            "recompute_config: {recompute: true}\n",
            "functions_recomputed": plan_of(*recompute_rows(_FUNCTIONS, range(4))),
        },
    ),
    "dropout": (
        _with_dropout,
        {
            "dropout_layers_recomputed": plan_of(*recompute_rows([""], range(4))),
            "dropout_modules_recomputed": plan_of(*recompute_rows(["attention", "mlp"], range(4))),
            "dropout_ops_recomputed": plan_of(*recompute_rows(_WITH_DROPOUT, range(4))),
        },
    ),
    "adapters": (
        _with_adapters,
        {
            "host": plan_of(weights="host"),
            "host_wrapped_before": plan_of(weights="host"),
            "host_swapped": swap_everything(3, weights="host"),
            "host_recomputed": plan_of(*recompute_rows([""], range(4)), weights="host"),
        },
    ),
}
"""Name of the run with nothing -> a model, and what is tried on it in one launch.

Each rank draws random numbers of its own, and has a frozen base of adapters on the host.
"""
BEFORE_WRAPPING = ("case_4_before_wrapping", "host", "host_swapped", "host_recomputed")


def train_on_rank(rank: int, folder: str) -> None:
    """Train under each plan and write ``<name>.<rank>.pt``: losses, gradients per step, bytes moved."""
    cases = {
        name: partial(_train, rank, plan, name not in BEFORE_WRAPPING, make)
        for bare, (make, plans) in GROUPS.items()
        for name, plan in {bare: None, **plans}.items()
    }
    run_cases(rank, folder, WORLD_SIZE, cases)


def _train(
    rank: int, plan: Any, apply_to_wrapped: bool, make: Callable[[], nn.Module], _: object
) -> tuple[list[float], list[Any], int]:
    model = make()
    applied = None if apply_to_wrapped or plan is None else on(model, plan)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)  # several buckets: they reduce amid backward
    applied = on(wrapped, plan) if apply_to_wrapped else applied
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    run = Run()
    torch.manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(WORLD_SIZE * step + rank)
        ids = torch.randint(0, 64, (2, 16), generator=generator)
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        run.losses.append(loss.item())
        run.grads.append(gradients(model))
        optimizer.step()
    if applied is None:
        return run.losses, run.grads, 0
    stats = applied.stats()
    if stats.live_swaps or (stats.host_bytes and applied.weights is None):
        raise AssertionError(f"left over after the last step: {stats}")
    applied.remove()
    return run.losses, run.grads, stats.prefetched_bytes
