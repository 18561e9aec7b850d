"""Pitfalls 11 to 15, 20 and 23: what happens when something is run again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hf_actswap import MemoryPlan
from tests.engine.pitfalls.odd_layers import llama_with, same_gradients, step_gradients
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.spies import ErraticTransfer, WatchingTransfer
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    assert_bitwise_equal,
    forward,
    on,
    one_step,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)

LAYERS = range(NUM_LAYERS)
RECOMPUTED: dict[str, MemoryPlan | str] = {
    "layers, their inputs swapped": plan_of(*recompute_rows([""], LAYERS), *swap_rows(["output"], LAYERS, 5)),
    "ops": plan_of(*recompute_rows(["mlp", "self_attn"], LAYERS), *swap_rows(["output"], LAYERS, 5)),
    "functions": plan_of(*recompute_rows(["mlp.mul", "mlp.act_fn"], LAYERS), *swap_rows(["mlp"], LAYERS, 5)),
}
every_recomputation = pytest.mark.parametrize("plan", RECOMPUTED.values(), ids=list(RECOMPUTED))


def checkpointed_mlps(**settings: Any) -> nn.Module:
    """A model that recomputes its own MLPs, as remote code does."""
    model = tiny_llama()
    for layer in model.model.layers:
        forward = layer.mlp.forward
        layer.mlp.forward = partial(checkpoint, forward, use_reentrant=False, **settings)
    return model


@every_recomputation
def test_pitfall_11_nothing_is_copied_out_in_backward(plan: MemoryPlan | str) -> None:
    """Catches a recomputation whose packs are taken for a forward's: copies that nobody reads."""
    model, transfer = tiny_llama(), RecordingTransfer()
    on(model, plan, transfer)
    loss = forward(model)
    before = len(transfer.events)
    loss.backward()
    assert before > 0
    assert [event for event in transfer.events[before:] if event.startswith("out") and "start" in event] == []


def test_pitfall_11_a_model_that_recomputes_by_itself() -> None:
    """Catches the same for a recomputation that the engine did not ask for."""
    transfer = RecordingTransfer()

    def step(model: nn.Module) -> None:
        loss = forward(model)
        before = len(transfer.events)
        loss.backward()
        started = [event for event in transfer.events[before:] if event.startswith("out")]
        assert [event for event in started if event.endswith("start")] == []

    stats = same_gradients(checkpointed_mlps, swap_everything(5), step, transfer)
    assert stats.offloads > 0


def test_pitfall_12_only_the_innermost_hooks_apply() -> None:
    """Catches an engine that counts on seeing every pack: hooks inside a layer take the MLP's."""

    def build() -> nn.Module:
        model = tiny_llama()
        forward = model.model.layers[1].mlp.forward

        def hooked(hidden: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                result: torch.Tensor = forward(hidden)
            return result

        model.model.layers[1].mlp.forward = hooked
        return model

    hooked = same_gradients(build, swap_everything(5), steps=1)
    free = same_gradients(tiny_llama, swap_everything(5), steps=1)
    assert 0 < hooked.offloads < free.offloads


def test_pitfall_12_hooks_around_the_step_are_left_alone() -> None:
    """Catches ours pushed outside the caller's, popped in the wrong order, or left installed."""
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    def step(model: nn.Module) -> None:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            one_step(model)
            outside = torch.ones(77, requires_grad=True).exp()
        assert seen[-1] == outside.shape  # theirs is the innermost again

    stats = same_gradients(tiny_llama, swap_everything(5), step)
    assert stats.offloads > 0


def _save_matrix_products(_ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.linear.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def test_pitfall_13_selective_checkpointing_inside_a_swapped_layer() -> None:
    """Catches an engine that breaks on it; what it saves is invisible, so it stays and is not counted."""
    context = partial(create_selective_checkpoint_contexts, _save_matrix_products)
    build = partial(checkpointed_mlps, context_fn=context)
    selective = same_gradients(build, swap_everything(5))
    free = same_gradients(tiny_llama, swap_everything(5))
    assert 0 < selective.offloaded_bytes < free.offloaded_bytes
    assert selective.rejected in ({}, {"empty": 0})  # up to PyTorch 2.11 a checkpoint saves an empty tensor
    assert free.rejected == {}


@pytest.mark.parametrize("cap_bytes", [0, 5000])
def test_pitfall_14_a_full_host_pool_changes_no_count(cap_bytes: int) -> None:
    """Catches a decision by free memory inside a step: checkpoint compares what is saved both times."""
    plan = swap_everything(5, host_memory_bytes=cap_bytes)
    assert same_gradients(checkpointed_mlps, plan).rejected["host memory cap"] > 0


@every_recomputation
def test_pitfall_14_nor_in_our_own_recomputations(plan: MemoryPlan | str) -> None:
    """Catches the same where some of a region's inputs went to the host and some did not."""
    assert isinstance(plan, MemoryPlan)
    cap_bytes = 7000
    stats = same_gradients(tiny_llama, replace(plan, host_memory_bytes=cap_bytes), steps=1)
    assert 0 < stats.offloaded_bytes <= cap_bytes
    assert stats.rejected["host memory cap"] > 0


def _keyword_hidden_states(model: nn.Module) -> nn.Module:
    """Make the model hand hidden states to its layers by name, as some remote code does."""

    def by_name(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (), {"hidden_states": args[0], **kwargs}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(by_name, with_kwargs=True, prepend=True)
    return model


@pytest.mark.parametrize("plan", [plan for name, plan in RECOMPUTED.items()], ids=list(RECOMPUTED))
def test_pitfall_15_tensors_in_keywords_of_a_recomputed_layer(plan: MemoryPlan | str) -> None:
    """Catches hidden states by name that `torch.utils.checkpoint` holds itself, where hooks cannot reach."""
    by_position = same_gradients(tiny_llama, plan)
    by_name = same_gradients(lambda: _keyword_hidden_states(tiny_llama()), plan)
    assert by_name.offloaded_bytes == by_position.offloaded_bytes > 0


@every_recomputation
def test_pitfall_20_recomputation_runs_in_one_order_whatever_the_clock(plan: MemoryPlan | str) -> None:
    """Catches an order that depends on copies: ranks would meet in different collectives and hang."""
    orders: list[list[str]] = []
    for counts in ([0], [1, 3, 0], [9]):
        model, order = tiny_llama(), list[str]()
        on(model, plan, ErraticTransfer(counts))
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "mlp", "o_proj", "act_fn")):
                module.register_forward_pre_hook(lambda *_, name=name, order=order: order.append(name))
        one_step(model, len(orders))  # other data, too
        orders.append(order)
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) > (4 * NUM_LAYERS if "act_fn" not in str(plan) else 0)


def _autocast_step(model: nn.Module, backward_in: AbstractContextManager[Any] | None = None) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = forward(model)
    with backward_in or nullcontext():
        loss.backward()


@every_recomputation
def test_pitfall_23_recomputation_is_cast_as_the_forward_was(plan: MemoryPlan | str) -> None:
    """Catches a recomputation without autocast, or with the one that backward happens to run in."""
    contexts: list[Callable[[], Any]] = [
        nullcontext,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
    ]
    model = tiny_llama()
    on(model, plan, RecordingTransfer())
    for context in contexts:
        bare = step_gradients(tiny_llama(), lambda model: _autocast_step(model, context()))  # noqa: B023
        assert_bitwise_equal(step_gradients(model, lambda model: _autocast_step(model, context())), bare)  # noqa: B023


def test_pitfall_23_casts_of_weights_stay() -> None:
    """Catches the bf16 copies of fp32 weights, which autocast's cache holds, being taken for activations."""
    model, transfer = tiny_llama(), WatchingTransfer(hold=True)
    casts = {
        parameter.detach().bfloat16().view(torch.uint8).numpy().tobytes(): name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
    }
    on(model, swap_everything(5), transfer)
    _autocast_step(model)
    moved = [source.view(-1).view(torch.uint8).numpy().tobytes() for source in transfer.held]
    assert [casts[data] for data in moved if data in casts] == []


def test_pitfall_23_autocast_case_files() -> None:
    """Catches casts that break the documents' cases."""
    for name in ("case_4", "exclude_inside_full"):
        same_gradients(tiny_llama, CASES[name], _autocast_step, steps=1)
    same_gradients(lambda: llama_with(torch.exp), swap_everything(5), _autocast_step, steps=1)
