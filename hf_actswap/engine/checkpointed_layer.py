"""Whole layers by ``torch.utils.checkpoint``, non-reentrant with early stop."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .around import Undo, replace_forward


def checkpointed(layer: nn.Module) -> Undo:
    """Put ``torch.utils.checkpoint`` around a layer's forward; return what takes it off again."""
    forward = layer.forward
    first = next(iter(inspect.signature(forward).parameters), "")

    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not args and first in kwargs:  # saved-tensor hooks see only what is passed by position
            args = (kwargs.pop(first),)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return replace_forward(layer, checkpointed_forward)
