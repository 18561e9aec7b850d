"""What each process of the two-process test runs; a module of its own, because it is started afresh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


def plans() -> dict[str, Any]:
    """What is tried in one launch; ``None`` is the run with nothing."""
    functions = ["mlp.mul", "mlp.act_fn.silu", "self_attn.flash_attention", "mlp.up_proj.linear"]
    return {
        "nothing": None,
        **CASES,
        "everything_swapped": swap_everything(3),
        "inputs_swapped": "swap_config: {swap: true, op_swap: [], recompute_input: true}\n"
        "recompute_config: {recompute: true}\n",
        "functions_recomputed": plan_of(*recompute_rows(functions, range(4))),
    }


def adapters_plans() -> dict[str, Any]:
    """What is tried with adapters on a frozen base; ``None`` is the run with nothing."""
    on_host = {name: replace(plan, weights="host") for name, plan in HOST_BESIDE.items()}
    return {"adapters": None, **on_host}


HOST_BESIDE = {
    "host": plan_of(),
    "host_wrapped_before": plan_of(),
    "host_swapped": swap_everything(3),
    "host_recomputed": plan_of(*recompute_rows([""], range(4))),
}


def dropout_plans() -> dict[str, Any]:
    """What is tried where each rank draws its own random numbers; ``None`` is the run with nothing."""
    functions = ["attention.flash_attention", "post_attention_dropout", "mlp.act", "input_layernorm"]
    return {
        "dropout": None,
        "dropout_layers_recomputed": plan_of(*recompute_rows([""], range(4))),
        "dropout_modules_recomputed": plan_of(*recompute_rows(["attention", "mlp"], range(4))),
        "dropout_ops_recomputed": plan_of(*recompute_rows(functions, range(4))),
    }


def train_on_rank(rank: int, folder: str) -> None:
    """Train under each plan and write ``<name>.<rank>.pt``: losses, gradients per step, bytes moved."""
    cases = {name: partial(_train, rank, plan, True) for name, plan in plans().items()}
    cases["case_4_before_wrapping"] = partial(_train, rank, CASES["case_4"], False)
    for name, plan in dropout_plans().items():
        cases[name] = partial(_train, rank, plan, True, make=_with_dropout)
    for name, plan in adapters_plans().items():
        cases[name] = partial(_train, rank, plan, name == "host_wrapped_before", make=_with_adapters)
    run_cases(rank, folder, WORLD_SIZE, cases)


def _with_dropout() -> nn.Module:
    return tiny_neox(attn_implementation="eager", use_cache=False)


def _with_adapters() -> nn.Module:
    torch.manual_seed(1)
    asked = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(tiny_llama(), asked).train()


def _train(
    rank: int, plan: Any, apply_to_wrapped: bool, _: object, make: Callable[[], nn.Module] = tiny_llama
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
