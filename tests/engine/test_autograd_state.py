"""The private state of autograd that the engine reads is what it takes it for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hf_actswap.engine.autograd_state import (
    function_mode_is_innermost,
    next_node_number,
    node_number,
    packing_node_number,
    pop_leaked_hooks,
    result_dtype,
    running_node_number,
    skip_node_numbers,
)
from tests.engine.tiny_models import forward, tiny_llama


class _Numbers:
    def __init__(self) -> None:
        self.packed: list[int] = []
        self.unpacked: list[tuple[int, int | None]] = []

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.packed.append(packing_node_number())
        return tensor, self.packed[-1]

    def unpack(self, saved: tuple[torch.Tensor, int]) -> torch.Tensor:
        self.unpacked.append((saved[1], running_node_number()))
        return saved[0]


class _Ops(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_pack_knows_the_number_of_its_node() -> None:
    numbers = _Numbers()
    x = torch.randn(3, requires_grad=True)
    y = x
    nodes = []
    with saved_tensors_hooks(numbers.pack, numbers.unpack):
        for function in (torch.sin, torch.exp, torch.cos, torch.square):
            y = function(y)
            nodes.append(y.grad_fn._sequence_nr())
            y = y + 1  # a node that saves nothing
    assert numbers.packed == nodes
    assert nodes == [nodes[0] + 2 * index for index in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_node_knows_its_number_and_the_dtype_of_its_result(dtype: torch.dtype) -> None:
    wide = torch.randn(3, requires_grad=True).double()
    before = next_node_number()
    cast = wide.to(dtype)
    assert (node_number(cast.grad_fn), result_dtype(cast.grad_fn)) == (before, dtype)
    assert (node_number(wide.grad_fn), result_dtype(wide.grad_fn)) == (before - 1, torch.float64)


def test_numbers_are_skipped_unseen() -> None:
    numbers, ops, x = _Numbers(), _Ops(), torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(numbers.pack, numbers.unpack):
        x.sin()
        with torch.no_grad(), ops, FakeTensorMode():
            skip_node_numbers(7)
        x.sin()
    assert numbers.packed == [numbers.packed[0], numbers.packed[0] + 8]
    assert ops.seen == []


def test_numbers_ascend_in_forward_and_the_same_descend_in_backward() -> None:
    numbers = _Numbers()
    model = tiny_llama()
    with saved_tensors_hooks(numbers.pack, numbers.unpack):
        loss = forward(model)
    loss.backward()
    assert len(numbers.packed) > 100
    assert numbers.packed == sorted(numbers.packed)
    assert [packed for packed, _ in numbers.unpacked] == [running for _, running in numbers.unpacked]
    running = [number for _, number in numbers.unpacked if number is not None]
    assert running == sorted(running, reverse=True)
    assert sorted(running) == numbers.packed


def test_a_custom_function_has_its_number_too() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(context: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            assert context.saved_tensors
            return grad * 2

    numbers = _Numbers()
    x = torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(numbers.pack, numbers.unpack):
        y = Double.apply(x.exp()).sin()
    y.sum().backward()
    assert numbers.packed == sorted(numbers.packed)
    assert [packed for packed, _ in numbers.unpacked] == [running for _, running in numbers.unpacked]


def test_no_node_runs_outside_backward() -> None:
    assert running_node_number() is None


def test_leaked_hooks_are_popped_only_if_they_are_ours() -> None:
    def ours(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def others(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert not pop_leaked_hooks(ours)
    with saved_tensors_hooks(others, others):
        assert not pop_leaked_hooks(ours)
        saved_tensors_hooks(ours, ours).__enter__()
        assert pop_leaked_hooks(ours)
        assert not pop_leaked_hooks(ours)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is others
        saved_tensors_hooks(ours, ours).__enter__()
        with saved_tensors_hooks(others, ours):  # left on ours by what was interrupted, and popped later
            assert pop_leaked_hooks(ours)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) == (others, ours)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is others
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_bound_method_is_recognised() -> None:
    numbers = _Numbers()
    saved_tensors_hooks(numbers.pack, numbers.unpack).__enter__()
    assert not pop_leaked_hooks(_Numbers().pack)
    assert pop_leaked_hooks(numbers.pack)


def test_the_innermost_function_mode() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    outer, inner = Mode(), Mode()
    assert not function_mode_is_innermost(outer)
    with outer:
        assert function_mode_is_innermost(outer)
        with inner:
            assert function_mode_is_innermost(inner)
            assert not function_mode_is_innermost(outer)
