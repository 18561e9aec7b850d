"""Recognises weights, also as parts of tensor subclasses or as casts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..plan.record import is_cast_of_parameter

__all__ = ["inner_tensors", "is_cast_of_parameter", "parameter_places"]


def inner_tensors(tensor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield a parameter, and the plain tensors inside it (DTensor, NF4, Float8, torchao's subclasses)."""
    if tensor is None:
        return
    yield tensor
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # DTensor also names its device mesh
                yield from inner_tensors(part)


def parameter_places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the module and the name of each parameter, in the model's order."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name
