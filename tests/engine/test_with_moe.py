"""Mixtures of experts: shapes and branches depend on data and change from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.tiny_models import (
    EXPERTS,
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    gradients,
    gradients_of_step,
    on,
    plan_of,
    plans,
    swap_rows,
    tiny,
    tiny_mixtral,
)
from tests.quick_cases import each_value_once

LAYERS = range(NUM_LAYERS)
STEPS = 4


def tiny_qwen() -> nn.Module:
    """Return a `tiny` Qwen3-MoE with 8 experts of which each token takes 2."""
    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    return tiny("Qwen3Moe", **EXPERTS, **sizes)


MODELS: dict[str, Callable[[], nn.Module]] = {"mixtral": tiny_mixtral, "qwen3": tiny_qwen}
PLANS = {
    **plans("everything swapped", "fetched on use", "mlp swapped"),
    "experts swapped": plan_of(*swap_rows(["mlp.experts"], range(NUM_LAYERS), 5)),
    **plans("mlp recomputed", "layers recomputed"),
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
        pytest.param(PLANS["everything swapped"], id="layers"),
        pytest.param(PLANS["experts swapped"], id="experts"),
    ],
)
def test_host_memory_does_not_grow_with_the_number_of_routes(name: str, plan: MemoryPlan) -> None:
    """Catches blocks kept for each shape that ever was: every step brings new ones."""
    model = MODELS[name]()
    applied = on(model, plan)
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
    for tokens in (1, 16, 2):
        grads = []
        for each in (bare, model):
            each.zero_grad()
            ids = batch(0)[:1, :tokens]
            each(input_ids=ids).logits.square().mean().backward()
            grads.append(gradients(each))
        assert_bitwise_equal(grads[1], grads[0])
        assert applied.stats().live_swaps == 0
