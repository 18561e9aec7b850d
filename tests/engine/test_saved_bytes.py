"""Bytes known before the first step, held against those that the engine moves in it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap import MemoryPlan, apply, load_config, model_structure, resolve_plan
from hf_actswap.engine import record_saved
from hf_actswap.plan import PlanRow, SavedBytes, Windows, swapped_bytes
from hf_actswap.plan.model_structure import unwrapped
from tests.engine.tiny_models import (
    BATCH,
    CASES,
    LENGTH,
    NUM_LAYERS,
    batch,
    plan_of,
    recompute_rows,
    snapshot,
    swap_everything,
    swap_rows,
    tiny,
    tiny_llama,
    tiny_neox,
)
from tests.quick_cases import each_value_once, quick_first

LAYERS = range(NUM_LAYERS)
POSITIONS = torch.arange(LENGTH).repeat(BATCH, 1)
PADDING = torch.ones(BATCH, LENGTH, dtype=torch.long).index_fill(1, torch.arange(5), 0)


def call_of(**more: Any) -> dict[str, Any]:
    return {"input_ids": batch(0), "labels": batch(0), **more}


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext()


def assert_predicted(
    model: nn.Module, plan: MemoryPlan | str, dtype: torch.dtype | None = None, **more: Any
) -> int:
    """Fail unless a record before and one under the plan price it as the step does; return the bytes."""
    shape, call = model_structure(model), call_of(use_cache=False, **more)
    plan = resolve_plan(load_config(plan), shape) if isinstance(plan, str) else plan
    with autocast(dtype):
        before = swapped_bytes(record_saved(unwrapped(model), shape, (), call), plan)
    applied = apply(model, plan)
    with autocast(dtype):
        under = swapped_bytes(record_saved(unwrapped(model), shape, (), call), plan)
        loss = model(**call).loss
    loss.backward()
    assert (before, under) == (applied.stats().offloaded_bytes,) * 2
    applied.remove()
    return before


@each_value_once
@pytest.mark.parametrize("make", [tiny_llama, tiny_neox])
@pytest.mark.parametrize(("number", "case"), list(enumerate([*CASES, "everything"])))
def test_the_cases(number: int, case: str, make: Callable[[], nn.Module]) -> None:
    """Each case with both models, with autocast on one of them."""
    dtype = torch.bfloat16 if (number % 4 < 2) == (make is tiny_llama) else None
    moved = assert_predicted(make(), CASES.get(case) or swap_everything(), dtype)
    assert (moved > 0) == ("recompute" not in case and "exclude" not in case)


@pytest.mark.parametrize(
    ("family", "settings"),
    quick_first(
        [
            ("Qwen3", {}),
            ("Gemma2", {"sliding_window": 8}),
            (
                "Mixtral",
                {"experts_implementation": "batched_mm", "num_local_experts": 8, "num_experts_per_tok": 2},
            ),
            ("Llama", {"attn_implementation": "eager"}),
            ("Llama", {"tie_word_embeddings": True}),
            ("Phi3", {"pad_token_id": 0, "eos_token_id": None}),
            ("Qwen2", {}),
        ],
        5,
    ),
)
def test_families(family: str, settings: dict[str, Any]) -> None:
    assert assert_predicted(tiny(family, **settings), swap_everything()) > 0


ROWS: dict[str, tuple[PlanRow, ...]] = {
    "a region's input": (
        *recompute_rows(["mlp", "self_attn.q_proj"], LAYERS),
        *swap_rows(["input_layernorm", "post_attention_layernorm"], LAYERS),
    ),
    "functions": (
        *recompute_rows(["mlp.mul", "mlp.act_fn"], LAYERS),
        *swap_rows(["mlp", "self_attn"], LAYERS),
    ),
    "inside a region": (
        *recompute_rows(["mlp"], LAYERS),
        *swap_rows(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], LAYERS),
    ),
    "a whole layer as a region": (
        *recompute_rows([""], LAYERS),
        *swap_rows(["mlp.gate_proj", "output"], LAYERS),
        PlanRow(0, "self_attn", "keep"),
    ),
    "checkpointed neighbours": (
        *recompute_rows([""], [1, 2]),
        *swap_rows([""], [0]),
        *swap_rows(["output"], [1]),
        *swap_rows(["self_attn"], [3]),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_swap_beside_recomputation(name: str) -> None:
    assert assert_predicted(tiny_llama(), plan_of(*ROWS[name])) > 0


@pytest.mark.parametrize("least", quick_first([0, 4096, 4097, 1, 2048, 10**9], 3))
def test_small_tensors_stay(least: int) -> None:
    assert_predicted(tiny_llama(), swap_everything(min_tensor_bytes=least))


@pytest.mark.parametrize(
    ("more", "masked"),
    quick_first(
        [
            ({"attention_mask": torch.ones_like(PADDING)}, False),
            ({"position_ids": POSITIONS % (LENGTH // 2)}, True),
            ({"attention_mask": PADDING}, True),
            ({"position_ids": POSITIONS}, False),
        ],
        2,
    ),
    ids=["no padding", "packed", "padding", "one sequence"],
)
def test_masks_change_attention_as_they_do_in_the_step(more: dict[str, Any], masked: bool) -> None:
    bare = assert_predicted(tiny_llama(), swap_everything())
    assert (assert_predicted(tiny_llama(), swap_everything(), **more) > bare) == masked


def test_the_slice_of_a_large_storage() -> None:
    model, plan = tiny_llama(), plan_of(PlanRow("final_norm", "", "swap", windows=Windows(1, 3)))
    shape, call = model_structure(model), {"input_ids": batch(0)[:1], "logits_to_keep": 2, "use_cache": False}
    forecast = swapped_bytes(record_saved(model, shape, (), call), plan)
    applied = apply(model, plan)
    model(**call).logits.sum().backward()
    assert forecast == applied.stats().offloaded_bytes


@each_value_once
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("kind", ["frozen", "lora"])
def test_frozen_weights(kind: str, dtype: torch.dtype | None) -> None:
    model = tiny_llama()
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2" in name)
        assert assert_predicted(model, swap_everything(), dtype) > 0
    else:
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        assert assert_predicted(wrapped, swap_everything(), dtype) > 0


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_that_fsdp2_gathers_in_another_dtype(dtype: torch.dtype | None) -> None:
    model, mesh = tiny_llama(), init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert assert_predicted(model, swap_everything()) > 0


def test_a_record_leaves_no_trace() -> None:
    model = tiny_neox()
    apply(model, swap_everything())
    before, random = snapshot(model), torch.get_rng_state()
    weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    record_saved(model, model_structure(model), (), call_of())
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == weights


def recorded(model: nn.Module) -> SavedBytes:
    return record_saved(model, model_structure(model), (), call_of())


def test_bytes_by_op() -> None:
    found = recorded(tiny_llama()).by_op()
    hidden, inner = BATCH * LENGTH * 32 * 4, BATCH * LENGTH * 48 * 4
    assert {path: size for (scope, path), size in found.items() if scope == 1 and "mlp" in path} == {
        "mlp.gate_proj.linear": inner,
        "mlp.act_fn.silu": inner,
        "mlp.up_proj.linear": inner,
        "mlp.mul": inner,
    }
    assert found[0, "self_attn.flash_attention"] == hidden + BATCH * LENGTH * 4 * 4
    assert found["embedding", "output"] == hidden


def test_seven_billion_parameters_without_memory() -> None:
    """32 layers at 8,192 tokens: output and statistics of the attention core of each."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig()).to(torch.bfloat16).train()
    shape = model_structure(model)
    ids = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    saved = record_saved(model, shape, (), {"input_ids": ids, "labels": ids, "use_cache": False})
    plan = resolve_plan(load_config("swap_config: {swap: true}"), shape)
    assert swapped_bytes(saved, plan) == 32 * (8192 * 4096 * 2 + 8192 * 32 * 4)


def test_a_model_that_cannot_run_on_fakes_raises_and_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("Mixtral", experts_implementation="eager", num_local_experts=8, num_experts_per_tok=2)
    shape = model_structure(model)
    with caplog.at_level(logging.INFO), pytest.raises(Exception, match="nonzero"):
        record_saved(model, shape, (), call_of())
    assert caplog.records == []


def test_devices_that_this_build_does_not_know() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"^this build of PyTorch has no ipu devices$"):
        record_saved(model, model_structure(model), (), call_of(), torch.device("ipu"))
