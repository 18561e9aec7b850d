"""Quantised base weights under LoRA: packed weights stay, activations move, gradients are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan
from tests.engine.pitfalls.odd_layers import same_gradients
from tests.engine.spies import WatchingTransfer
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    on,
    one_step,
    plan_of,
    plans,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.quick_cases import each_value_once

BLOCK = 16


class _PackedProduct(torch.autograd.Function):
    """x times a packed weight, dequantised in forward and again in backward, as bitsandbytes does.

    Shapes: x (..., in); packed (out * in / 2, 1), two codes to a byte; absmax (out * in / 16,).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(packed.t(), absmax)
        ctx.shape = shape
        return x @ _dequantised(packed, absmax, shape).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        packed, absmax = ctx.saved_tensors
        return grad @ _dequantised(packed.t(), absmax, ctx.shape), None, None, None


def _dequantised(packed: torch.Tensor, absmax: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten().float()
    return ((codes / 7.5 - 1).unflatten(0, (-1, BLOCK)) * absmax.unsqueeze(1)).reshape(shape)


class PackedLinear(nn.Module):
    """A frozen linear whose weight is 4-bit codes in a uint8 parameter, with a scale for 16 of them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        blocks = linear.weight.detach().reshape(-1, BLOCK)
        absmax = blocks.abs().amax(dim=1)
        codes = ((blocks / absmax.unsqueeze(1) + 1) * 7.5).round().to(torch.uint8).reshape(-1, 2)
        self.weight = nn.Parameter((codes[:, :1] << 4) | codes[:, 1:], requires_grad=False)
        self.register_buffer("absmax", absmax)
        self.shape = tuple(linear.weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _PackedProduct.apply(x, self.weight, self.absmax, self.shape)


class LoraLinear(nn.Module):
    """A base linear and a trained product of rank 4 beside it."""

    def __init__(self, base: nn.Module, features_in: int, features_out: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(features_in, 4, bias=False)
        self.lora_B = nn.Linear(4, features_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        return result + 2.0 * self.lora_B(self.lora_A(x))


def _with_bitsandbytes(four_bits: bool) -> Callable[[nn.Linear], nn.Module]:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def replace(linear: nn.Linear) -> nn.Module:
        sizes = (linear.in_features, linear.out_features)
        if four_bits:
            new = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        else:
            new = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        new.load_state_dict(linear.state_dict(), strict=False)
        return new.to("cpu").requires_grad_(False)

    return replace


def _with_torchao(linear: nn.Linear) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    return linear.requires_grad_(False)


KINDS: dict[str, Callable[[], Callable[[nn.Linear], nn.Module]]] = {
    "custom function": lambda: PackedLinear,
    "bitsandbytes 4 bits": lambda: _with_bitsandbytes(True),
    "bitsandbytes 8 bits": lambda: _with_bitsandbytes(False),
    "torchao int8": lambda: _with_torchao,
}


def quantised_llama(kind: str) -> nn.Module:
    """Return a tiny Llama, frozen, whose layers' linears are quantised and have LoRA factors beside them."""
    model = tiny_llama(hidden_size=64, intermediate_size=64).requires_grad_(False)
    quantise = KINDS[kind]()
    torch.manual_seed(6)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    sizes = (linear.in_features, linear.out_features)
                    setattr(parent, name, LoraLinear(quantise(linear), *sizes))
    return model


def frozen_tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors that belong to a module's weights: parameters, buffers, and what hangs on either."""
    if isinstance(value, nn.Module):
        for child in (*value.parameters(), *value.buffers()):
            yield from frozen_tensors(child)
    elif hasattr(value, "__tensor_flatten__"):  # a subclass that wraps the tensors with the data
        for name in value.__tensor_flatten__()[0]:
            yield getattr(value, name)
    elif isinstance(value, torch.Tensor):
        yield value
        for item in vars(value).values():
            if isinstance(item, torch.Tensor):
                yield item
            elif hasattr(item, "absmax"):  # the quantisation state of bitsandbytes
                yield from (tensor for tensor in vars(item).values() if isinstance(tensor, torch.Tensor))


PLANS: dict[str, MemoryPlan | str] = {
    **plans("everything swapped", "fetched on use", "mlp recomputed"),
    "ops": plan_of(*swap_rows(["self_attn", "mlp"], range(NUM_LAYERS), 5)),
    "case_4": CASES["case_4"],
}


@each_value_once
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_factors_are_the_same(kind: str, plan: MemoryPlan | str) -> None:
    """Catches packed data that comes back as something else, and weights unpacked from a freed block."""
    stats = same_gradients(lambda: quantised_llama(kind), plan)
    assert stats.offloads > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_and_their_scales_stay(kind: str) -> None:
    """Catches weights recognised by ``requires_grad`` or by class: these are frozen, integer, or wrapped."""
    model, transfer = quantised_llama(kind), WatchingTransfer(hold=True)
    on(model, swap_everything(5), transfer)
    one_step(model)
    frozen = {tensor.untyped_storage().data_ptr() for tensor in frozen_tensors(model)}
    moved = {source.untyped_storage().data_ptr() for source in transfer.held}
    assert len(moved) > 10 * NUM_LAYERS
    assert not frozen & moved
