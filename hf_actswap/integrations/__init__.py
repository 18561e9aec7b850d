"""Into the Hugging Face Trainer, and into loops of Accelerate's."""

from __future__ import annotations

from .callback import ActSwapCallback
from .prepare import Prepared, prepare
from .trainer_mixin import ActSwapTrainerMixin
from .training_args import ActSwapTrainingArguments

__all__ = ["ActSwapCallback", "ActSwapTrainerMixin", "ActSwapTrainingArguments", "Prepared", "prepare"]
