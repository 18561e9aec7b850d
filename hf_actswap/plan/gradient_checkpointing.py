"""Hugging Face's own gradient checkpointing, as it shows on a layer.

`GradientCheckpointingLayer` hands a layer's call to ``torch.utils.checkpoint`` where its flag is set. Of such
a layer nothing but the input is saved, and that a plan can swap.
"""

from __future__ import annotations

from torch import nn


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether gradient checkpointing is switched on for a layer; it acts while the layer trains."""
    return bool(getattr(layer, "gradient_checkpointing", False))


def can_be_checkpointed(module: nn.Module) -> bool:
    """Whether it is one of the layers that gradient checkpointing can run again."""
    return hasattr(module, "gradient_checkpointing")


def checkpoints_its_call(layer: nn.Module) -> bool:
    """Whether the checkpoint goes around hooks too, as in transformers 5.17, where it wraps ``__call__``."""
    return type(layer).__call__ is not nn.Module.__call__
