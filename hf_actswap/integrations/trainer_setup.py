"""A Trainer is made ready for a model in parts, at the end of its construction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..config import ActSwapConfig
from ..parallel.rank_agreement import failing_together
from .parallel_limits import refusal, refuse_for_callback, refuse_unsupported
from .parallel_training import ParallelTraining, begin_parallel_training

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


def begin_for_trainer(trainer: Any, config: ActSwapConfig) -> ParallelTraining:
    """Divide a Trainer's model and make the Trainer fit for it.

    A Trainer with `ActSwapTrainerMixin` brings the methods along; any other one gets the two that training
    needs, on the object itself, and raises where it would need more.

    Raises:
        MeshError, RankAgreementError, PatchError: see `begin_parallel_training`.
        ParallelTrainingError: something asked of the Trainer does not go together with it.
    """
    size = config.parallel_config.tensor_parallel_size
    can_do_more = getattr(trainer, "holds_parallel_models", False)
    with failing_together("training arguments", trainer.args.ddp_timeout) as facts:
        refuse_unsupported(trainer, size)
        if not can_do_more:
            refuse_for_callback(trainer, size)
        facts.update({name: str(getattr(trainer.args, name, None)) for name in AGREED_ARGUMENTS})
    parallel = begin_parallel_training(
        trainer.accelerator, trainer.model, config, trainer.optimizer, trainer.args.ddp_timeout
    )
    trainer.gather_function = functools.partial(
        trainer.accelerator.gather_for_metrics, use_gather_object=trainer.args.eval_use_gather_object
    )
    trainer.parallel = parallel
    if not can_do_more:
        _serve_training_only(trainer, parallel)
    return parallel


def wrap_model(trainer: Any, parallel: ParallelTraining, model: nn.Module) -> nn.Module:
    """Return what a Trainer trains: see `ParallelTraining.wrap`.

    The Trainer lets DDP look for unused parameters unless told; here it is not looked for them unless told.
    """
    asked = trainer.args.ddp_find_unused_parameters
    return parallel.wrap(model, {} if asked else {"find_unused_parameters": False})


def _serve_training_only(trainer: Any, parallel: ParallelTraining) -> None:
    """Put on a Trainer without the mixin what training a part needs; refuse what writes the model."""

    def wrapped(model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return wrap_model(trainer, parallel, model) if training else model

    count: Callable[..., Any] = trainer._get_num_items_in_batch

    def checked(batch_samples: Any, device: Any) -> Any:
        if batch_samples:
            parallel.check_batch(batch_samples[0])
        return count(batch_samples, device)

    def refused(name: str, *_: Any, **__: Any) -> None:
        raise refusal(f"Trainer.{name}")

    trainer._wrap_model, trainer._get_num_items_in_batch = wrapped, checked
    trainer.get_tp_size = lambda: parallel.tensor_parallel_size
    for name in ("save_model", "push_to_hub", "_load_from_checkpoint"):
        setattr(trainer, name, functools.partial(refused, name))
