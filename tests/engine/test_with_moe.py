"""Mixtures of experts: shapes and branches depend on data and change from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_actswap import MemoryPlan
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.tiny_models import (
    NUM_LAYERS,
    VOCABULARY,
    assert_bitwise_equal,
    batch,
    gradients_of_step,
    on,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
)
from tests.quick_cases import each_value_once

LAYERS = range(NUM_LAYERS)
STEPS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "output_router_logits": True,
    "experts_implementation": "eager",
}


def tiny_mixtral() -> nn.Module:
    """Return a Mixtral of 4 layers with 8 experts of which each token takes 2, in training mode."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2)).train()


def tiny_qwen() -> nn.Module:
    """Return a Qwen3-MoE of 4 layers with 8 experts of which each token takes 2, in training mode."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SHAPE,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
        head_dim=8,
    )
    return Qwen3MoeForCausalLM(config).train()


MODELS: dict[str, Callable[[], nn.Module]] = {"mixtral": tiny_mixtral, "qwen3": tiny_qwen}
PLANS: dict[str, MemoryPlan] = {
    "layers swapped": swap_everything(5),
    "fetched on use": swap_everything(0),
    "mlp swapped": plan_of(*swap_rows(["mlp"], LAYERS, 5)),
    "experts swapped": plan_of(*swap_rows(["mlp.experts"], LAYERS, 5)),
    "mlp recomputed": plan_of(*recompute_rows(["mlp"], LAYERS), *swap_rows(["self_attn"], LAYERS, 5)),
    "layers recomputed": plan_of(*recompute_rows([""], LAYERS), *swap_rows(["output"], LAYERS, 5)),
}
every_model = pytest.mark.parametrize("name", MODELS)


class _Routing:
    """Remembers how many tokens each expert of layer 1 got in each training forward."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: list[tuple[int, ...]] = []
        model.model.layers[1].mlp.experts.register_forward_pre_hook(self._count)

    def _count(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self.counts.append(tuple(args[1].flatten().bincount(minlength=8).tolist()))


@each_value_once
@every_model
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_four_steps_of_changing_routes_are_bitwise_equal(name: str, plan: MemoryPlan) -> None:
    """Catches a schedule of one step used for the next, and experts without tokens."""
    bare = MODELS[name]()
    model = MODELS[name]()
    applied = on(model, plan, RecordingTransfer())
    assert applied is not None
    for step in range(STEPS):
        assert_bitwise_equal(gradients_of_step(model, step), gradients_of_step(bare, step))
        stats = applied.stats()
        assert (stats.live_swaps, stats.host_bytes) == (0, 0)
        assert stats.offloads > 0


@every_model
def test_routes_change_and_leave_experts_without_tokens(name: str) -> None:
    """The test above means something only if this holds."""
    model = MODELS[name]()
    routing = _Routing(model)
    for step in range(STEPS):
        gradients_of_step(model, step)
    for tokens in (1, 3):
        model(input_ids=batch(0)[:1, :tokens])
    assert len(set(routing.counts)) == STEPS + 2
    assert 0 in routing.counts[-1]


@each_value_once
@every_model
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PLANS["layers swapped"], id="layers"),
        pytest.param(PLANS["experts swapped"], id="experts"),
    ],
)
def test_host_memory_does_not_grow_with_the_number_of_routes(name: str, plan: MemoryPlan) -> None:
    """Catches blocks kept for each shape that ever was: every step brings new ones."""
    model = MODELS[name]()
    applied = on(model, plan)
    assert applied is not None
    peaks: list[int] = []
    before = applied.stats()
    for step in range(16):
        gradients_of_step(model, step)
        after = applied.stats()
        peaks.append((after - before).offloaded_bytes)
        before = after
    assert after.host_pool_bytes <= 2 * max(peaks)


@every_model
def test_a_token_batch_that_leaves_experts_idle(name: str) -> None:
    """Catches an op that is named in a plan and does not run in a step."""
    bare, model = MODELS[name](), MODELS[name]()
    applied = on(model, PLANS["experts swapped"], RecordingTransfer())
    assert applied is not None
    for tokens in (1, 16, 2):
        grads = []
        for each in (bare, model):
            each.zero_grad()
            ids = batch(0)[:1, :tokens]
            each(input_ids=ids).logits.square().mean().backward()
            grads.append({n: p.grad.clone() for n, p in each.named_parameters() if p.grad is not None})
        assert_bitwise_equal(grads[1], grads[0])
        assert applied.stats().live_swaps == 0
