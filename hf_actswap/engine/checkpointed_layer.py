"""Whole layers by ``torch.utils.checkpoint``, non-reentrant with early stop."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .around import Undo, replace_forward


def checkpointed(layer: nn.Module) -> Undo:
    """Put ``torch.utils.checkpoint`` around a layer's forward; return what takes it off again."""
    own_forward = layer.forward
    function = getattr(own_forward, "__func__", type(layer).forward)
    first = next(iter(inspect.signature(own_forward).parameters), "")

    def checkpointed_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = own_forward if module is layer else MethodType(function, module)  # of a copy
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not args and first in kwargs:  # saved-tensor hooks see only what is passed by position
            args = (kwargs.pop(first),)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return replace_forward(layer, MethodType(checkpointed_forward, layer))
