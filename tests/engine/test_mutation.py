"""Saved tensors that are changed in place: autograd's own error, or the right gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_actswap.engine.tickets import StaleTensorError
from tests.engine.healthy_steps import forward, healthy_afterwards
from tests.engine.tiny_models import (
    assert_bitwise_equal,
    gradients,
    gradients_of_step,
    plan_of,
    recompute_rows,
    swap_rows,
    tiny_llama,
)


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
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            mutated_after(tiny_llama(), at_layer).backward()


@pytest.mark.parametrize("at_layer", [2, None])
def test_mutation_of_a_kept_tensor_is_an_error(at_layer: int | None) -> None:
    with (
        healthy_afterwards(plan_of(*swap_rows(["mlp.mul"], [0]))) as (model, _),
        pytest.raises(StaleTensorError, match="modified by an inplace operation"),
    ):
        mutated_after(model, at_layer).backward()


def test_mutation_between_save_and_release_is_an_error() -> None:
    with (
        healthy_afterwards(plan_of(*swap_rows(["self_attn"], [1], 1000))) as (model, _),
        pytest.raises(StaleTensorError, match="modified by an inplace operation"),
    ):
        mutated_after(model, 2).backward()


def test_mutation_after_release_does_not_matter() -> None:
    """The host copy is what was saved."""
    bare = gradients_of_step(tiny_llama())
    for prefetch_ops, at_layer in ((1000, None), (1, None), (1, 3)):
        with healthy_afterwards(plan_of(*swap_rows(["self_attn"], [1], prefetch_ops))) as (model, _):
            mutated_after(model, at_layer).backward()
            assert_bitwise_equal(gradients(model), bare)


def test_mutation_of_a_region_input_is_an_error() -> None:
    with (
        healthy_afterwards(plan_of(*recompute_rows(["self_attn.o_proj"], [1]))) as (model, _),
        pytest.raises(StaleTensorError, match="modified by an inplace operation"),
    ):
        mutated_after(model, None).backward()
