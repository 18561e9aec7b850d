"""Copies of a model that a plan is on: they compute what it computes, and the plan does not see them."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_actswap import MemoryPlan, apply
from tests.engine.pitfalls.odd_layers import step_gradients
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    one_step,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)

LAYERS = range(NUM_LAYERS)
PLANS: dict[str, MemoryPlan] = {
    "everything swapped": swap_everything(5),
    "layers recomputed": plan_of(*recompute_rows([""], LAYERS)),
    "ops recomputed and swapped": plan_of(
        *recompute_rows(["mlp.act_fn", "mlp.mul"], LAYERS), *swap_rows(["self_attn"], LAYERS, 5)
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_a_copy_computes_alone(plan: MemoryPlan) -> None:
    """Catches a copy whose layers are the original's, and an engine that follows a copy."""
    bare = step_gradients(tiny_llama())
    model = tiny_llama()
    applied = apply(model, plan)
    step_gradients(model)
    twin = copy.deepcopy(model)
    model.zero_grad()
    before = applied.stats()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()  # a copy that reads the original gives itself away
    assert_bitwise_equal(step_gradients(twin), bare)
    assert all(weight.grad is None for weight in model.parameters())
    assert applied.stats() == before
    applied.remove()


def test_a_copy_can_have_a_plan_of_its_own() -> None:
    bare = step_gradients(tiny_llama())
    model = tiny_llama()
    with apply(model, swap_everything(5)) as applied:
        twin = copy.deepcopy(model)
        with apply(twin, swap_everything(5)) as own:
            assert_bitwise_equal(step_gradients(twin), bare)
            assert (own.stats().forwards, applied.stats().forwards) == (1, 0)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_copy_made_beside_the_planner_computes_alone() -> None:
    """Catches a wrapped call that goes with the copy and calls the original."""
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = {"memory": {"mode": "adaptive", "search_steps": 0, "warmup_steps": 1}}
    with apply(model, config, optimizer=optimizer):
        for _ in range(2):
            one_step(model)
            optimizer.step()
            optimizer.zero_grad()
        twin = copy.deepcopy(model)
        assert_bitwise_equal(step_gradients(twin), step_gradients(tiny_llama()))
        assert all(weight.grad is None for weight in model.parameters())
