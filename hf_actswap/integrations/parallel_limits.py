"""Rejects, before the first step, settings that do not work with a model divided among ranks.

Each of them would end in a hang, in another model than in one process, or in a checkpoint of one rank's
part, mostly without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.utils import DynamoBackend

from ..errors import ActSwapError, Problem
from ..releases import loss_is_scaled_by_data_ranks

USE_OUR_TRAINER = (
    "A callback cannot save or load a model that several ranks hold: use hf_actswap.ActSwapTrainer in place "
    "of Trainer, or put hf_actswap.ActSwapTrainerMixin in front of your own trainer's class."
)

ELEMENTWISE_OPTIMIZERS = frozenset(
    {
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_torch_npu_fused",
        "adamw_apex_fused",
        "adagrad",
        "rmsprop",
        "sgd",
        "schedule_free_adamw",
        "schedule_free_radam",
        "schedule_free_sgd",
    }
)
"""Values of ``optim`` that update each element by its own gradients alone. Others do not work on a part of a
matrix: Adafactor takes means over rows, Muon orthogonalises, 8-bit optimizers quantise in blocks."""


class ParallelTrainingError(ActSwapError):
    """A request cannot be combined with ``parallel_config.tensor_parallel_size`` above 1."""

    subject = "tensor-parallel training"


def reject_unsupported(trainer: Any, tensor_parallel_size: int) -> None:
    """Raise `ParallelTrainingError` with all settings of a trainer that are not supported."""
    problems = problems_of_trainer(trainer)
    data_parallel_size = trainer.args.world_size // tensor_parallel_size
    if trainer.accelerator.dispatch_batches and data_parallel_size > 1:
        hint = "Each rank reads its own part of the data."
        problems.append(_problem("accelerator_config.dispatch_batches", "true", hint))
    if problems:
        raise ParallelTrainingError(problems)


def problems_of_trainer(trainer: Any) -> list[Problem]:
    """Return all settings of a trainer that do not work with a model divided among ranks."""
    found = [*_of_arguments(trainer.args), *_of_trainer(trainer)]
    if not loss_is_scaled_by_data_ranks():
        hint = 'Older ones count each batch once per rank. Install: pip install "transformers>=5.16"'
        found.append(Problem("transformers", "5.16 or newer beside parallel_config", "an older one", hint))
    if not getattr(trainer, "holds_parallel_models", False):
        found.append(Problem("Trainer", "hf_actswap.ActSwapTrainer", type(trainer).__name__, USE_OUR_TRAINER))
    return found


def _problem(name: str, found: str, hint: str) -> Problem:
    return Problem(name, "a setting that works with tensor_parallel_size above 1", found, hint)


def _of_arguments(args: Any) -> Iterator[Problem]:
    optimizer = str(getattr(args.optim, "value", args.optim))
    if args.torch_compile:
        yield _problem("torch_compile", "true", "Parallel layers communicate inside a layer: leave it out.")
    if args.fp16:
        yield _problem("fp16", "true", "Ranks would skip steps apart from each other: use bf16.")
    if args.use_liger_kernel:
        yield _problem("use_liger_kernel", "true", "Its fused loss reads the whole vocabulary: leave it out.")
    if getattr(args, "loss_type", None) == "chunked_nll":  # a default of some releases of TRL
        hint = 'That loss reads the head\'s whole weight, which is divided: set loss_type="nll".'
        yield _problem("loss_type", "chunked_nll", hint)
    if args.auto_find_batch_size:
        hint = "One rank may run out of memory and the others wait for it: set per_device_train_batch_size."
        yield _problem("auto_find_batch_size", "true", hint)
    if args.parallelism_config is not None:
        yield _problem("parallelism_config", "Accelerate's own", "Give the sizes in parallel_config alone.")
    if args.n_gpu > 1:
        yield _problem("devices", f"{args.n_gpu} in one process", "Start one process per device.")
    if optimizer not in ELEMENTWISE_OPTIMIZERS:
        known = ", ".join(sorted(ELEMENTWISE_OPTIMIZERS))
        hint = f"An element's update may depend on others. These work element by element: {known}."
        yield _problem("optim", optimizer, hint)


def _of_trainer(trainer: Any) -> Iterator[Problem]:
    if trainer.model_init is not None:
        yield _problem("model_init", "a function", "Pass the model itself; a search starts new processes.")
    if trainer.is_fsdp_enabled:
        hint = (
            "Data parallelism is DDP here (over the data axis): leave fsdp out. In a loop of your own "
            "hf_actswap.prepare(.., shard_over_data=True) shards by FSDP2."
        )
        yield _problem("fsdp", "on", hint)
    if trainer.is_deepspeed_enabled:
        yield _problem("deepspeed", "on", "Data parallelism is DDP here (over the data axis).")
    plugin = getattr(trainer.accelerator.state, "dynamo_plugin", None)
    if not trainer.args.torch_compile and plugin is not None and plugin.backend != DynamoBackend.NO:
        yield _problem("dynamo_backend", str(plugin.backend), "Launch with --dynamo_backend no.")
