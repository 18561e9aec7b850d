"""Fused recomputation: fewer kernels, the same tensors held, gradients equal but for the last bit."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hf_actswap import apply
from hf_actswap.engine import AppliedPlan
from hf_actswap.plan.model_structure import model_structure
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    forward,
    gradients,
    gradients_of_step,
    tiny_llama,
)
from tests.quick_cases import each_value_once

MODULES = ["attention_norm", "ffn_norm", r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"]
LAYER_KERNELS = 2
"""Both norms trace to the same code; silu and the product after it are one chain."""

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def elementwise_ops(dtype: torch.dtype = torch.float32) -> list[str]:
    """All functions of a layer but matrix products, attention and the sums that later layers read."""
    ops = [op.path for op in model_structure(tiny_llama(dtype)).layers[0].ops if op.kind == "function"]
    return [
        path
        for path in ops
        if not path.endswith(("linear", "flash_attention")) and path != "add" and "self_attn" not in path
    ]


def config(names: list[str], fused: bool = True) -> dict[str, object]:
    return {"recompute_config": {"select_recompute": {name: True for name in names}, "fused": fused}}


def steps(model: nn.Module, count: int = 3) -> list[dict[str, torch.Tensor]]:
    return [gradients_of_step(model, step) for step in range(count)]


def fuser_of(applied: AppliedPlan) -> object:
    setting = applied._engine.runtime.setting
    return setting.fuse.__self__  # type: ignore[attr-defined]


@each_value_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["modules and ops", "ops"])
def test_gradients_are_as_near_as_the_last_bit(form: str, dtype: torch.dtype) -> None:
    names = elementwise_ops(dtype) if form == "ops" else MODULES
    bare = steps(tiny_llama(dtype))
    model = tiny_llama(dtype)
    with apply(model, config(names)) as applied:
        for found, expected in zip(steps(model), bare, strict=True):
            for name, gradient in found.items():
                scale = expected[name].abs().max()
                error = (gradient - expected[name]).abs().max()
                assert error <= scale * 4 * torch.finfo(dtype).eps, name
        fuser = fuser_of(applied)
        assert 0 < len(fuser._by_code) <= LAYER_KERNELS + 1  # type: ignore[attr-defined]
        assert fuser.runs == 3 * NUM_LAYERS * 3  # type: ignore[attr-defined]


def test_off_unless_asked_for() -> None:
    bare = steps(tiny_llama())
    model = tiny_llama()
    with apply(model, config(MODULES, fused=False)) as applied:
        for found, expected in zip(steps(model), bare, strict=True):
            assert_bitwise_equal(found, expected)
        setting = applied._engine.runtime.setting
        assert setting.fuse is None


def test_what_cannot_be_fused_is_run_as_it_ran(caplog: pytest.LogCaptureFixture) -> None:
    """A module with matrix products: bitwise equal, and a line says so once for each."""
    bare = steps(tiny_llama())
    model = tiny_llama()
    with caplog.at_level(logging.INFO, "hf_actswap"), apply(model, config(["feed_forward"])):
        for found, expected in zip(steps(model), bare, strict=True):
            assert_bitwise_equal(found, expected)
    lines = [line for line in caplog.messages if "is run again op by op" in line]
    assert len(lines) == NUM_LAYERS
    assert "no pointwise op" in lines[0]


def test_two_backwards_over_one_graph() -> None:
    model = tiny_llama()
    bare = steps(model, 1)[0]
    with apply(model, config(elementwise_ops())):
        model.zero_grad()
        loss = forward(model)
        loss.backward(retain_graph=True)
        loss.backward()
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, bare[name] * 2, rtol=1e-4, atol=1e-6)


def test_other_shapes_compile_anew_and_weights_are_read_anew() -> None:
    model = tiny_llama()
    with apply(model, config(MODULES)):
        steps(model, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        ids = batch(0)[:1, :7]
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found = gradients(model)
    other = tiny_llama()
    other.load_state_dict(model.state_dict())
    other(input_ids=ids, labels=ids).loss.backward()
    for name, gradient in gradients(other).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
