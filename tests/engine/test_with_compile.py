"""``torch.compile``: layers compiled in place or wrapped, the whole model: nothing is traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hf_actswap import PlanError, apply, model_structure
from hf_actswap.engine import AppliedPlan
from hf_actswap.engine.schedule import OperatorClock
from tests.engine.tiny_models import (
    assert_bitwise_equal,
    compiled_layers,
    gradients_of_step,
    snapshot,
    tiny_llama,
)
from tests.quick_cases import quick_first

SMALL = "memory: {min_tensor_mib: 0.0001}\n"
LAYER_SWAP = SMALL + "swap_config: {swap: true, layer_swap: [{backward_prefetch: 20, layers: true}]}\n"
DEFAULT = SMALL + "swap_config: {swap: true, default_prefetch: 20}\n"
SOME_LAYERS = SMALL + "swap_config: {swap: true, layer_swap: [{backward_prefetch: 20, layers: [0, 2]}]}\n"
RECOMPUTE = "recompute_config: {recompute: true}\n"
OPS = "swap_config: {swap: true, op_swap: [{op_name: attention, backward_prefetch: 20, layers: [0]}]}\n"


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def whole_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


LAYERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "in place": partial(compiled_layers, backend="aot_eager"),
    "wrapped": partial(compiled_layers, backend="aot_eager", wrapped=True),
}
WHOLE: dict[str, Callable[[nn.Module], nn.Module]] = {"whole": whole, "whole in place": whole_in_place}
CASES = [
    *quick_first((("in place", text) for text in (LAYER_SWAP, RECOMPUTE, DEFAULT, SOME_LAYERS)), 2),
    *quick_first((("wrapped", text) for text in (RECOMPUTE, LAYER_SWAP)), 1),
    *quick_first(((direction, LAYER_SWAP) for direction in WHOLE), 1),
    *(pytest.param("wrapped", text, marks=pytest.mark.slow) for text in (DEFAULT, SOME_LAYERS)),
    *(pytest.param(direction, DEFAULT, marks=pytest.mark.slow) for direction in WHOLE),
]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled_llama(direction: str) -> nn.Module:
    model = tiny_llama()
    model.config.use_cache = False
    return {**LAYERS, **WHOLE}[direction](model)


def steps(model: nn.Module, count: int = 3) -> list[dict[str, torch.Tensor]]:
    found = [gradients_of_step(model, step) for step in range(count)]
    return [{name.replace("_orig_mod.", ""): grad for name, grad in grads.items()} for grads in found]


def compiler_work() -> tuple[Any, dict[str, int]]:
    return counters["stats"].get("unique_graphs"), dict(counters["graph_break"])


@cache
def bare_steps(direction: str) -> tuple[list[dict[str, torch.Tensor]], Any]:
    """Gradients without a plan, and what the compiler did for them."""
    found = steps(compiled_llama(direction)), compiler_work()
    torch._dynamo.reset()
    counters.clear()
    return found


@pytest.mark.parametrize(("direction", "text"), CASES)
def test_same_gradients_same_graphs_no_breaks(direction: str, text: str) -> None:
    bare, work = bare_steps(direction)
    model = compiled_llama(direction)
    with apply(model, text) as applied:
        for one, other in zip(steps(model), bare, strict=True):
            assert_bitwise_equal(one, other)
        if text != RECOMPUTE:
            assert compiler_work() == work
            stats = applied.stats()
            assert stats.offloads == stats.prefetches > 0
            assert (stats.live_swaps, stats.host_bytes) == (0, 0)
        assert compiler_work()[1] == {}


SELECT = "recompute_config: {select_recompute: {feed_forward: true}}"
BUDGET = "recompute_config: {compile_budget: 0.3}"


@pytest.mark.parametrize(
    ("direction", "text"),
    [
        *((direction, text) for direction in LAYERS for text in (RECOMPUTE, SELECT, BUDGET)),
        *((direction, LAYER_SWAP) for direction in (*LAYERS, *WHOLE)),
    ],
)
def test_everything_comes_off_again(direction: str, text: str) -> None:
    model = compiled_llama(direction)
    inner = getattr(model, "_orig_mod", model)
    before = snapshot(inner)
    calls = [module._compiled_call_impl for module in inner.modules()]
    apply(model, text).remove()
    assert snapshot(inner) == before
    assert [module._compiled_call_impl for module in inner.modules()] == calls


def test_the_bytes_of_a_layer_are_its_residuals() -> None:
    """A compiled layer keeps its weights out of the swap, and what the next layer shares once."""
    model = compiled_llama("in place")
    one = bytes_of_a_step(model, SOME_LAYERS)
    torch._dynamo.reset()
    everything = bytes_of_a_step(compiled_llama("in place"), LAYER_SWAP)
    assert everything == 2 * one


def bytes_of_a_step(model: nn.Module, text: str) -> int:
    applied: AppliedPlan = apply(model, text)
    steps(model, 1)
    applied.remove()
    return applied.stats().offloaded_bytes


@pytest.mark.parametrize(
    ("direction", "text", "words"),
    [
        ("in place", OPS, ("layers are compiled", "self_attn", "layer_swap")),
        ("wrapped", OPS, ("layers are compiled", "self_attn", "layer_swap")),
        ("whole", SOME_LAYERS, ("one fate for all layers", "regional compilation")),
        ("whole", RECOMPUTE, ("a model compiled whole", "regional compilation")),
        ("whole in place", OPS, ("layers are compiled", "self_attn")),
    ],
)
def test_what_cannot_be_told_apart_is_rejected(direction: str, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as rejected:
        apply(compiled_llama(direction), text)
    assert [word for word in words if word not in str(rejected.value)] == []


@pytest.mark.parametrize(
    ("direction", "text"),
    quick_first(
        [
            ("in place", OPS),
            ("whole", "tile_config: {loss: {tokens: 8}}"),
            ("in place", "tile_config: {tile: [{op_name: feed_forward, tokens: 8}]}"),
            *((direction, OPS) for direction in ("wrapped", *WHOLE)),
        ],
        1,
    ),
)
def test_compiled_after_the_plan_is_rejected(direction: str, text: str) -> None:
    """In training only; without the plan it trains as it does bare."""
    expected = steps(tiny_llama(), 1)
    model = tiny_llama()
    with apply(model, text):
        compiled = {**LAYERS, **WHOLE}[direction](model)
        with pytest.raises(PlanError, match="compiled after the plan was applied"):
            steps(compiled, 1)
        with torch.no_grad():
            compiled(input_ids=torch.ones(1, 4, dtype=torch.long))
    for one, other in zip(steps(compiled, 1), expected, strict=True):
        assert_bitwise_equal(one, other)


def test_the_default_strategy_says_what_it_becomes() -> None:
    with apply(compiled_llama("in place"), DEFAULT) as applied:
        assert any("layer_swap of all layers" in str(item) for item in applied.plan.adjustments)


def test_a_compiled_layer_counts_as_many_operators_as_its_eager_one() -> None:
    clock = OperatorClock()
    start = clock.now()
    for _ in range(3):
        clock.enter_compiled(80)
        torch.ones(1, requires_grad=True).exp()  # the region: one node
        saved_at = clock.now()
        clock.leave_compiled()
    assert saved_at - start == 3 * 80
    assert clock.now() - start == 3 * 80
    assert model_structure(tiny_llama()).layers[0].nodes > 40


def test_backward_finds_the_operator_of_a_node() -> None:
    clock = OperatorClock()
    before = torch.ones(1, requires_grad=True).exp()
    clock.enter_compiled(50)
    region = before.exp()
    inside = clock.now()
    clock.leave_compiled()
    after = region.exp()
    outside = clock.now()
    numbers = [
        tensor.grad_fn._sequence_nr() for tensor in (before, region, after) if tensor.grad_fn is not None
    ]
    assert clock.operator(numbers[1]) == inside
    assert clock.operator(numbers[2]) == outside == inside + 1
    assert clock.operator(numbers[0]) == inside - 50
