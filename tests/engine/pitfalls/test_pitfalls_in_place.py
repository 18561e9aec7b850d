"""Pitfalls 1 and 2: tensors that somebody writes into after autograd saved them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from hf_actswap import MemoryPlan
from hf_actswap.engine import StaleTensorError
from tests.engine.pitfalls.odd_layers import llama_with, same_gradients
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.tiny_models import (
    assert_bitwise_equal,
    gradients,
    gradients_of_step,
    on,
    one_step,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
)
from tests.quick_cases import each_value_once

LATE, AT_ONCE = 1000, 0
REJECTED = "modified by an inplace operation"

ILLEGAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul_": lambda x: _used_then(x, lambda saved: saved.mul_(0.5)),
    "add_": lambda x: _used_then(x, lambda saved: saved.add_(1.0)),
    "dropout": lambda x: _used_then(x, lambda saved: nn.functional.dropout(saved, 0.5, inplace=True)),
    "copy_": lambda x: _used_then(x, lambda saved: saved.copy_(torch.zeros_like(saved))),
    "slice": lambda x: _used_then(x, lambda saved: saved[:, 1:3].zero_()),
}

LEGAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu_": lambda x: (x * 2).relu_() * 3,
    "residual +=": lambda x: _added_to(x * 2, x).sin(),
    "mul_ by a mask": lambda x: (x * 2).mul_((x.detach() > 0).to(x.dtype)).exp(),
    "dropout": lambda x: nn.functional.dropout(x * 2, 0.5, inplace=True).sigmoid(),
    "lora added in place": lambda x: _added_to(nn.functional.linear(x, torch.eye(48)), x.cos()).tanh_(),
}


def _used_then(x: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    saved = x.exp()  # saves its own output
    used = saved.sin()  # saves it again
    with torch.no_grad():
        change(saved)
    return used


def _added_to(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    total += part
    return total


@each_value_once
@pytest.mark.parametrize("name", ILLEGAL)
@pytest.mark.parametrize(
    "plan",
    [plan_of(*swap_rows(["mlp"], [1], LATE)), plan_of(*swap_rows(["mlp"], [3], LATE))],
    ids=["swapped", "kept"],
)
def test_pitfall_01_in_place_after_pack_raises(name: str, plan: MemoryPlan) -> None:
    """Catches an engine that compares no versions: pack hooks turn autograd's own check off."""
    model = llama_with(ILLEGAL[name], [1])
    with pytest.raises(RuntimeError, match=REJECTED):
        one_step(model)
    on(model, plan, RecordingTransfer())
    with pytest.raises(RuntimeError, match=REJECTED):
        one_step(model)


@pytest.mark.parametrize("name", ILLEGAL)
def test_pitfall_01_a_copy_that_is_late_and_reads_changed_data_is_not_used(name: str) -> None:
    """Catches a check at pack or at the start of the copy only: the copy runs when it is waited for."""
    model, transfer = llama_with(ILLEGAL[name], [1]), RecordingTransfer()
    on(model, plan_of(*swap_rows(["mlp"], [1], LATE)), transfer)
    seen: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(transfer.in_flight))
    with pytest.raises(RuntimeError, match=REJECTED):
        one_step(model)
    assert seen[0] > 0  # when the tensor was changed its copy had not run


@each_value_once
@pytest.mark.parametrize("name", LEGAL)
@pytest.mark.parametrize("prefetch_ops", [AT_ONCE, LATE])
def test_pitfall_01_in_place_before_pack_is_no_error(name: str, prefetch_ops: int) -> None:
    """Catches a version that is read before the op that writes has finished, and copies made too early."""
    stats = same_gradients(lambda: llama_with(LEGAL[name]), swap_everything(prefetch_ops))
    assert stats.offloads > 0


@pytest.mark.parametrize("name", LEGAL)
def test_pitfall_01_in_place_inside_a_recomputed_op_is_no_error(name: str) -> None:
    """Catches a recomputation that writes into the region's kept input, or compares the wrong version."""
    stats = same_gradients(lambda: llama_with(LEGAL[name]), plan_of(*recompute_rows(["mlp"], [1, 2])))
    assert stats.recomputes > 0


class WritesInBackward(torch.autograd.Function):
    """x * 2 whose backward writes its gradient into what it saved, as Liger's SwiGLU does.

    That it may do so once is tested with functions of kernel packages (`test_with_custom_functions`).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2 + x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.copy_(grad * (2 + 2 * x))


def lone(x: torch.Tensor) -> torch.Tensor:
    """Nobody else saves what is written into."""
    return WritesInBackward.apply(x + 1)


def shared_with_earlier(x: torch.Tensor) -> torch.Tensor:
    """``exp`` saves the same tensor, and its backward runs after the one that writes."""
    return WritesInBackward.apply(x.exp())


def assert_error_or_right(plan: MemoryPlan) -> None:
    """Fail if a step in which one node writes into what another reads gives wrong gradients silently."""
    right = gradients_of_step(llama_with(lambda x: x.exp() * 2 + x.exp() * x.exp(), [1]))
    model = llama_with(shared_with_earlier, [1])
    on(model, plan, RecordingTransfer())
    found = None
    with suppress(StaleTensorError):
        found = gradients_of_step(model)
    for name, grad in right.items() if found is not None else ():
        torch.testing.assert_close(found[name], grad)


SWAPS = {
    "fetched at once": swap_everything(LATE),
    "fetched on use": swap_everything(AT_ONCE),
    "op": plan_of(*swap_rows(["mlp"], [1, 2], 3)),
}


@pytest.mark.parametrize("plan", SWAPS.values(), ids=list(SWAPS))
def test_pitfall_02_a_second_backward_gets_fresh_data(plan: MemoryPlan) -> None:
    """Catches a reloaded copy that is cached for retain_graph: it would hold the first one's gradients."""
    bare = gradients_of_step(llama_with(lone))
    model = llama_with(lone)
    on(model, plan, RecordingTransfer())
    ids = torch.arange(32).reshape(2, 16)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    once = gradients(model)
    assert once.keys() == bare.keys()
    model.zero_grad()
    loss.backward()
    assert_bitwise_equal(gradients(model), once)


@pytest.mark.parametrize("plan", SWAPS.values(), ids=list(SWAPS))
def test_pitfall_02_a_write_that_another_node_would_read_is_an_error_or_harmless(plan: MemoryPlan) -> None:
    """Catches a device block shared by two nodes whose views no longer share a version: silent garbage.

    Bare autograd raises; with swap the second node may also get data of its own.
    """
    with pytest.raises(RuntimeError, match=REJECTED):
        one_step(llama_with(shared_with_earlier, [1]))
    assert_error_or_right(plan)


def test_pitfall_02_a_recomputed_tensor_that_is_written_into_is_not_shared() -> None:
    """The same for tensors that a recomputation caught: two nodes, one storage, one of them writes."""
    assert_error_or_right(plan_of(*recompute_rows(["mlp"], [1])))
