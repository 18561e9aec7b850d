"""Tells whether Hugging Face's own gradient checkpointing acts on a layer.

`GradientCheckpointingLayer` hands a layer's call to ``torch.utils.checkpoint`` if the layer's flag is set.
Such a layer saves nothing but its input, and a plan can swap that input.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib.metadata import version

from torch import nn

logger = logging.getLogger(__name__)


def checkpointing_argument() -> str:
    """Return the name of the training argument in the installed transformers, which 5.23 renamed."""
    release = tuple(int(part) for part in version("transformers").split(".")[:2])
    return "activation_checkpointing" if release >= (5, 23) else "gradient_checkpointing"


def without_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Switch gradient checkpointing off in all layers, for a planner that decides what is recomputed.

    A line is logged if it was on. The function that is returned switches it on again, where it was on.
    """
    on = [module for module in model.modules() if is_checkpointed(module)]
    if on:
        logger.info(
            "%s is off while the planner decides what is recomputed; it is on again after it.",
            checkpointing_argument(),
        )

    def switch(state: bool) -> None:
        for module in on:
            module.gradient_checkpointing = state  # type: ignore[assignment]

    switch(False)
    return functools.partial(switch, True)


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether gradient checkpointing is switched on for a layer; it acts while the layer trains."""
    return bool(getattr(layer, "gradient_checkpointing", False))


def can_be_checkpointed(module: nn.Module) -> bool:
    """Whether ``module`` is a layer for which gradient checkpointing can be switched on."""
    return hasattr(module, "gradient_checkpointing")


def checkpoints_its_call(layer: nn.Module) -> bool:
    """Whether the checkpoint includes the layer's hooks: it wraps ``__call__``, as in transformers 5.17."""
    return type(layer).__call__ is not nn.Module.__call__
