"""The bracket around an op that nothing else sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actswap.engine import EvictableTensors
from hf_actswap.planner import op_hook
from tests.planner.test_oom_guard import Device, calls_in

CPU = torch.device("cpu")


class OpNames(TorchDispatchMode):
    """Writes down the ops that it sees, and what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.seen.append((func._schema.name, args))
        return func(*args, **(kwargs or {}))

    @property
    def brackets(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [seen for seen in self.seen if seen[0].startswith("hf_actswap::")]


class Doubled(torch.autograd.Function):
    """A custom function around an opaque op."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with op_hook("doubled_forward", inputs=(x,)) as hook:
            y = torch.from_numpy(x.detach().numpy() * 2)
            hook.outputs(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with op_hook("doubled_backward", inputs=(gradient,)) as hook:
            result = gradient * 2
            hook.outputs(result)
        return result


def test_modes_see_it_forward_and_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    with OpNames() as names:
        Doubled.apply(x).sum().backward()
    first, second, third, fourth = names.brackets
    assert (first[0], first[1][0]) == ("hf_actswap::op_begin", "doubled_forward")
    assert torch.equal(first[1][2][0], x)
    assert (second[0], second[1][0]) == ("hf_actswap::op_end", first[1][1])
    assert torch.equal(second[1][1][0], x * 2)
    assert (third[0], third[1][0]) == ("hf_actswap::op_begin", "doubled_backward")
    assert fourth[0] == "hf_actswap::op_end"


def test_modes_see_it_on_another_thread_than_the_callers() -> None:
    """Backward runs on a thread of its own for each accelerator, under the caller's modes."""
    with OpNames() as names, torch.autograd.set_multithreading_enabled(True):
        Doubled.apply(torch.randn(3, requires_grad=True)).sum().backward()
    assert [name for name, _ in names.brackets].count("hf_actswap::op_end") == 2


def test_room_is_made_for_what_the_last_call_needed() -> None:
    device = Device(10_000, ())
    meter, idle, guard = device.meter, device.idle, device.guard
    with device.running():
        x = torch.randn(256)  # 1,024 bytes
        with op_hook("grows", (x,)) as hook:
            y = torch.cat([x, x])
            hook.outputs(y)
        del y
        tickets = [idle.keep(torch.randn(256)) for _ in range(8)]
        assert meter.allocated_bytes() == 9 * 1024
        with op_hook("grows", (x,)) as hook:
            assert meter.allocated_bytes() <= 10_000 - 2048
            hook.outputs(torch.cat([x, x]))
        assert guard.made_room == 1
        assert guard.ops == {"grows": 1}
        assert guard.caught == 0
        assert len(tickets) == 8


def test_an_op_that_failed_has_more_room_at_its_next_call() -> None:
    device = Device(2**21, ())
    idle = device.idle

    def call() -> None:
        with op_hook("opaque", (torch.zeros(4),)):
            if not idle.counters.offloads:
                raise torch.OutOfMemoryError("Tried to allocate 1.50 MiB.")

    with device.running():
        tickets = [idle.keep(torch.randn(2**18))]
        with pytest.raises(torch.OutOfMemoryError, match=r"^Tried to allocate 1\.50 MiB\.$"):
            call()
        call()
        assert device.guard.made_room == 1
        assert tickets


def test_inputs_stay_until_the_end() -> None:
    idle = EvictableTensors(CPU, min_tensor_bytes=64)
    ticket = idle.keep(torch.randn(64))
    with op_hook("reads", (ticket.restore(),)):  # type: ignore[union-attr]
        assert idle.evict(1) == 0
    assert idle.evict(1) == 256


def test_it_passes_exceptions_on_and_lets_go() -> None:
    idle = EvictableTensors(CPU, min_tensor_bytes=64)
    ticket = idle.keep(torch.randn(64))
    hook = op_hook("fails", (ticket.restore(),))  # type: ignore[union-attr]
    with pytest.raises(KeyError), hook:
        raise KeyError("x")
    assert idle.evict(1) == 256


def test_it_traces_on_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(4)
        with op_hook("fake", (x,)) as hook:
            hook.outputs(x + 1)


def test_without_a_guard_it_costs_few_calls() -> None:
    x = torch.randn(4)

    def hooked() -> None:
        with op_hook("op", (x, x)) as hook:
            hook.outputs(x)

    assert calls_in(hooked) <= 16
