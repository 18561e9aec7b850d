"""Into the Hugging Face Trainer."""

from __future__ import annotations

from .callback import ActSwapCallback
from .training_args import ActSwapTrainingArguments

__all__ = ["ActSwapCallback", "ActSwapTrainingArguments"]
