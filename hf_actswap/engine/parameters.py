"""Which tensors are weights, in whatever guise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

_MOST_VIEWS = 4
"""A cast weight is saved as itself or as a transposed or reshaped view: a short chain."""


def inner_tensors(tensor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """The plain tensors that a parameter consists of: of DTensor, NF4, Float8, torchao's, the parts."""
    if tensor is None:
        return
    yield tensor
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # DTensor also names its device mesh
                yield from inner_tensors(part)


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter that autocast has cast, or a view of one.

    The cast lives as long as autocast's cache, whoever else holds it, so moving it frees nothing. It is known
    by its history: casts and views only, back to a parameter. (Of frozen parameters there is no history.)
    """
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        if node is not None and hasattr(node, "variable"):
            return isinstance(node.variable, nn.Parameter)
    return False
