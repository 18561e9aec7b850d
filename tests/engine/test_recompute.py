"""Regions that are run again: partial backwards, faults, bytes saved, lifetimes."""

from __future__ import annotations

import gc
import re
import threading

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan
from hf_actswap.engine.verify import RecomputeError
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    assert_bitwise_equal,
    forward,
    gradients,
    gradients_of_step,
    on,
    one_step,
    plan_of,
    recompute_rows,
    swap_everything,
    tiny_llama,
)
from tests.quick_cases import each_value_once, quick_first
from tests.stream.test_host_sequence import DeviceMeter

LAYERS = range(NUM_LAYERS)
CHAIN = ("mlp.gate_proj.linear", "mlp.act_fn.silu", "mlp.up_proj.linear", "mlp.mul")
PLANS: dict[str, MemoryPlan | str] = {
    "function chain": plan_of(*recompute_rows(CHAIN, LAYERS)),
    "module with tensors in keywords": plan_of(*recompute_rows(["self_attn"], LAYERS)),
    "modules": plan_of(*recompute_rows(["input_layernorm", "self_attn", "mlp"], LAYERS)),
    "layers": CASES["full_recompute"],
    "layers but some ops": CASES["exclude_inside_full"],
}


def assert_backwards_in_parts(plan: MemoryPlan | str, part: str) -> None:
    """Fail unless the gradient of one weight, and then all of them twice, are those without a plan."""
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    on(model, plan)
    loss = forward(model)
    (grad,) = torch.autograd.grad(loss, model.get_parameter(part), retain_graph=True)
    assert torch.equal(grad, bare[part])
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_bitwise_equal(gradients(model), bare)


@each_value_once
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "part", ["model.layers.2.mlp.gate_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_a_partial_backward_and_then_the_whole_twice(name: str, part: str) -> None:
    assert_backwards_in_parts(PLANS[name], part)


class _Fickle(nn.Module):
    """A feed-forward that does something else when it is run again."""

    def __init__(self, mlp: nn.Module, how: str) -> None:
        super().__init__()
        self.mlp, self.how = mlp, how
        self.ran = threading.Event()  # what is inside an object is not restored, as an attribute would be

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.ran.is_set():
            if not isinstance(hidden, torch._subclasses.FakeTensor):
                self.ran.set()
            return self.mlp(hidden)
        if self.how == "less":
            return hidden * 2
        return self.mlp(torch.cat([hidden, hidden], dim=1))


_SAME = r"it must do the same work each time \(data-dependent control flow\? a changed module\?\)"


@pytest.mark.parametrize(
    ("path", "how", "message"),
    [
        ("mlp", "less", rf"1\.mlp: run again, it saved \d+ tensors and not number \d+; {_SAME}"),
        (
            "mlp",
            "wider",
            r"1\.mlp: run again, saved tensor \d is \[2, 32, 48\] torch\.float32; in forward it was "
            r"\[2, 16, 48\] torch\.float32",
        ),
        ("", "less", rf"model\.layers\.1: run again, it saved fewer tensors; {_SAME}"),
        (
            "",
            "wider",
            r"model\.layers\.1: run again, saved tensor \d+ is \[64, 32\] torch\.float32; in forward it "
            r"was \[32, 32\] torch\.float32",
        ),
    ],
)
def test_what_does_other_work_is_an_error(path: str, how: str, message: str) -> None:
    model = tiny_llama()
    layer = model.model.layers[1]
    plain, layer.mlp = layer.mlp, _Fickle(layer.mlp, how)
    applied = on(model, plan_of(*recompute_rows([path], [1])))
    loss = forward(model)
    with pytest.raises(RecomputeError) as caught:
        loss.backward()
    assert re.fullmatch(message, str(caught.value))
    del loss, caught
    applied.remove()
    layer.mlp = plain
    assert_bitwise_equal(gradients_of_step(model), gradients_of_step(tiny_llama()))


def held_bytes(plan: MemoryPlan | str | None, model: nn.Module | None = None) -> tuple[int, int]:
    """Bytes that live between forward and backward, and those that were copied out."""
    model = model if model is not None else tiny_llama()
    applied = on(model, plan)
    with DeviceMeter(model) as held:
        loss = forward(model)
    total = held.live_bytes
    loss.backward()
    return total, applied.stats().offloaded_bytes if applied is not None else 0


@pytest.mark.parametrize(
    "plan", [swap_everything(), *(CASES[name] for name in ("default_swap", "case_2", "case_3"))]
)
def test_swap_frees_exactly_what_was_copied_out(plan: MemoryPlan | str) -> None:
    bare, _ = held_bytes(None)
    held, offloaded = held_bytes(plan)
    assert bare - held == offloaded > 0


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("name", quick_first([*PLANS, *CASES], 4))
def test_no_tensor_outlives_its_step(name: str) -> None:
    """What a recomputation catches must not hold the graph that it ran in: 60 MB a step, once."""
    model = tiny_llama()
    on(model, PLANS.get(name) or CASES[name])
    alive = []
    for step in range(6):
        one_step(model, step)
        model.zero_grad()
        alive.append(tensors_alive())
    assert alive[2:] == [alive[1]] * 4
