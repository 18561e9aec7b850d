"""The planner beside optimizers of other kinds, layers that are replaced, and inference mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from torch import nn

from hf_actswap import PlanError, apply
from hf_actswap.planner.budget import BudgetError
from tests.engine.tiny_models import batch, forward, one_step, tiny_llama

AUTO = {"memory": {"mode": "adaptive", "budget_gib": 4, "warmup_steps": 2}}
SAVING = {"memory": {**AUTO["memory"], "preference": "memory_saving"}}


class SeveralOptimizers:
    """An optimizer that is not PyTorch's, and holds some."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def keyed_by_names(model: nn.Module) -> Any:
    return create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-2)


def several(model: nn.Module) -> Any:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return SeveralOptimizers([torch.optim.AdamW(trained[:2], lr=1e-2), torch.optim.SGD(trained[2:], lr=1e-2)])


def trained(make: Callable[[nn.Module], Any], config: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    model = get_peft_model(tiny_llama(num_hidden_layers=2), adapters).train()
    optimizer = make(model)
    before = list(vars(optimizer))
    planner = apply(model, config, optimizer=optimizer) if config else None
    for step in range(4):
        one_step(model, step)
        optimizer.step()
        optimizer.zero_grad()
    if planner is not None:
        assert planner.phase != "warm-up"
        planner.remove()
        assert list(vars(optimizer)) == before
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize(
    ("make", "config"), [(keyed_by_names, AUTO), (keyed_by_names, SAVING), (several, AUTO)]
)
def test_optimizers_of_other_kinds(make: Callable[[nn.Module], Any], config: Any) -> None:
    for found, expected in zip(trained(make, config), trained(make, None), strict=True):
        assert torch.equal(found, expected)


def test_the_states_of_an_optimizer_that_is_not_pytorchs_stay() -> None:
    with pytest.raises(PlanError, match=r"expected a torch.optim.Optimizer, whose step calls hooks"):
        trained(several, SAVING)


def pruned(layers: nn.ModuleList) -> list[nn.Module]:
    return list(layers)[:2]


def duplicated(layers: nn.ModuleList) -> list[nn.Module]:
    return [copy.deepcopy(layer) for layer in layers for _ in range(2)]


def one_exchanged(layers: nn.ModuleList) -> list[nn.Module]:
    return [layers[0], copy.deepcopy(layers[1]), *layers[2:]]


@pytest.mark.parametrize("steps", [0, 2], ids=["warm-up", "search"])
@pytest.mark.parametrize("change", [pruned, duplicated, one_exchanged])
def test_replaced_layers_are_named(change: Callable[[nn.ModuleList], list[nn.Module]], steps: int) -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    planner = apply(model, AUTO, optimizer=optimizer)
    for step in range(steps):
        one_step(model, step)
        optimizer.step()
    model.model.layers = nn.ModuleList(change(model.model.layers))
    with pytest.raises(PlanError, match=r"as when the plan was applied, found .*Call remove\(\) before"):
        forward(model)
    planner.remove()
    with apply(model, AUTO, optimizer=optimizer):
        one_step(model)


@pytest.mark.parametrize("budget_gib", [1e-6, 4], ids=["a budget error", "no error"])
def test_inference_mode_leaves_the_process_healthy(budget_gib: float) -> None:
    model = tiny_llama()
    memory, ids = {**AUTO["memory"], "budget_gib": budget_gib}, batch(0)
    planner = apply(model, {"memory": memory}, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    with torch.inference_mode():
        if budget_gib < 1:
            with pytest.raises(BudgetError):
                model(input_ids=ids)
            torch.empty(3)
        else:
            model(input_ids=ids)
        with pytest.raises(PlanError, match=r"Call remove\(\) after the block"):
            planner.remove()
    if budget_gib < 1:
        one_step(model)  # as without a planner
    planner.remove()
    torch.empty(3)
