"""The Trainer for models in parts. Importing this imports `transformers.Trainer`, which takes seconds.

Lets every Trainer of this process act on the environment variable ``HF_ACTSWAP``.

A script that one does not own has stock training arguments, which have no field for a plan. transformers
keeps the classes of the callbacks that every Trainer makes in one list; `act_on_environment` adds ours to it.
``hf-actswap run`` does so, and then runs the script.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer
from transformers import trainer as transformers_trainer
from transformers.trainer_callback import TrainerCallback
from transformers.training_args import TrainingArguments

from .callback import ActSwapCallback, ArgumentsCallback
from .trainer_mixin import ActSwapTrainerMixin

VARIABLE = "HF_ACTSWAP"
"""Holds what ``actswap`` of the training arguments would: ``auto``, a file, a Hub id, YAML or JSON."""

OFF = "off"
"""The value for no plan; an empty one means the same."""


class EnvironmentCallback(ArgumentsCallback):
    """Applies `VARIABLE`, unless the arguments say something themselves or a callback was given."""

    _named = VARIABLE

    def _asked_by(self, args: TrainingArguments) -> Any:
        asked = os.environ.get(VARIABLE)
        return None if asked == OFF else asked or None

    def _gives_way_to(self, other: TrainerCallback, args: TrainingArguments) -> bool:
        if isinstance(other, ArgumentsCallback):
            return getattr(args, "actswap", None) is not None
        return isinstance(other, ActSwapCallback)


def act_on_environment() -> None:
    """Let every Trainer that is made from now on apply what `VARIABLE` says. Safe to call again."""
    if EnvironmentCallback not in transformers_trainer.DEFAULT_CALLBACKS:
        transformers_trainer.DEFAULT_CALLBACKS.append(EnvironmentCallback)


class ActSwapTrainer(ActSwapTrainerMixin, Trainer):
    """`transformers.Trainer` for any configuration of ``actswap``, ``parallel_config`` included.

    The arguments are those of `transformers.Trainer`; `ActSwapTrainerMixin` says what differs.
    """
