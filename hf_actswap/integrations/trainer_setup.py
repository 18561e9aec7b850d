"""Prepares a Trainer for a divided model, at the end of the Trainer's construction.

Rejects launches that would start without an error but train something else than was asked for.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

from ..config import ActSwapConfig
from ..errors import Problem
from ..parallel.mesh import MeshError, launch_command, started_processes
from ..parallel.rank_agreement import failing_together, parameters_fact
from .parallel_limits import reject_unsupported
from .parallel_training import DividedTraining, begin_parallel_training
from .pipeline_training import pipeline_of, stage_model
from .shared_config import facts_to_compare

AGREED_ARGUMENTS = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "num_train_epochs",
    "optim",
    "per_device_eval_batch_size",
    "per_device_train_batch_size",
    "seed",
    "warmup_steps",
    "weight_decay",
)
"""Training arguments in which ranks must not differ."""


def begin_for_trainer(trainer: Any, config: ActSwapConfig) -> DividedTraining:
    """Divide a Trainer's model among the ranks, in layers or stages, and prepare the Trainer for it.

    Every rank must call it.
    """
    limit_s, asked = trainer.args.ddp_timeout, config.parallel_config
    agreed = {name: str(getattr(trainer.args, name, None)) for name in AGREED_ARGUMENTS}
    parallel: DividedTraining
    if asked.runs_pipeline:
        with failing_together("pipeline", limit_s) as facts:
            facts.update(agreed, parameters=parameters_fact(trainer.model), **facts_to_compare(config))
            staged = stage_model(trainer, config)
        parallel = pipeline_of(trainer, staged, asked)
    else:
        with failing_together("training arguments", limit_s) as facts:
            reject_unsupported(trainer, asked.tensor_parallel_size)
            facts.update(agreed)
        parallel = begin_parallel_training(
            trainer.accelerator, trainer.model, config, trainer.optimizer, limit_s, limit_s
        )
    # The Trainer stored the old method at its construction, and reads it again only after an evaluation.
    trainer.gather_function = functools.partial(
        trainer.accelerator.gather_for_metrics, use_gather_object=trainer.args.eval_use_gather_object
    )
    trainer.parallel = parallel
    return parallel


def started_together() -> bool:
    """Whether this process is one of several, by the process group or else by the launcher's environment."""
    in_group = dist.is_available() and dist.is_initialized()
    return (dist.get_world_size() if in_group else started_processes(os.environ)) > 1


def reject_independent_processes(num_processes: int) -> None:
    """Raise `MeshError` if the launcher started several processes and Accelerate sees one, ``num_processes``.

    Accelerate starts them so, without an error, on a machine without accelerator when its configuration says
    MULTI_GPU and the script does not set the CPU: independent trainings would write to the same folder.
    """
    started = started_processes(os.environ)
    if started > 1 and num_processes == 1:
        expected = f"one training in {started} processes (WORLD_SIZE={started})"
        found = f"{started} independent trainings of one process each"
        hint = f"Start with: {launch_command(started)} (or set ACCELERATE_USE_CPU=true on a CPU)."
        raise MeshError([Problem("launcher", expected, found, hint)])
