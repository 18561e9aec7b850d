"""What the callback finds out about a Trainer and its arguments, and what it changes in them for a while."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import TrainingArguments

from ..plan.compiled import is_compiled

CHECKPOINT_PLAN = "actswap_plan.json"
"""The plan of a planner in a checkpoint's folder, as a plan file."""


def checkpoint_plan(asked: str | bool | None, output_dir: str | None) -> str | None:
    """Return the path of the plan in the checkpoint from which a training goes on; ``None``: it begins."""
    folder = get_last_checkpoint(output_dir) if asked is True and output_dir else asked
    return os.path.join(folder, CHECKPOINT_PLAN) if isinstance(folder, str) else None


def without_checkpointing_argument(args: TrainingArguments) -> Callable[[], None]:
    """Switch gradient checkpointing off in the arguments too, which trainers read; return what undoes it.

    TRL's trainers switch it on again after they have generated, if the arguments say so.
    """
    on = [
        name for name in ("activation_checkpointing", "gradient_checkpointing") if getattr(args, name, False)
    ]

    def switch(state: bool) -> None:
        for name in on:
            setattr(args, name, state)

    switch(False)
    return functools.partial(switch, True)


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

    An event is given the bare model. Where ``torch_compile`` is on, or Accelerate has a dynamo backend, the
    Trainer trains another object by the time of ``on_train_begin``:

    ===================== ============================================================================
    the whole model       ``model_wrapped`` is ``torch.compile``'s wrapper around the model, or around
                          its ``DistributedDataParallel``
    regional compilation  ``model_wrapped`` is a shallow copy of the model with compiled modules in it:
                          other modules than those of the bare model, with the same parameters
    neither               ``model_wrapped`` is the model, or a wrapper around it
    ===================== ============================================================================

    Hooks on the bare model would be traced into the graph in the first case and never run in the second.

    Args:
        trainer: the Trainer, in or after ``on_train_begin``; ``None``: not known.
        model: the bare model that the event was given.
    """
    wrapped = getattr(trainer, "model_wrapped", None)
    if isinstance(wrapped, nn.Module) and any(map(is_compiled, wrapped.modules())):
        return wrapped
    return model
