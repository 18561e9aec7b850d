"""Prepares a Trainer for a divided model, at the end of the Trainer's construction.

Rejects launches that would start without an error but train something else than was asked for.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist
from torch import nn

from ..config import ActSwapConfig
from ..errors import Problem
from ..parallel.mesh import MeshError, launch_command, started_processes
from ..parallel.rank_agreement import failing_together, parameters_fact
from .parallel_limits import reject_unsupported
from .parallel_training import ParallelTraining, begin_parallel_training
from .pipeline_training import PipelineTraining, pipeline_of, stage_model
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


def begin_pipeline_for_trainer(trainer: Any, config: ActSwapConfig) -> PipelineTraining:
    """Cut a Trainer's model into stages, of which this rank keeps one. Every rank must call it.

    Raises:
        MeshError, PipelineError, PatchError: the model cannot be cut; see `stage_model` and `patch_model`.
        RankAgreementError: ranks were given different arguments, or do not answer in time.
    """
    with failing_together("pipeline", trainer.args.ddp_timeout) as facts:
        facts.update({name: str(getattr(trainer.args, name, None)) for name in AGREED_ARGUMENTS})
        facts["parameters"] = parameters_fact(trainer.model)
        facts.update(facts_to_compare(config))
        staged = stage_model(trainer, config)
    parallel = pipeline_of(trainer, staged, config.parallel_config)
    _gather_by_model(trainer)
    trainer.parallel = parallel
    return parallel


def _gather_by_model(trainer: Any) -> None:
    """Let a Trainer's first evaluation use the accelerator's new ``gather_for_metrics``, not the old one.

    The Trainer stored the method at its construction, and reads it again only after an evaluation.
    """
    trainer.gather_function = functools.partial(
        trainer.accelerator.gather_for_metrics, use_gather_object=trainer.args.eval_use_gather_object
    )


def begin_for_trainer(trainer: Any, config: ActSwapConfig) -> ParallelTraining:
    """Divide a Trainer's model among the ranks, and prepare the Trainer for it.

    Raises:
        MeshError, RankAgreementError, PatchError: see `begin_parallel_training`.
        ParallelTrainingError: the Trainer lacks `ActSwapTrainerMixin`, or a setting does not work with a
            divided model.
    """
    with failing_together("training arguments", trainer.args.ddp_timeout) as facts:
        reject_unsupported(trainer, config.parallel_config.tensor_parallel_size)
        facts.update({name: str(getattr(trainer.args, name, None)) for name in AGREED_ARGUMENTS})
    limit_s = trainer.args.ddp_timeout
    parallel = begin_parallel_training(
        trainer.accelerator, trainer.model, config, trainer.optimizer, limit_s, limit_s
    )
    _gather_by_model(trainer)
    trainer.parallel = parallel
    return parallel


def wrap_model(trainer: Any, parallel: ParallelTraining | PipelineTraining, model: nn.Module) -> nn.Module:
    """Wrap a Trainer's model for training (`ParallelTraining.wrap`, `PipelineTraining.wrap`).

    By default the Trainer lets DDP search for unused parameters; here that is done only on request.
    """
    asked = trainer.args.ddp_find_unused_parameters
    return parallel.wrap(model, {} if asked else {"find_unused_parameters": False})


def started_together() -> bool:
    """Whether this process is one of several, by the process group or else by the launcher's environment."""
    in_group = dist.is_available() and dist.is_initialized()
    return (dist.get_world_size() if in_group else started_processes(os.environ)) > 1


def reject_independent_processes(num_processes: int) -> None:
    """Raise an error if the launcher started several processes that would each train alone.

    Accelerate starts them so, without an error, on a machine without accelerator when its configuration says
    MULTI_GPU and the script does not set the CPU: independent trainings would write to the same folder.

    Args:
        num_processes: how many processes Accelerate sees, this one included.

    Raises:
        MeshError: ``WORLD_SIZE`` is above 1 and ``num_processes`` is 1; with the command to start with.
    """
    started = started_processes(os.environ)
    if started > 1 and num_processes == 1:
        raise MeshError(
            [
                Problem(
                    "launcher",
                    f"one training in {started} processes (WORLD_SIZE={started})",
                    f"{started} independent trainings of one process each",
                    f"Start with: {launch_command(started)} (or set ACCELERATE_USE_CPU=true on a CPU).",
                )
            ]
        )
