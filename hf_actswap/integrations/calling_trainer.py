"""What the Trainer does not hand to its callbacks: itself, and the model that it calls.

An event is given the bare model. Where ``torch_compile`` is on, or Accelerate has a dynamo backend, the
Trainer trains another object by the time of ``on_train_begin``:

======================= ==============================================================================
the whole model         ``model_wrapped`` is ``torch.compile``'s wrapper around the model, or around its
                        ``DistributedDataParallel``
regional compilation    ``model_wrapped`` is a shallow copy of the model with compiled modules in it: other
                        modules than those of the bare model, with the same parameters
neither                 ``model_wrapped`` is the model, or a wrapper around it
======================= ==============================================================================

Hooks on the bare model would be traced into the graph in the first case and never run in the second.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback

from ..plan.compiled import is_compiled


def calling_trainer(callback: TrainerCallback) -> Any:
    """Return the Trainer whose event is running, read off the call stack, or ``None``.

    The Trainer hands its events the model, the optimizer and the loaders, but not itself, and there is no
    event for an exception. The frame that raised the event is a method of the Trainer.
    """
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        handler = getattr(candidate, "callback_handler", None)
        if handler is not None and callback in handler.callbacks:
            return candidate
        frame = frame.f_back
    return None


def called_model(trainer: Any, model: nn.Module) -> nn.Module:
    """Return the model that ``trainer`` calls in training, if that is compiled; else ``model``.

    Args:
        trainer: in or after ``on_train_begin``; ``None``: not known.
        model: the one that the event was given.
    """
    wrapped = getattr(trainer, "model_wrapped", None)
    if isinstance(wrapped, nn.Module) and any(map(is_compiled, wrapped.modules())):
        return wrapped
    return model
