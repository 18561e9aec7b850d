"""Pitfalls 8 to 10 and 22: graphs that are walked twice, in part, late, or never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan
from tests.engine.healthy_steps import assert_nothing_is_left, every_plan
from tests.engine.pitfalls.odd_layers import llama_with, same_gradients
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.spies import WatchingTransfer
from tests.engine.tiny_models import (
    assert_bitwise_equal,
    batch,
    gradients,
    gradients_of_step,
    on,
    swap_everything,
    tiny_llama,
)


def loss_of(model: nn.Module, step: int = 0, length: int = 16) -> torch.Tensor:
    ids = batch(step)[:, :length]
    return model(input_ids=ids, labels=ids).loss


def test_pitfall_08_retain_graph_keeps_the_host_copy_and_not_the_device_copy() -> None:
    """Catches a host block given back at its first unpack, and a reloaded block cached for the second."""
    bare = gradients_of_step(tiny_llama())
    model, transfer = tiny_llama(), WatchingTransfer()
    applied = on(model, swap_everything(5), transfer)
    loss = loss_of(model)
    for times in (1, 2, 3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_bitwise_equal(gradients(model), bare)
        stats = applied.stats()
        assert stats.live_swaps == stats.offloads
        assert stats.prefetches == times * stats.offloads
        assert all(block.expired() for block in transfer.blocks)
    del loss
    assert_nothing_is_left(applied)


@every_plan
def test_pitfall_08_two_losses_over_one_trunk(plan: MemoryPlan | str) -> None:
    """Catches tickets that are spent by the first loss's backward."""

    def two_losses(model: nn.Module) -> None:
        hidden = model.model(batch(0)).last_hidden_state
        hidden.square().mean().backward(retain_graph=True)
        hidden[:, 3].sum().backward()

    same_gradients(tiny_llama, plan, two_losses)


@every_plan
def test_pitfall_08_a_generator_and_its_critic(plan: MemoryPlan | str) -> None:
    """Catches the same where another model's backward stands between, through the first one's graph."""

    def adversarial(model: nn.Module) -> None:
        torch.manual_seed(3)
        critic = nn.Linear(32, 1)
        hidden = model.model(batch(0)).last_hidden_state
        critic(hidden.detach()).mean().backward()
        torch.autograd.grad(critic(hidden).mean(), hidden, retain_graph=True)
        (-critic(hidden).mean()).backward()

    same_gradients(tiny_llama, plan, adversarial)


class _Unused(nn.Module):
    """An MLP with a branch whose result is thrown away, and one that is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.aside = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        aside = self.aside(hidden.exp()).sin().square()
        return self.down(self.up(hidden).sigmoid()) + aside.detach().cos()


def _with_unused_branch() -> nn.Module:
    model = tiny_llama()
    torch.manual_seed(1)
    model.model.layers[1].mlp = _Unused()
    return model


def test_pitfall_09_a_branch_without_backward_gives_its_host_memory_back() -> None:
    """Catches a count of unpacks that waits for all packs: the branch's tickets are never asked."""
    stats = same_gradients(_with_unused_branch, swap_everything(5), steps=3)
    assert 0 < stats.prefetches < stats.offloads
    assert stats.host_peak_bytes <= stats.host_pool_bytes < 1.01 * stats.host_peak_bytes  # aligned blocks


@every_plan
def test_pitfall_09_outputs_that_are_dropped(plan: MemoryPlan | str) -> None:
    """Catches holders that only a backward frees: logging the loss of a step and throwing it away."""
    model = tiny_llama()
    bare = gradients_of_step(tiny_llama())
    applied = on(model, plan, RecordingTransfer())
    for step in range(3):
        loss = loss_of(model, step)
        assert (applied.stats().live_swaps > 0) == (applied.stats().offloads > 0)
        del loss
        assert_nothing_is_left(applied)
    assert_bitwise_equal(gradients_of_step(model), bare)


@every_plan
def test_pitfall_10_chosen_and_rejected_before_one_backward(plan: MemoryPlan | str) -> None:
    """Catches "the first unpack belongs to the last forward": two lengths, a reference model's forward."""

    def preference(model: nn.Module) -> None:
        chosen = loss_of(model, 0, 16)
        with torch.no_grad():
            reference = loss_of(model, 2, 7)
        rejected = loss_of(model, 1, 9)
        nn.functional.softplus(chosen - rejected + reference).backward()

    same_gradients(tiny_llama, plan, preference)


SCHEDULES = {
    "one forward, one backward": "F0 F1 B0 F2 B1 F3 B2 B3",
    "all forwards first": "F0 F1 F2 F3 B0 B1 B2 B3",
    "last first": "F0 F1 F2 B2 B1 F3 B3 B0",
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
@every_plan
def test_pitfall_10_micro_batches_of_a_pipeline(plan: MemoryPlan | str, schedule: str) -> None:
    """Catches state of one forward that the next one overwrites before its backward."""

    def run(model: nn.Module) -> None:
        losses: dict[str, torch.Tensor] = {}
        for action in schedule.split():
            if action[0] == "F":
                losses[action[1]] = loss_of(model, int(action[1]), 16 - int(action[1]))
            else:
                losses.pop(action[1]).backward()

    same_gradients(tiny_llama, plan, run, steps=1)


def _penalty(model: nn.Module) -> None:
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
    torch.stack([grad.square().sum() for grad in grads]).sum().backward()


@every_plan
def test_pitfall_22_double_backward(plan: MemoryPlan | str) -> None:
    """Catches restored tensors that have lost their edges: the second derivative would miss terms."""
    same_gradients(lambda: tiny_llama(attn_implementation="eager"), plan, _penalty)


def test_pitfall_22_create_graph_keeps_the_host_copies_for_longer() -> None:
    """Catches host blocks given back after the first backward although the graph of the second needs them."""
    model = tiny_llama(attn_implementation="eager")
    applied = on(model, swap_everything(5), RecordingTransfer())
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
    stats = applied.stats()
    assert stats.live_swaps == stats.offloads > 0
    del grads
    assert_nothing_is_left(applied)


def test_pitfall_22_second_derivatives_through_a_swapped_custom_function() -> None:
    """Catches the same for saved inputs of a function that is differentiated twice by hand."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * 3 * x * x

    cube: Callable[[torch.Tensor], torch.Tensor] = Cube.apply
    same_gradients(
        lambda: llama_with(cube, [1, 2], attn_implementation="eager"), swap_everything(5), _penalty, steps=1
    )
