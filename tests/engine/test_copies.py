"""Copies of a model that a plan is on, in memory and from a file: they compute the same, without the plan."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan, apply
from tests.engine.pitfalls.odd_layers import step_gradients
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    one_step,
    plan_of,
    plans,
    recompute_rows,
    tiny_llama,
)
from tests.quick_cases import each_value_once

LAYERS = range(NUM_LAYERS)
PLANS = plans("everything swapped", "layers recomputed", "mlp recomputed")


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_a_file(model: nn.Module) -> nn.Module:
    """As `torch.save` of a whole model, and `torch.load`, have it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_value_once
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_a_copy_computes_alone(plan: MemoryPlan, copied: Callable[[nn.Module], nn.Module]) -> None:
    """Catches a copy whose layers are the original's, and an engine that follows a copy."""
    bare = step_gradients(tiny_llama())
    model = tiny_llama()
    with apply(model, plan) as applied:
        step_gradients(model)
        twin = copied(model)
        model.zero_grad()
        before = applied.stats()
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()  # a copy that reads the original gives itself away
        runs: list[str] = []
        twin.get_submodule("model.layers.0.mlp.gate_proj").register_forward_hook(
            lambda *_: runs.append("forward")
        )
        assert_bitwise_equal(step_gradients(twin), bare)
        assert runs == ["forward"]  # the plan is off: no layer is run again
        assert all(weight.grad is None for weight in model.parameters())
        assert applied.stats() == before
        with apply(twin, plan):  # and it can have one of its own
            assert_bitwise_equal(step_gradients(twin), bare)


def test_a_copy_has_the_forward_that_somebody_else_had_put_on_a_layer() -> None:
    """Catches a copy that falls back to the class: wrappers (Accelerate's hooks) replace forwards too."""
    model = tiny_llama()
    layer = model.model.layers[1]
    layer.forward = partial(doubled, layer.forward)
    expected = step_gradients(model)
    with apply(model, plan_of(*recompute_rows([""], LAYERS))):
        for copied in (copy.deepcopy, through_pickle):
            assert_bitwise_equal(step_gradients(copied(model)), expected)
        assert_bitwise_equal(step_gradients(model), expected)
    assert isinstance(layer.forward, partial)


def doubled(forward: Callable[..., Any], hidden: torch.Tensor, **kwargs: Any) -> Any:
    output = forward(hidden, **kwargs)
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


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
