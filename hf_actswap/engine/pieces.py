"""Helpers to run a call piece by piece: calls with other parameters, and sums of gradients in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from ..plan.dry_run import exchanged

_PRODUCT_ROWS = 16_384
"""Most rows of a weight's gradient computed at once, so that there is no second fp32 copy of all of it."""


class Exchangeable:
    """A module whose parameters can be replaced by other tensors for one call.

    Args:
        module: the module that has the parameters.
        run: function that a call of the module runs.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.run = module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function with the parameters that the module has at present."""
        return self.run(*args, **kwargs)

    def with_parameters(self, named: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the function with tensors in place of the module's parameters, by the names in ``named``."""
        with exchanged(self.module, named):
            return self.run(*args, **kwargs)


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """Within the block a plan's hooks see no saved tensors: these live for one piece, or until backward."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a node's backward reject ``create_graph``: its second derivatives would miss the pieces' part.

    PyTorch's ``once_differentiable`` raises only where the incoming gradient requires a gradient, and that of
    a loss does not.

    Raises:
        RuntimeError: by the wrapped function, in a backward with ``create_graph=True``.
    """

    @wraps(backward)
    def checked(ctx: Any, *upstream: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: gradients of tiles and streamed sequences cannot be differentiated. "
                "Leave tile_config and stream_config out of this training."
            )
        return backward(ctx, *upstream)

    return checked


def zero_sum(like: torch.Tensor) -> torch.Tensor:
    """Return zeros for a sum of gradients, of the shape of ``like``, at least in fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return matrix products in at least fp32, without the rounding at the end of half-precision kernels.

    On fake tensors it calls the ops that an accelerator runs.

    Args:
        left, right: ``[.., m, n]`` and ``[.., n, p]``, with equal leading sizes.
    """
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if isinstance(left, FakeTensor) or (left.is_cuda and torch.version.hip is None):
        if left.dim() == 2:
            return torch.mm(left, right, out_dtype=torch.float32)
        made = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32)
        return made.unflatten(0, left.shape[:-2])
    return left.float() @ right.float()


def add_product(total: torch.Tensor, of_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add a linear layer's weight gradient to ``total``, ``[V, H]``.

    It is computed from the gradient of the layer's outputs ``[C, V]`` and from its inputs ``[C, H]``.
    """
    for first in range(0, len(total), _PRODUCT_ROWS):
        some = slice(first, first + _PRODUCT_ROWS)
        total[some].add_(product(of_logits[:, some].t(), hidden))  # `+=` would call `copy_` as well
