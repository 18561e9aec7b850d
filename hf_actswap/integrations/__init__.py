"""Brings plans and divided models into the Hugging Face Trainer and into Accelerate's loops.

In: training arguments with ``actswap`` (`ActSwapTrainingArguments`, `with_actswap`), a Trainer, or an
    accelerator (`prepare`).
Out: a training that has its plan on while it runs, with log lines, checkpoints and a record (`run_record`).

`callback` applies and removes, `trainer_mixin` and `parallel_training` train models that are divided among
ranks.
"""

from __future__ import annotations

from .callback import ActSwapCallback
from .pipeline_training import stage_from_config, stage_from_pretrained
from .prepare import Prepared, prepare
from .trainer_mixin import ActSwapTrainerMixin
from .training_args import ActSwapTrainingArguments, with_actswap

__all__ = [
    "ActSwapCallback",
    "ActSwapTrainerMixin",
    "ActSwapTrainingArguments",
    "Prepared",
    "prepare",
    "stage_from_config",
    "stage_from_pretrained",
    "with_actswap",
]
