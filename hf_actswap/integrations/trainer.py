"""The Trainer for models in parts. Importing this imports `transformers.Trainer`, which takes seconds."""

from __future__ import annotations

from transformers import Trainer

from .trainer_mixin import ActSwapTrainerMixin


class ActSwapTrainer(ActSwapTrainerMixin, Trainer):
    """`transformers.Trainer` for any configuration of ``actswap``, ``parallel_config`` included.

    The arguments are those of `transformers.Trainer`; `ActSwapTrainerMixin` says what differs.
    """
