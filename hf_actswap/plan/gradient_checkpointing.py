"""Tells whether Hugging Face's own gradient checkpointing acts on a layer.

`GradientCheckpointingLayer` hands a layer's call to ``torch.utils.checkpoint`` if the layer's flag is set.
Such a layer saves nothing but its input, and a plan can swap that input.
"""

from __future__ import annotations

from torch import nn


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether gradient checkpointing is switched on for a layer; it acts while the layer trains."""
    return bool(getattr(layer, "gradient_checkpointing", False))


def can_be_checkpointed(module: nn.Module) -> bool:
    """Whether ``module`` is a layer for which gradient checkpointing can be switched on."""
    return hasattr(module, "gradient_checkpointing")


def checkpoints_its_call(layer: nn.Module) -> bool:
    """Whether the checkpoint includes the layer's hooks: it wraps ``__call__``, as in transformers 5.17."""
    return type(layer).__call__ is not nn.Module.__call__
