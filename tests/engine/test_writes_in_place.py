"""What is written in place between a forward and its backward: an error, as without a plan, or harmless.

Harmless is what nothing reads again: neither what runs again in backward, nor autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_actswap import MemoryPlan, apply
from hf_actswap.engine import StaleTensorError
from hf_actswap.plan import PlanRow
from tests.engine.healthy_steps import healthy_afterwards
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    forward,
    gradients,
    gradients_of_step,
    plan_of,
    recompute_rows,
    swap_rows,
    tiny_llama,
)

MODIFIED = "modified by an inplace operation"
_LAYERS = range(NUM_LAYERS)
PLANS = {
    "layers": plan_of(*recompute_rows([""], _LAYERS)),
    "modules": plan_of(*recompute_rows(["mlp", "self_attn", "input_layernorm"], _LAYERS)),
}
"""Whole layers run again in ``torch.utils.checkpoint``, modules as regions of the engine."""

each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))


def add_one(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor += 1


@each_plan
def test_a_weight_written_before_backward_is_an_error_that_names_it(plan: MemoryPlan) -> None:
    with healthy_afterwards(plan) as (model, _):
        loss = forward(model)
        weight = model.model.layers[1].input_layernorm.weight
        before = weight.detach().clone()
        add_one(weight)
        with pytest.raises(RuntimeError, match=rf"{MODIFIED}.*\(.*1.*weight"):
            loss.backward()
        with torch.no_grad():
            weight.copy_(before)


def test_an_optimizer_step_before_backward_is_an_error() -> None:
    model = tiny_llama()
    with apply(model, {"recompute_config": {"recompute": True}}):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        forward(model, 0).backward()
        loss = forward(model, 1)
        optimizer.step()
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()


@pytest.mark.parametrize("name", ["hidden_states", "attention_mask"])
def test_an_argument_of_a_layer_written_before_backward_is_an_error(name: str) -> None:
    found: list[torch.Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if name == "hidden_states" else kwargs[name])

    with healthy_afterwards(PLANS["layers"]) as (model, _):
        mask = torch.ones(2, 16, dtype=torch.long)
        mask[0, :3] = 0
        handle = model.model.layers[2].register_forward_pre_hook(keep, with_kwargs=True)
        loss = model(input_ids=batch(0), labels=batch(0), attention_mask=mask).loss
        handle.remove()
        found[0].detach().logical_not_() if found[0].dtype is torch.bool else found[0].detach().add_(1)
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()


class WritesSaved(nn.Module):
    """A norm that writes into what it has saved for its backward."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scaled = hidden.exp()
        return scaled.add_(1) * hidden


@each_plan
def test_a_module_that_writes_into_what_it_saved_is_an_error(plan: MemoryPlan) -> None:
    bare = tiny_llama()
    bare.model.layers[1].input_layernorm = WritesSaved()
    with pytest.raises(RuntimeError, match=MODIFIED):
        forward(bare).backward()
    model = copy.deepcopy(bare)
    with apply(model, plan), pytest.raises(RuntimeError, match=MODIFIED):
        forward(model).backward()


def accumulates(model: Any) -> None:
    """Two forwards before two backwards, and one more without an optimizer step between."""
    one, other = forward(model, 0), forward(model, 1)
    other.backward()
    one.backward()
    forward(model, 2).backward()


def backward_twice(model: Any) -> None:
    loss = forward(model)
    loss.backward(retain_graph=True)
    loss.backward()


def steps_of_other_weights(model: Any) -> None:
    """An optimizer steps on weights that this graph does not read again."""
    loss = forward(model)
    add_one(model.model.embed_tokens.weight)
    loss.backward()
    add_one(model.lm_head.weight)


def under_autocast(model: Any) -> None:
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(model, step)
        loss.backward()
        add_one(model.model.layers[0].mlp.up_proj.weight)


@each_plan
@pytest.mark.parametrize("run", [accumulates, backward_twice, steps_of_other_weights, under_autocast])
def test_what_is_not_read_again_may_be_written(plan: MemoryPlan, run: Callable[[Any], None]) -> None:
    bare, model = tiny_llama(), tiny_llama()
    run(bare)
    applied = apply(model, plan)
    run(model)
    applied.remove()
    assert_bitwise_equal(gradients(model), gradients(bare))


def test_an_adapter_that_is_switched_off_may_step_before_backward() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    bare: Any = get_peft_model(tiny_llama(), config)
    bare.add_adapter("other", config)
    model = copy.deepcopy(bare)
    applied = apply(model, {"recompute_config": {"recompute": True}})
    for item in (bare, model):
        loss = forward(item)
        add_one(item.get_parameter("base_model.model.model.layers.1.self_attn.q_proj.lora_A.other.weight"))
        loss.backward()
    applied.remove()
    assert_bitwise_equal(gradients(model), gradients(bare))


class CountingNorm(nn.BatchNorm1d):
    """A norm over the features with running statistics, which each forward writes."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


def test_buffers_may_be_written_in_forward() -> None:
    bare = tiny_llama()
    bare.model.layers[1].input_layernorm = CountingNorm(32)
    model = copy.deepcopy(bare)
    with apply(model, {"recompute_config": {"recompute": True}}):
        assert_bitwise_equal(gradients_of_step(model), gradients_of_step(bare))


# Saved tensors.


def mutated_after(model: nn.Module, at_layer: int | None) -> torch.Tensor:
    """Add one in place to layer 1's attention output: before layer ``at_layer``, or after the forward."""
    found: list[torch.Tensor] = []

    def mutate(*_: object) -> None:
        found[0].detach().add_(1)

    handles = [
        model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
            lambda _m, args: found.append(args[0])
        )
    ]
    if at_layer is not None:
        handles.append(model.model.layers[at_layer].register_forward_pre_hook(mutate))
    loss = forward(model)
    if at_layer is None:
        mutate()
    for handle in handles:
        handle.remove()
    return loss


def test_plain_autograd_rejects_the_mutation() -> None:
    for at_layer in (2, None):
        with pytest.raises(RuntimeError, match=MODIFIED):
            mutated_after(tiny_llama(), at_layer).backward()


REJECTED = {
    "a kept tensor, in forward": (swap_rows(["mlp.mul"], [0]), 2),
    "a kept tensor, after it": (swap_rows(["mlp.mul"], [0]), None),
    "between save and release": (swap_rows(["self_attn"], [1], 1000), 2),
    "a region's input": (recompute_rows(["self_attn.o_proj"], [1]), None),
}


@pytest.mark.parametrize(("rows", "at_layer"), REJECTED.values(), ids=list(REJECTED))
def test_a_mutation_that_matters_is_an_error(rows: tuple[PlanRow, ...], at_layer: int | None) -> None:
    with (
        healthy_afterwards(plan_of(*rows)) as (model, _),
        pytest.raises(StaleTensorError, match=MODIFIED),
    ):
        mutated_after(model, at_layer).backward()


def test_mutation_after_release_does_not_matter() -> None:
    """The host copy is what was saved."""
    bare = gradients_of_step(tiny_llama())
    for prefetch_ops, at_layer in ((1000, None), (1, None), (1, 3)):
        with healthy_afterwards(plan_of(*swap_rows(["self_attn"], [1], prefetch_ops))) as (model, _):
            mutated_after(model, at_layer).backward()
            assert_bitwise_equal(gradients(model), bare)
