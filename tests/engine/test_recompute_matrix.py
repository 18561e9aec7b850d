"""Recompute in its forms, alone and mixed with swap inside a layer: bitwise as without, in every family."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_actswap import MemoryPlan, apply, load_config, model_structure
from hf_actswap.plan import ModelStructure, PlanRow
from tests.engine.tiny_models import (
    assert_bitwise_equal,
    forward,
    gradients,
    plan_of,
    recompute_rows,
    swap_rows,
)
from tests.plan.conftest import FAMILY_SIZES

FP32, BF16 = torch.float32, torch.bfloat16
NUM_LAYERS = 3
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "num_hidden_layers": NUM_LAYERS,
    "use_cache": False,
}
_EAGER_ONLY = ("gemma2",)
_DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop")


def family_model(family: str, dtype: torch.dtype = FP32, attention: str = "sdpa") -> nn.Module:
    """A model of three layers in training mode, with every dropout that its configuration knows."""
    torch.manual_seed(0)
    attention = "eager" if family in _EAGER_ONLY else attention
    config = CONFIG_MAPPING[family](**{**_SIZES, **FAMILY_SIZES[family]}, attn_implementation=attention)
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.2)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).train()


@lru_cache(maxsize=32)
def ops_of(family: str, attention: str) -> ModelStructure:
    return model_structure(family_model(family, FP32, attention))


def yaml(text: str) -> Callable[[ModelStructure], Any]:
    return lambda _: load_config(text)


def named(shape: ModelStructure, choose: Callable[[str, str], bool]) -> list[tuple[int, str]]:
    """(layer, path) of the ops that ``choose`` takes by kind and path, outermost ones alone."""
    found = []
    for layer in shape.layers:
        paths = [op.path for op in layer.ops if choose(op.kind, op.path)]
        above = {path for path in paths if any(path.startswith(other + ".") for other in paths)}
        found += [(layer.index, path) for path in paths if path not in above]
    return found


def all_functions(shape: ModelStructure) -> MemoryPlan:
    rows = [PlanRow(i, path, "recompute") for i, path in named(shape, lambda kind, _: kind == "function")]
    return plan_of(*rows, num_layers=NUM_LAYERS)


def all_modules(shape: ModelStructure) -> MemoryPlan:
    rows = [PlanRow(i, path, "recompute") for i, path in named(shape, lambda kind, _: kind == "module")]
    return plan_of(*rows, num_layers=NUM_LAYERS)


def everything_at_once(shape: ModelStructure) -> MemoryPlan:
    """Of the ops of each layer in turn: recompute the function, swap it, keep it."""
    rows: list[PlanRow] = []
    functions = named(shape, lambda kind, _: kind == "function")
    for number, (layer, path) in enumerate(functions):
        if number % 3 == 0:
            rows += recompute_rows([path], [layer])
        elif number % 3 == 1:
            rows += swap_rows([path], [layer], 4)
    return plan_of(*rows, num_layers=NUM_LAYERS)


def swap_and_keep_inside_recomputed_layers(shape: ModelStructure) -> MemoryPlan:
    rows = [*recompute_rows([""], range(NUM_LAYERS))]
    for number, (layer, path) in enumerate(named(shape, lambda kind, _: kind == "function")):
        if number % 4 == 1:
            rows += swap_rows([path], [layer], 6)
        elif number % 4 == 3:
            rows.append(PlanRow(layer, path, "keep"))
    return plan_of(*rows, num_layers=NUM_LAYERS)


def swap_around_recomputed_modules(shape: ModelStructure) -> MemoryPlan:
    """Case 4 of the document with nothing kept: what recomputed modules start from is swapped too."""
    modules = named(shape, lambda kind, path: kind == "module" and "." not in path)
    rows = [*swap_rows([""], range(NUM_LAYERS), 5)]
    rows += [
        row for n, (layer, path) in enumerate(modules) if n % 2 for row in recompute_rows([path], [layer])
    ]
    return plan_of(*rows, num_layers=NUM_LAYERS)


PLANS: dict[str, Callable[[ModelStructure], Any]] = {
    "recompute": yaml("recompute_config: {recompute: true}"),
    "recompute a layer": yaml("recompute_config: {recompute: [1]}"),
    "select": yaml("recompute_config: {select_recompute: {'attention': true, '.*norm.*': true}}"),
    "case 4": yaml(
        "swap_config: {swap: true, op_swap: [{op_name: attention, backward_prefetch: 20, layers: [0, 1]}]}\n"
        "recompute_config: {select_recompute: {'mlp|feed_forward|block_sparse_moe': [0, 2]}}"
    ),
    "all functions": all_functions,
    "all modules": all_modules,
    "everything at once": everything_at_once,
    "swap and keep inside recomputed layers": swap_and_keep_inside_recomputed_layers,
    "swap around recomputed modules": swap_around_recomputed_modules,
}


def run(
    model: nn.Module, plan: Any, steps: int = 2, accumulation: int = 1, autocast: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Gradients, losses and the random state after each step, under a plan, which must have acted."""
    applied = apply(model, plan) if plan is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    torch.manual_seed(4)
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for part in range(accumulation):
            with torch.autocast("cpu", BF16) if autocast else nullcontext():
                loss = forward(model, step * accumulation + part)
            loss.backward()
            losses.append(loss.detach())
        state = {"losses": torch.stack(losses), "random state": torch.get_rng_state()}
        found.append({**gradients(model), **state})
        optimizer.step()
    if applied is not None:
        stats = applied.stats()
        assert stats.recomputes or stats.offloads or any(row.op_path == "" for row in applied.plan.rows)
        assert stats.live_swaps == stats.host_bytes == 0
        applied.remove()
    return found


def check(family: str, name: str, dtype: torch.dtype, attention: str = "sdpa", **how: Any) -> None:
    bare = run(family_model(family, dtype, attention), None, **how)
    plan = PLANS[name](ops_of(family, attention))
    under = run(family_model(family, dtype, attention), plan, **how)
    for one, other in zip(under, bare, strict=True):
        assert_bitwise_equal(one, other)


QUICK = [
    ("llama", "everything at once", BF16, "eager"),
    ("gpt_neox", "all functions", FP32, "eager"),
    ("qwen3", "swap and keep inside recomputed layers", BF16, "sdpa"),
    ("gemma2", "all modules", FP32, "eager"),
    ("mixtral", "swap around recomputed modules", FP32, "sdpa"),
    ("deepseek_v3", "case 4", BF16, "sdpa"),
    ("phi3", "all functions", BF16, "sdpa"),
]


@pytest.mark.parametrize(
    ("family", "name", "dtype", "attention"), QUICK, ids=[f"{item[0]}-{item[1]}" for item in QUICK]
)
def test_a_sample(family: str, name: str, dtype: torch.dtype, attention: str) -> None:
    check(family, name, dtype, attention)


@pytest.mark.parametrize("name", ["all functions", "everything at once"])
def test_a_sample_under_autocast_with_accumulation(name: str) -> None:
    check("gpt_neox", name, FP32, "eager", accumulation=2, autocast=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", FAMILY_SIZES)
def test_every_family(family: str, name: str, dtype: torch.dtype) -> None:
    for attention in ("sdpa", "eager"):
        check(family, name, dtype, attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", FAMILY_SIZES)
def test_every_family_under_autocast_with_accumulation(family: str, name: str) -> None:
    check(family, name, FP32, accumulation=2, autocast=True)
