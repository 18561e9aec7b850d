"""Identity whose gradient is multiplied: for a reader that every rank runs alike, among some that differ."""

from __future__ import annotations

from typing import Any

import torch


def with_scaled_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``tensor``; in backward its gradient is multiplied by ``factor``."""
    result: torch.Tensor = _ScaleGradient.apply(tensor, factor)
    return result


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None
