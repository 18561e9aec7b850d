"""On the rehearsal's device (`make rehearse`): bitsandbytes gives there what it gives on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

bitsandbytes = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.rehearsal

DEVICES = ("cpu", "cuda")


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def product(device: str, tokens: int, double: bool) -> list[torch.Tensor]:
    """A product with a 4-bit weight, forward and backward; the packed weight."""
    linear = bitsandbytes.nn.Linear4bit(
        256, 128, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double, quant_type="nf4"
    )
    linear.weight.data = rand(128, 256).bfloat16()
    linear = linear.to(device)
    given = rand(tokens, 256).bfloat16().to(device).requires_grad_()
    result = linear(given)
    result.backward(rand(tokens, 128).bfloat16().to(device))
    assert given.grad is not None
    return [linear.weight.data.cpu(), result.detach().cpu(), given.grad.cpu()]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("tokens", [4, 2048])
def test_a_four_bit_layer(tokens: int, double: bool) -> None:
    """Few tokens: a kernel of its own. Many: the weight is made in half precision, PyTorch multiplies."""
    (packed, *values), (other, *others) = (product(device, tokens, double) for device in DEVICES)
    assert torch.equal(packed, other)
    for value, found in zip(values, others, strict=True):
        torch.testing.assert_close(value, found, rtol=2e-2, atol=2e-2 * value.abs().max().item())


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit"])
def test_an_optimizer(name: str) -> None:
    found: list[torch.Tensor] = []
    for device in DEVICES:
        weight = nn.Parameter(rand(512, 256).to(device))
        kind = name if device == "cuda" else name.removeprefix("Paged")
        optimizer: Any = getattr(bitsandbytes.optim, kind)([weight], lr=1e-2)
        for step in range(3):
            weight.grad = rand(512, 256 + step)[:, :256].contiguous().to(device)
            optimizer.step()
        found.append(weight.detach().cpu())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
