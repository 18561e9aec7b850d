"""Multiplies the rows of tokens with the weights of their experts, and saves no rows of full width.

A token is read by ``k`` experts, so there are ``R = T k`` rows, sorted by expert: each expert's lie together.
Ordinary autograd would save three tensors of full width: the input ``[T, H]``, its rows ``[R, H]`` for the
first weight's gradient, and the second product's rows ``[R, H]`` for the routing weights' gradient. Here::

    shard --[column_input]--> [T, H] --[routed_product]--> [R, 2I/tp] --gate--> h [R, I/tp]
                                                                                 |
                             [T, H] <--[combined_product: sum_k W_down (w h)]----+-- routing weights w [T, k]

- The rows of the input are not saved, only their indices. In backward the input's node gathers the input
  again, once for all its readers, and computes the first weight's gradient from its rows (`column_input`).
- The routing weight is multiplied before the second product, with the same result:
  ``w (W_down h) = W_down (w h)``. Its gradient is then ``<W_down^T dy, h>``, without ``W_down h``.

Saved are a tensor ``[R, I/tp]`` and indices. Rows of full width exist only while a product runs.

The products of all experts are one kernel (``torch.nn.functional.grouped_mm``), or one product for each, for
which the host must know how many rows each has.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from .column_input import input_node_of, pass_output_gradient

_KERNEL_ALIGNMENT_BYTES = 16
"""``grouped_mm`` raises unless the size of each row of its matrices is a multiple of this."""
_KERNEL_CAPABILITY = (8, 0)
"""CUDA devices below it have no ``grouped_mm``; transformers has the same condition."""


class Routing(NamedTuple):
    """The rows of all experts, sorted by expert.

    Args:
        order: index of each sorted row in the flattened ``[T, k]``, shape ``[R]``.
        ends: for each expert the index after its last row, ``[E]``, int32.
    """

    order: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> Routing:
        """Return the routing for the experts ``[T, k]`` of each token, numbers below ``count``."""
        found, order = experts.reshape(-1).sort(stable=True)
        places = torch.arange(count, device=experts.device, dtype=found.dtype)
        return cls(order, torch.searchsorted(found, places, right=True, out_int32=True))

    def experts(self, rows: int) -> torch.Tensor:
        """Return the expert of each sorted row, ``[rows]``."""
        places = torch.arange(rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, places, right=True)


class ProductSettings(NamedTuple):
    """How products are computed.

    Args:
        dtype: dtype of the products.
        one_kernel: whether one kernel computes all experts, if it takes the shapes; else one after the other.
        transposed: whether weights are ``[E, in, out]``; else they are ``[E, out, in]``.
    """

    dtype: torch.dtype
    one_kernel: bool
    transposed: bool = False

    def matrices(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as ``[E, in, out]``."""
        return weight if self.transposed else weight.transpose(1, 2)


def routed_product(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, settings: ProductSettings
) -> torch.Tensor:
    """Multiply each token with the weights of its experts; a function that a ``TorchFunctionMode`` sees.

    Args:
        x: ``[T, H]``. If it was made by `column_input` with ``weight``, it is not saved; else it is held.
        weight: ``[E, N, H]``, or transposed.
        routing: routing of the tokens.
        settings: dtype, kernel and layout of the weight.

    Returns:
        ``[R, N]``, sorted by expert.
    """
    if has_torch_function((x, weight)):
        result: torch.Tensor = handle_torch_function(
            routed_product, (x, weight), x, weight, routing, settings
        )
        return result
    behind = input_node_of(x, weight)
    given = weight if behind is None else weight.detach()
    product: torch.Tensor = _RoutedProduct.apply(x, given, *routing, (behind, settings))
    return product


def combined_product(
    rows: torch.Tensor,
    weights: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    settings: ProductSettings,
) -> torch.Tensor:
    """Multiply rows with their experts' weights, and add up each token's products by its routing weights.

    A ``TorchFunctionMode`` sees this function.

    Args:
        rows: ``[R, I]``, sorted by expert.
        weights: routing weights ``[T, k]``.
        weight: ``[E, H, I]``, or transposed.
        routing: routing of the tokens.
        settings: dtype, kernel and layout of the weight.

    Returns:
        ``[T, H]``, in the dtype of the settings.
    """
    if has_torch_function((rows, weights, weight)):
        result: torch.Tensor = handle_torch_function(
            combined_product, (rows, weights, weight), rows, weights, weight, routing, settings
        )
        return result
    product: torch.Tensor = _CombinedProduct.apply(rows, weights, weight, *routing, settings)
    return product


class _RoutedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        order: torch.Tensor,
        ends: torch.Tensor,
        about: tuple[tuple[Any, int] | None, ProductSettings],
    ) -> torch.Tensor:
        ctx.behind, ctx.settings = about  # autograd's graph has this edge too, so no cycle
        ctx.x, ctx.version, ctx.shape, ctx.x_dtype = None, x._version, x.shape, x.dtype
        if ctx.behind is None and ctx.needs_input_grad[1]:
            ctx.x = x.detach()  # recomputed after the gather: ``x`` exists only during that
        ctx.save_for_backward(weight, order, ends)
        return _multiplied(_rows(x, order), ctx.settings.matrices(weight), ends, ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradient.contiguous()
        weight, order, ends = ctx.saved_tensors
        dw, needs_x = None, ctx.needs_input_grad[0]
        product = partial(_gradient_of_routed, order=order, ends=ends, settings=ctx.settings)
        if ctx.behind is not None:
            node, number = ctx.behind
            pass_output_gradient(node, number, gradient, product)
            needs_x = node.needs_input_grad[0]
        elif ctx.x is not None:
            if ctx.x._version != ctx.version:
                raise RuntimeError("the input of routed experts was modified in place")
            dw = product(gradient, ctx.x).to(weight.dtype)
        dx = None
        if needs_x:
            backwards = ctx.settings.matrices(weight).transpose(1, 2)
            dx = _combined(_multiplied(gradient, backwards, ends, ctx.settings), order, ctx.shape[0])
        return None if dx is None else dx.to(ctx.x_dtype), dw, None, None, None


class _CombinedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        weight: torch.Tensor,
        order: torch.Tensor,
        ends: torch.Tensor,
        settings: ProductSettings,
    ) -> torch.Tensor:
        ctx.settings = settings
        needs_rows, needs_weights, needs_weight = ctx.needs_input_grad[:3]
        ctx.save_for_backward(
            rows if needs_weights or needs_weight else None,
            weights if needs_rows or needs_weight else None,
            weight if needs_rows or needs_weights else None,
            order,
            ends,
        )
        ctx.rows_dtype, ctx.weights_dtype, ctx.weight_dtype = rows.dtype, weights.dtype, weight.dtype
        weighted = rows * _of_rows(weights, order)
        products = _multiplied(weighted, settings.matrices(weight), ends, settings)
        return _combined(products, order, weights.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, weight, order, ends = ctx.saved_tensors
        needs_rows, needs_weights, needs_weight = ctx.needs_input_grad[:3]
        routed = _rows(gradient, order).to(ctx.settings.dtype)
        d_rows = d_weights = d_weight = None
        if needs_rows or needs_weights:
            backwards = ctx.settings.matrices(weight).transpose(1, 2)
            d_weighted = _multiplied(routed, backwards, ends, ctx.settings)
            if needs_weights:
                wide = torch.promote_types(rows.dtype, torch.float32)
                inner = torch.linalg.vecdot(d_weighted.to(wide), rows.to(wide))
                d_weights = torch.empty_like(inner)
                d_weights[order] = inner
                d_weights = d_weights.view(gradient.shape[0], -1).to(ctx.weights_dtype)
            if needs_rows:
                d_rows = (d_weighted * _of_rows(weights, order)).to(ctx.rows_dtype)
        if needs_weight:
            weighted = rows * _of_rows(weights, order)
            d_weight = _weight_gradient(routed, weighted, ends, ctx.settings).to(ctx.weight_dtype)
        return d_rows, d_weights, d_weight, None, None, None


def _gradient_of_routed(
    gradient: torch.Tensor,
    x: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    settings: ProductSettings,
) -> torch.Tensor:
    """Return the weights' gradient ``[E, N, H]`` (or its transpose) from ``[R, N]`` and ``[T, H]``."""
    return _weight_gradient(gradient, _rows(x, order), ends, settings)


def _weight_gradient(
    gradient: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, settings: ProductSettings
) -> torch.Tensor:
    """Return each expert's weight gradient from output gradients ``[R, out]`` and inputs ``[R, in]``."""
    pair = (rows, gradient) if settings.transposed else (gradient, rows)
    return _outer(*pair, ends, settings)


def _rows(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the tokens' rows ``[R, H]`` of ``[T, H]``, sorted by expert."""
    return x[order // (order.numel() // x.shape[0])]


def _of_rows(weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the routing weights of rows, ``[R, 1]`` of ``[T, k]``."""
    return weights.reshape(-1)[order].unsqueeze(1)


def _combined(rows: torch.Tensor, order: torch.Tensor, tokens: int) -> torch.Tensor:
    """Add up the rows ``[R, H]`` of each token to ``[T, H]``; always in the same order."""
    unsorted = torch.empty_like(rows)
    unsorted[order] = rows
    return unsorted.view(tokens, -1, rows.shape[-1]).sum(1)


def _multiplied(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, settings: ProductSettings
) -> torch.Tensor:
    """Return the product ``[R, B]`` of rows ``[R, A]`` and their experts' matrices ``[E, A, B]``."""
    with torch.autocast(rows.device.type, enabled=False):
        rows, matrices = rows.to(settings.dtype), matrices.to(settings.dtype)
        if settings.one_kernel and _kernel_takes(rows, matrices.shape[1:]):
            return F.grouped_mm(rows, matrices, offs=ends)
        products = rows.new_empty((rows.shape[0], matrices.shape[2]))
        for expert, (begin, end) in enumerate(_ranges(ends)):
            torch.mm(rows[begin:end], matrices[expert], out=products[begin:end])
        return products


def _outer(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, settings: ProductSettings
) -> torch.Tensor:
    """Return each expert's sum of outer products of its rows: ``[E, A, B]`` of ``[R, A]`` and ``[R, B]``."""
    with torch.autocast(left.device.type, enabled=False):
        left, right = left.to(settings.dtype), right.to(settings.dtype)
        sizes = left.shape[1], right.shape[1]
        if settings.one_kernel and _kernel_takes(left, sizes):
            return F.grouped_mm(left.t(), right, offs=ends)
        products = left.new_zeros((len(ends), *sizes))
        for expert, (begin, end) in enumerate(_ranges(ends)):
            torch.mm(left[begin:end].t(), right[begin:end], out=products[expert])
        return products


def _ranges(ends: torch.Tensor) -> list[tuple[int, int]]:
    """Return where each expert's rows begin and end. The host waits for the device."""
    if isinstance(ends, FakeTensor):
        return []  # only shapes are asked for
    last: list[int] = ends.tolist()
    return list(zip([0, *last], last, strict=False))


def _kernel_takes(rows: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    if isinstance(rows, FakeTensor) or any(
        size * rows.element_size() % _KERNEL_ALIGNMENT_BYTES for size in sizes
    ):
        return False
    if rows.device.type == "cuda":
        return torch.cuda.get_device_capability(rows.device) >= _KERNEL_CAPABILITY
    return rows.device.type == "cpu"
