"""Products of routed rows in one process, against the same in plain operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_actswap.parallel.routed_experts import ProductSettings, Routing, combined_product, routed_product

TOKENS, OF_A_TOKEN, EXPERTS = 7, 2, 5
SIZES = {"aligned": (8, 12), "unaligned": (5, 3)}
"""Hidden and inner; the kernel for all experts takes rows of a multiple of 16 bytes."""


def tensors(hidden: int, inner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return input, routing weights and the two weights."""
    generator = torch.Generator().manual_seed(2)
    shapes = (TOKENS, hidden), (TOKENS, OF_A_TOKEN), (EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


EXPERTS_OF_TOKENS = torch.tensor([[0, 1], [1, 4], [4, 1], [0, 4], [1, 0], [4, 0], [1, 4]])
"""Experts 2 and 3 have no tokens."""


def ours(x: Any, weights: Any, first: Any, second: Any, one_kernel: bool) -> torch.Tensor:
    routing = Routing.of(EXPERTS_OF_TOKENS, EXPERTS)
    settings = ProductSettings(x.dtype, one_kernel)
    gate, up = routed_product(x, first, routing, settings).chunk(2, -1)
    return combined_product(gate.sigmoid() * up, weights, second, routing, settings)


def plain(x: Any, weights: Any, first: Any, second: Any) -> torch.Tensor:
    total = torch.zeros_like(x)
    for place in range(OF_A_TOKEN):
        chosen = EXPERTS_OF_TOKENS[:, place]
        gate, up = torch.einsum("th,tnh->tn", x, first[chosen]).chunk(2, -1)
        out = torch.einsum("ti,thi->th", gate.sigmoid() * up, second[chosen])
        total = total + weights[:, place, None] * out
    return total


@pytest.mark.parametrize("one_kernel", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_and_gradients(sizes: str, one_kernel: bool) -> None:
    given = tensors(*SIZES[sizes], torch.float32)
    found, expected = ours(*given, one_kernel), plain(*given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    own = torch.autograd.grad(found, given, gradient)
    for name, a, b in zip(
        ("x", "weights", "first", "second"), own, torch.autograd.grad(expected, given, gradient), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    assert not own[2][2:4].any()  # experts without tokens


def test_gradients_by_differences() -> None:
    given = tensors(*SIZES["unaligned"], torch.float64)
    assert torch.autograd.gradcheck(lambda *each: ours(*each, False), given)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_what_is_frozen_gets_no_gradient(trained: tuple[int, ...]) -> None:
    given = tensors(*SIZES["aligned"], torch.float32)
    expected = torch.autograd.grad(plain(*given).sum(), [given[index] for index in trained])
    for index, tensor in enumerate(given):
        tensor.requires_grad_(index in trained)
    ours(*given, True).sum().backward()
    for index, tensor in enumerate(given):
        assert (tensor.grad is not None) is (index in trained)
    for index, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(given[index].grad, gradient, rtol=1e-4, atol=1e-5)


def test_no_row_of_full_width_is_saved() -> None:
    given = tensors(*SIZES["aligned"], torch.float32)
    saved: list[torch.Size] = []
    parameters = {tensor.data_ptr() for tensor in given[2:]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(*given, True)
    hidden, inner = SIZES["aligned"]
    rows = TOKENS * OF_A_TOKEN
    assert (rows, inner) in saved
    assert all(shape[-1:] != (hidden,) for shape in saved)


def test_a_held_input_must_stay_as_it_is() -> None:
    x, weights, first, second = tensors(*SIZES["aligned"], torch.float32)
    read = x.clone()
    found = ours(read, weights, first, second, True)
    with torch.no_grad():
        read.add_(1)
    with pytest.raises(RuntimeError, match="input of routed experts was modified in place"):
        found.sum().backward()
