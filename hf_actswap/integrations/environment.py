"""Lets every Trainer of a process act on the environment variable ``HF_ACTSWAP``.

A program that one does not own has stock training arguments, which have no field for a plan.
``hf-actswap run`` starts it so that `act_on_environment` runs in each of its processes
(``startup/sitecustomize.py``).

Every Trainer makes a `CallbackHandler` of its callbacks, whatever list they come from: there ours is added.
transformers' own list of callbacks for every Trainer is no such place: ms-swift replaces it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers.trainer_callback import CallbackHandler, TrainerCallback
from transformers.training_args import TrainingArguments

from ..run_environment import VARIABLE
from .callback import ActSwapCallback, ArgumentsCallback


class EnvironmentCallback(ArgumentsCallback):
    """Applies `VARIABLE`, unless the arguments say something themselves or a callback was given."""

    _named = VARIABLE

    def _asked_by(self, args: TrainingArguments) -> Any:
        return os.environ.get(VARIABLE) or None

    def _gives_way_to(self, other: TrainerCallback, args: TrainingArguments) -> bool:
        if isinstance(other, ArgumentsCallback):
            return getattr(args, "actswap", None) is not None
        return isinstance(other, ActSwapCallback)


def act_on_environment() -> None:
    """Let every Trainer that is made from now on apply what `VARIABLE` says. Safe to call again."""
    make: Any = CallbackHandler.__init__
    if hasattr(make, "adds_ours"):
        return

    @functools.wraps(make)
    def make_with_ours(self: Any, callbacks: Any, *others: Any, **more: Any) -> None:
        make(self, [*(callbacks or ()), EnvironmentCallback()], *others, **more)

    added: Any = make_with_ours
    added.adds_ours = True
    CallbackHandler.__init__ = added
