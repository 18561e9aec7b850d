"""Ops kept or swapped inside a recomputed module are not run again: FLOPs, bytes, numbers, lifetimes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_actswap import MemoryPlan, apply, model_structure
from hf_actswap.engine import record_saved
from hf_actswap.plan import PlanRow, swapped_bytes
from hf_actswap.plan.settle import settled
from tests.engine.test_recompute import assert_backwards_in_parts, held_bytes
from tests.engine.test_recompute_counts import (
    BF16,
    DTYPES,
    FP32,
    HIDDEN,
    INNER,
    ROW,
    SCORES,
    SDPA,
    TOKENS,
    WIDE,
    Again,
    attention,
    bare_llama,
    difference,
    held_arguments,
    layer,
    mlp,
)
from tests.engine.tiny_models import (
    BATCH,
    LENGTH,
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    forward,
    gradients,
    gradients_of_step,
    on,
    plan_of,
    recompute_rows,
    swap_rows,
    tiny_llama,
    tiny_neox,
)
from tests.quick_cases import each_value_once

LAYERS = range(NUM_LAYERS)
WIDE_PRODUCT = 2 * TOKENS * HIDDEN * INNER
"""FLOPs of gate, up or down."""
PRODUCT = 2 * TOKENS * HIDDEN * HIDDEN
"""FLOPs of q or of the output projection; k and v are half of it each."""

Form = tuple[MemoryPlan | str, Callable[[torch.dtype], Again]]


def keep(root: str, *paths: str) -> MemoryPlan:
    rows = [PlanRow(index, path, "keep") for index in LAYERS for path in paths]
    return plan_of(*recompute_rows([root], LAYERS), *rows)


def swap(root: str, *paths: str) -> MemoryPlan:
    return plan_of(*recompute_rows([root], LAYERS), *swap_rows(paths, LAYERS, 5))


def exclude(text: str) -> str:
    return f"recompute_config: {{{text}}}\n"


def less(again: Again, flops: int = 0, held_bytes: int = 0, **calls: int) -> Again:
    """``again`` without these FLOPs and calls, in every layer, and with these bytes held."""
    return again + Again(-held_bytes, {name: -count for name, count in calls.items()}, -flops)


def mlp_but_gate(dtype: torch.dtype) -> Again:
    return less(mlp(dtype), WIDE_PRODUCT, dtype.itemsize * WIDE, mm=1) * 4


def attention_but_q(dtype: torch.dtype) -> Again:
    """Autograd saves q after its rotation: the projection's own result is held for this alone."""
    return held_arguments(less(attention(dtype), PRODUCT, dtype.itemsize * ROW, mm=1) * 4)


def attention_but_core(dtype: torch.dtype) -> Again:
    core = dtype.itemsize * ROW + 4 * 4 * TOKENS
    return held_arguments(less(attention(dtype), 0, core, **{SDPA: 1}) * 4)


def layer_but_mlp(dtype: torch.dtype) -> Again:
    """Its input is the region's; its result nobody needs: what follows saves nothing."""
    inside = mlp(dtype)
    return held_arguments(less(layer(dtype), inside.flops, inside.freed_bytes, **inside.calls) * 4)


def layer_but_attention(dtype: torch.dtype) -> Again:
    """q, k, v, the core and its projection stay, whose result is held: the sum after it is rebuilt."""
    inside = attention(dtype)
    held = inside.freed_bytes + dtype.itemsize * ROW
    calls = {**inside.calls, "mm": inside.calls["mm"] + 1}
    return held_arguments(less(layer(dtype), inside.flops + PRODUCT, held, **calls) * 4)


def swapped(of: Callable[[torch.dtype], Again], held: Callable[[torch.dtype], int]) -> Any:
    """As kept, but what is held moves instead."""

    def moved(dtype: torch.dtype) -> Again:
        kept = of(dtype)
        return kept + Again(4 * held(dtype), {"copy_": 2 * 4})

    return moved


FORMS: dict[str, Form] = {
    "up excluded": (
        exclude("select_recompute: {feed_forward: true}, select_recompute_exclude: ['feed_forward.w3']"),
        mlp_but_gate,
    ),
    "gate kept": (keep("mlp", "mlp.gate_proj"), mlp_but_gate),
    "gate's function kept": (keep("mlp", "mlp.gate_proj.linear"), mlp_but_gate),
    "gate swapped": (
        swap("mlp", "mlp.gate_proj"),
        swapped(mlp_but_gate, lambda dtype: dtype.itemsize * WIDE),
    ),
    "q excluded": (
        exclude("select_recompute: {attention: true}, select_recompute_exclude: {'attention.wq': true}"),
        attention_but_q,
    ),
    "q swapped": (
        swap("self_attn", "self_attn.q_proj"),
        swapped(attention_but_q, lambda dtype: dtype.itemsize * ROW),
    ),
    "core excluded": (
        exclude(
            "select_recompute: {attention: true}, "
            r"select_recompute_exclude: {'attention\.flash_attention': true}"
        ),
        attention_but_core,
    ),
    "mlp excluded from the layer": (
        exclude("recompute: true, select_recompute_exclude: ['feed_forward']"),
        layer_but_mlp,
    ),
    "attention excluded from the layer": (
        exclude("recompute: true, select_recompute_exclude: ['attention']"),
        layer_but_attention,
    ),
}


@each_value_once
@DTYPES
@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_the_modules_own_does_not_run_again(name: str, dtype: torch.dtype) -> None:
    plan, expected = FORMS[name]
    again, _ = difference(lambda: tiny_llama(dtype), plan, bare_llama(dtype))
    wanted = expected(dtype)
    calls = {name: count for name, count in wanted.calls.items() if count}
    moved = calls.pop("copy_", 0)
    if moved:
        again.calls.pop("copy_", None)
    assert again == Again(wanted.freed_bytes, calls, wanted.flops)


def test_between_the_functions_of_one_op_nothing_is_held() -> None:
    """Of eager attention's core autograd saves two tensors of the scores' size and two of its output's."""

    def make() -> nn.Module:
        return tiny_neox(attn_implementation="eager", use_cache=False)

    whole, _ = difference(make, plan_of(*recompute_rows(["attention"], [1])))
    kept, adjustments = difference(
        make, plan_of(*recompute_rows(["attention"], [1]), PlanRow(1, "attention.flash_attention", "keep"))
    )
    products = 2 * BATCH * LENGTH * LENGTH * HIDDEN
    assert whole.flops - kept.flops == products + (products if "bmm" in whole.calls else 0)
    assert "bmm" not in kept.calls
    assert "_softmax" not in kept.calls
    assert whole.freed_bytes - kept.freed_bytes <= 3 * 4 * SCORES + 2 * 4 * ROW
    assert adjustments == []


def test_what_is_held_although_autograd_would_not_save_it_is_an_adjustment() -> None:
    _, adjustments = difference(tiny_llama, keep("self_attn", "self_attn.q_proj"))
    _, none = difference(tiny_llama, keep("mlp", "mlp.gate_proj", "mlp.act_fn", "mlp.mul"))
    assert adjustments == [
        "recompute_config.select_recompute_exclude self_attn.q_proj, layers 0-3: asked keep, got keep: its "
        f"result, {4 * ROW:,} bytes in a layer, is held although autograd would not save it, so that the op "
        "is not run again with the module around it"
    ]
    assert none == []


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        (keep("self_attn", "self_attn.q_proj"), "recompute_config.select_recompute_exclude"),
        (plan_of(*recompute_rows(["input_layernorm.rsqrt"], LAYERS)), "recompute_config.select_recompute"),
    ],
)
def test_settling_a_settled_plan_changes_nothing(plan: MemoryPlan, asked: str) -> None:
    """A model that moves to another device has another first forward."""
    model, ids = tiny_llama(BF16), batch(0)
    shape = model_structure(model)
    saved = record_saved(model, shape, (), {"input_ids": ids, "labels": ids})
    once = settled(plan, shape, saved)
    assert [item.where for item in once.adjustments] == [asked]
    assert settled(once, shape, saved) is once


@each_value_once
@pytest.mark.parametrize(
    "plan",
    [
        swap("self_attn", "self_attn.q_proj"),
        swap("self_attn", "self_attn.q_proj", "self_attn.flash_attention"),
        swap("", "self_attn", "mlp.down_proj"),
        swap("", "self_attn.o_proj", "mlp.gate_proj", "post_attention_layernorm"),
    ],
    ids=["q", "q and core", "attention", "several"],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_results_that_move_are_predicted(plan: MemoryPlan, attention: str) -> None:
    model = tiny_llama(attn_implementation=attention, use_cache=False)
    ids = batch(0)
    saved = record_saved(model, model_structure(model), (), {"input_ids": ids, "labels": ids})
    assert swapped_bytes(saved, plan) == held_bytes(plan, model)[1] > 0


@pytest.mark.parametrize(
    "name", ["gate kept", "q swapped", "core excluded", "attention excluded from the layer"]
)
def test_a_second_and_a_partial_backward(name: str) -> None:
    assert_backwards_in_parts(FORMS[name][0], "model.layers.2.self_attn.q_proj.weight")


@each_value_once
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("path", ["post_attention_dropout", "attention", "mlp", "attention.flash_attention"])
def test_random_numbers_after_it_are_drawn_alike(path: str, dtype: torch.dtype) -> None:
    """The op does not draw again; what comes after it must find the generator as in forward."""
    found = []
    for plan in (None, plan_of(*recompute_rows([""], LAYERS), *[PlanRow(i, path, "keep") for i in LAYERS])):
        model = tiny_neox(dtype, attn_implementation="eager")
        on(model, plan, verify=False)
        torch.manual_seed(5)
        found.append({**gradients_of_step(model), "random state": torch.get_rng_state()})
    assert_bitwise_equal(found[1], found[0])


def test_under_autocast() -> None:
    found = []
    for plan in (None, keep("", "mlp.gate_proj", "self_attn.q_proj", "input_layernorm")):
        model = tiny_llama()
        on(model, plan, verify=False)
        with torch.autocast("cpu", BF16):
            loss = forward(model)
        loss.backward()
        found.append(gradients(model))
    assert_bitwise_equal(found[1], found[0])


class _Written(nn.Module):
    """Writes into what a kept op inside it returned."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner, self.mlp = nn.Linear(32, 32), mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed = self.inner(hidden)
        changed += 1
        return self.mlp(changed.sin())


def written() -> nn.Module:
    model = tiny_llama()
    torch.manual_seed(8)
    for index in LAYERS:
        model.model.layers[index].mlp = _Written(model.model.layers[index].mlp)
    return model


@pytest.mark.parametrize("fate", ["keep", "swap"])
def test_a_result_that_was_written_since_is_made_again(fate: str) -> None:
    expected = gradients_of_step(written())
    model = written()
    plan = (keep if fate == "keep" else swap)("mlp", "mlp.inner")
    with apply(model, plan):
        assert_bitwise_equal(gradients_of_step(model), expected)
        assert_bitwise_equal(gradients_of_step(model, 0), expected)


class _Square(torch.autograd.Function):
    """A custom function, which no function mode sees."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        _Square.runs += not isinstance(hidden, torch._subclasses.FakeTensor)
        ctx.save_for_backward(hidden)
        return hidden * hidden

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (hidden,) = ctx.saved_tensors
        return 2 * hidden * grad


class _Squared(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Square.apply(hidden)


class _WithSquare(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.square, self.mlp = _Squared(), mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.square(hidden.sin()).cos())


def with_square() -> nn.Module:
    model = tiny_llama()
    for index in LAYERS:
        model.model.layers[index].mlp = _WithSquare(model.model.layers[index].mlp)
    return model


def test_a_kept_module_of_custom_functions_does_not_run_and_its_input_is_rebuilt() -> None:
    expected = gradients_of_step(with_square())
    model = with_square()
    with apply(model, keep("mlp", "mlp.square")):
        _Square.runs = 0
        assert_bitwise_equal(gradients_of_step(model), expected)
        assert _Square.runs == NUM_LAYERS
    with apply(model, plan_of(*recompute_rows(["mlp"], LAYERS))):
        _Square.runs = 0
        assert_bitwise_equal(gradients_of_step(model), expected)
        assert _Square.runs == 2 * NUM_LAYERS


class _Asks(nn.Module):
    """Notes when its result is gone."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.results: list[StorageWeakRef] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.gate(hidden)
        if type(result) is torch.Tensor:
            self.results.append(StorageWeakRef(result.untyped_storage()))
        return result


def test_results_live_no_longer_than_what_is_rebuilt_from_them() -> None:
    """After the backward of the MLP its kept result is gone, while the layer's region still lives."""
    model = tiny_llama()
    mlp = model.model.layers[1].mlp
    mlp.gate_proj = asks = _Asks(mlp.gate_proj)
    plan = plan_of(*recompute_rows([""], [1]), PlanRow(1, "mlp.gate_proj", "keep"))
    alive: list[bool] = []
    norm = model.model.layers[1].input_layernorm
    with apply(model, plan):
        loss = forward(model)
        norm.weight.register_hook(lambda _: alive.append(not asks.results[-1].expired()))
        loss.backward()
        gc.collect()
    assert len(asks.results) == 1
    assert alive == [False]


def test_modules_are_as_before_after_a_backward_that_failed() -> None:
    model = tiny_llama()
    layer = model.model.layers[1]
    with apply(model, keep("mlp", "mlp.gate_proj")):
        calls: list[int] = []
        handle = layer.mlp.up_proj.register_forward_hook(lambda *_: _interrupt_second(calls))
        loss = forward(model)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        handle.remove()
        assert "forward" not in vars(layer.mlp.gate_proj)
        model.zero_grad()
        assert_bitwise_equal(gradients_of_step(model), gradients_of_step(tiny_llama()))


def _interrupt_second(calls: list[int]) -> None:
    calls.append(1)
    if len(calls) == 2:
        raise KeyboardInterrupt


class _Twice(nn.Module):
    """What a kept function returns is read by another call of it, and by others, before or after."""

    def __init__(self, mlp: nn.Module, order: str) -> None:
        super().__init__()
        self.mlp, self.order = mlp, order

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = torch.mul(hidden.sin(), 3)
        if self.order == "outside first":
            outside = first.cos()
            inside = torch.mul(first, 2)
        else:
            inside = torch.mul(first, 2)
            outside = first.cos()
        return self.mlp(inside.tanh() * outside.exp())


@each_value_once
@pytest.mark.parametrize("fate", [keep, swap])
@pytest.mark.parametrize("order", ["outside first", "inside first"])
def test_a_result_that_its_own_op_and_another_read(order: str, fate: Callable[..., MemoryPlan]) -> None:
    def make() -> nn.Module:
        model = tiny_llama()
        for index in LAYERS:
            model.model.layers[index].mlp = _Twice(model.model.layers[index].mlp, order)
        return model

    again, _ = difference(make, fate("mlp", "mlp.mul"))
    assert "mul" not in again.calls or again.calls["mul"] == NUM_LAYERS  # the product inside the MLP
