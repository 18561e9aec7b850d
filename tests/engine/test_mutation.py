"""Saved tensors that are changed in place: autograd's own error, or the right gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_actswap.engine import StaleTensorError
from hf_actswap.plan import PlanRow
from tests.engine.healthy_steps import healthy_afterwards
from tests.engine.tiny_models import (
    assert_bitwise_equal,
    forward,
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
        pytest.raises(StaleTensorError, match="modified by an inplace operation"),
    ):
        mutated_after(model, at_layer).backward()


def test_mutation_after_release_does_not_matter() -> None:
    """The host copy is what was saved."""
    bare = gradients_of_step(tiny_llama())
    for prefetch_ops, at_layer in ((1000, None), (1, None), (1, 3)):
        with healthy_afterwards(plan_of(*swap_rows(["self_attn"], [1], prefetch_ops))) as (model, _):
            mutated_after(model, at_layer).backward()
            assert_bitwise_equal(gradients(model), bare)
