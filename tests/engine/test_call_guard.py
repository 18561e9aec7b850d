"""Calls that a plan cannot follow: each is rejected by name, and the model trains on as before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

from hf_actswap import MemoryPlan, PlanError, apply
from tests.engine.healthy_steps import healthy_afterwards
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    forward,
    gradients_of_step,
    plan_of,
    recompute_rows,
    swap_everything,
    tiny_llama,
)

PLANS = {"swap": swap_everything(5), "recompute": plan_of(*recompute_rows([""], range(NUM_LAYERS)))}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))


@each_plan
def test_transforms_of_torch_func(plan: MemoryPlan) -> None:
    def loss_of(named: dict[str, torch.Tensor]) -> torch.Tensor:
        call = {"input_ids": batch(0), "labels": batch(0)}
        loss: torch.Tensor = torch.func.functional_call(model, named, (), call).loss
        return loss

    with healthy_afterwards(plan) as (model, applied):
        named = {name: item.detach() for name, item in model.named_parameters()}
        with pytest.raises(PlanError, match=r"torch.func transform .*applied.suspend\(\) before"):
            torch.func.grad(loss_of)(named)
        expected = gradients_of_step(tiny_llama(), 0)
        applied.suspend()
        found = torch.func.grad(loss_of)(named)
        applied.resume()
        for name, item in found.items():
            torch.testing.assert_close(item, expected[name])


def test_weights_that_accelerate_loads_for_each_call() -> None:
    model = tiny_llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    applied = apply(model, PLANS["swap"])
    with pytest.raises(PlanError, match=r"weights on meta .*Load the model without cpu_offload"):
        forward(model)
    applied.remove()
    remove_hook_from_submodules(model)


def test_saved_tensors_have_our_hooks_already() -> None:
    """PyTorch allows one pair for a saved tensor; its message is in docs/troubleshooting.md."""

    def register(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        saved: Any = output.grad_fn
        saved._raw_saved_self.register_hooks(lambda item: item, lambda item: item)

    with healthy_afterwards(PLANS["swap"]) as (model, _):
        handle = model.model.layers[0].mlp.act_fn.register_forward_hook(register)
        with pytest.raises(RuntimeError, match="saved tensor whose hooks have already been set"):
            forward(model)
        handle.remove()


def during_a_forward(model: Any, call: Callable[[], object]) -> list[BaseException]:
    """Run ``call`` in another thread while layer 1 of a training step runs; return its errors."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    def started(*_: object) -> None:
        handle.remove()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    handle = model.model.layers[1].register_forward_pre_hook(started)
    forward(model, 0).backward()
    return errors


@each_plan
def test_a_training_forward_in_another_thread_at_the_same_time(plan: MemoryPlan) -> None:
    with healthy_afterwards(plan) as (model, _):
        for _ in range(2):  # the first forward is prepared on fake tensors
            model.zero_grad(set_to_none=True)
            (error,) = during_a_forward(model, lambda: forward(model, 1))
            assert isinstance(error, PlanError)
            assert "one call at a time under a plan" in str(error)
        found = {name: item.grad.clone() for name, item in model.named_parameters()}
        assert_bitwise_equal(found, gradients_of_step(tiny_llama(), 0))


@each_plan
def test_an_evaluation_in_another_thread_during_a_training_forward(plan: MemoryPlan) -> None:
    @torch.no_grad()
    def evaluate() -> None:
        losses.append(float(forward(model, 1)))

    losses: list[float] = []
    with healthy_afterwards(plan) as (model, _):
        expected = float(forward(tiny_llama(), 1))
        assert during_a_forward(model, evaluate) == []
        assert losses == [expected]
        found = {name: item.grad.clone() for name, item in model.named_parameters()}
        assert_bitwise_equal(found, gradients_of_step(tiny_llama(), 0))


@each_plan
def test_two_threads_that_train_at_once_are_right_or_rejected(plan: MemoryPlan) -> None:
    model = tiny_llama()
    applied = apply(model, plan)
    expected = [float(forward(tiny_llama(), step)) for step in range(3)]
    wrong: list[object] = []

    def train() -> None:
        for step in range(12):
            try:
                loss = forward(model, step % 3)
                loss.backward()
            except PlanError as error:
                if "one call at a time" not in str(error):
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)
            else:
                if float(loss) != expected[step % 3]:
                    wrong.append(float(loss))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    applied.remove()
    assert wrong == []


def test_threads_may_take_turns() -> None:
    with healthy_afterwards(PLANS["swap"]) as (model, _):
        for step in range(3):
            thread = threading.Thread(target=lambda step=step: forward(model, step).backward())
            thread.start()
            thread.join()
