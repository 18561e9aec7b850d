"""A mixin with the Trainer's methods that must differ for a model divided among ranks.

The Trainer itself is not imported here: the module `trainer` combines the two.

**The loss of an evaluation** over several data ranks is the loss that one process computes for all their
batches joined. The Trainer divides each rank's sum by the tokens of all ranks, gathers these parts, and
takes their mean: right for full batches, not for an uneven last one. Accelerate fills that up with samples
from the beginning, whose tokens are counted, and the Trainer keeps as many parts as there are real samples,
those of the first ranks. Nine samples on two ranks of two gave 4.35 in place of 4.21.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import Problem, short_traceback
from ..parallel.mesh import ParallelMesh
from ..parallel.sequence_region import IGNORED
from ..pipeline import PipelineError
from .callback import ActSwapCallback
from .parallel_checkpoint import (
    Layout,
    load_optimizer_and_scheduler,
    random_states_by_data_rank,
    write_layout,
)
from .parallel_training import DividedTraining, parallelism_config_set, patched_attribute

LABELS = ("labels", "shift_labels")


_PARTLY_READ = Problem(
    "model",
    "all weights, in a training without a pipeline",
    "some on meta",
    "What hf_actswap.stage_from_pretrained opens is trained with parallel_config.schedule.",
)


class ActSwapTrainerMixin:
    """Mixin for a Trainer that trains divided models: ``class T(ActSwapTrainerMixin, SFTTrainer): ...``.

    With ``parallel_config.tensor_parallel_size`` above 1 or a pipeline (``parallel_config.schedule``) the
    model is divided at the end of the Trainer's construction, and then trained, evaluated, saved and resumed
    as in one process: checkpoints are Hugging Face's, whole, and go on at any number of ranks. Otherwise it
    changes nothing.

    An `ActSwapCallback` is added unless one is among ``callbacks``.

    Attributes:
        parallel: the parallel training, or ``None``. Set by the callback.

    Raises:
        ConfigError, MeshError, PatchError, RankAgreementError: see `begin_parallel_training`.
        ParallelTrainingError: a training argument does not go with a model in parts.
    """

    parallel: DividedTraining | None = None
    holds_parallel_models = True
    """Read by the callback: this Trainer can save, resume and train several models (dp > 1)."""

    args: Any
    model: Any
    place_model_on_device: bool
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    callback_handler: Any
    _whole_weights: dict[str, torch.Tensor] | None = None

    @short_traceback
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not any(isinstance(found, ActSwapCallback) for found in self.callback_handler.callbacks):
            callback = ActSwapCallback(self.args)
            self.add_callback(callback)  # type: ignore[attr-defined]
            callback.on_init_end(self.args, self.state, self.control)  # type: ignore[attr-defined]
        if self.place_model_on_device and _partly_read(self.model):  # under FSDP, weights on meta are usual
            raise PipelineError([_PARTLY_READ])
        if self.parallel is not None:
            self.parallel.replace_fused_head()  # for an evaluation before the training

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move a model as the Trainer does, but leave the weights of other stages on ``meta``."""
        if not _partly_read(model):
            super()._move_model_to_device(model, device)  # type: ignore[misc]
            return
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))

    def get_tp_size(self) -> int:
        """Return how many ranks train on the same batch."""
        if self.parallel is None:
            found: int = super().get_tp_size()  # type: ignore[misc]
            return found
        return self.parallel.ranks_per_model

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Read a step's batches as the Trainer does; in a pipeline they are its micro-batches."""
        batches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if self.parallel is not None:
            self.parallel.begin_step(batches)
        return batches, items

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's step; in a pipeline all micro-batches run when the first one is asked for."""
        stock = super().training_step  # type: ignore[misc]
        if self.parallel is None:
            return stock(*args, **kwargs)
        return self.parallel.training_step(self, stock, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the Trainer does; its scale counts each model once, not each rank."""
        with self._declared():
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's step; over several data ranks the loss is that of their batches joined."""
        mesh = None if self.parallel is None else self.parallel.mesh
        if mesh is None or mesh.data_parallel_size == 1 or not divides_by_all_tokens(self):
            return self._predicted(model, inputs, *args, **kwargs)
        inputs = mask_padding_samples(inputs, self.accelerator, mesh)
        loss, logits, labels = self._predicted(model, inputs, *args, **kwargs)
        return None if loss is None else mean_over_data_ranks(loss, mesh), logits, labels

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's loop, in which all ranks must have equally many batches.

        Raises:
            LostRankError: a rank has ended, or does not answer.
            RankAgreementError: ranks have other numbers of batches.
        """
        stock = super().evaluation_loop  # type: ignore[misc]
        if self.parallel is None:
            return stock(dataloader, *args, **kwargs)
        with self.parallel.lost_ranks.named():
            return stock(self.parallel.same_batches(dataloader), *args, **kwargs)

    def _predicted(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super().prediction_step  # type: ignore[misc]
        if self.parallel is None:
            return stock(model, inputs, *args, **kwargs)
        with self._declared():
            return self.parallel.prediction_step(self, stock, model, inputs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save whole weights in Hugging Face's format. Every rank must call it, as with the Trainer's own."""
        if self.parallel is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        # `push_to_hub` calls save_model within save_model: the weights gathered before are used up by then.
        # Not gathered for one rank only: with save_on_each_node several ranks write.
        with self.parallel.lost_ranks.named():
            self._whole_weights = self.parallel.whole_weights(self.args.should_save)
            try:
                super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            finally:
                self._whole_weights = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.parallel is not None and state_dict is None and self.args.should_save:
            state_dict, self._whole_weights = self._whole_weights, None  # emptied by save_pretrained
        with self._whole_model():
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._whole_model():
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with self._whole_model():
            super()._load_best_model()  # type: ignore[misc]

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self.parallel is None or not training:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
            return wrapped
        # The Trainer lets DDP search for unused parameters by default; here that is done only on request.
        asked = self.args.ddp_find_unused_parameters
        return self.parallel.wrap(model, {} if asked else {"find_unused_parameters": False})

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        if self.parallel is not None:
            self.parallel.check_batches(batch_samples)
        with self._declared():
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    def _track_num_input_tokens(self, *args: Any, **kwargs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(*args, **kwargs)  # type: ignore[misc]
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self._ranks_per_batch

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.parallel is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        full = self.parallel.full_optimizer_state(self.optimizer.optimizer, self.args.should_save)
        with patched_attribute(self.optimizer, "state_dict", lambda: full):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.parallel is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        if checkpoint is not None:
            own_state = self.parallel.own_optimizer_state
            load_optimizer_and_scheduler(checkpoint, self.optimizer, self.lr_scheduler, own_state)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self.args.should_save:
            write_layout(output_dir, self._layout)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        rank = self.args.process_index
        data_rank = rank if self.parallel is None else self.parallel.mesh.data_parallel_rank
        with random_states_by_data_rank(checkpoint, self._layout, rank, data_rank) as folder:
            super()._load_rng_state(folder)  # type: ignore[misc]

    @property
    def _layout(self) -> Layout:
        group, ranks = None if self.parallel is None else self.parallel.tensor_group, self.args.world_size
        size = 1 if group is None else group.size()
        stages = self._ranks_per_batch // size
        return {"processes": ranks, "tensor_parallel_size": size, "pipeline_stage": stages}

    @property
    def _ranks_per_batch(self) -> int:
        return 1 if self.parallel is None else self.parallel.ranks_per_model

    def _whole_model(self) -> Any:
        return nullcontext() if self.parallel is None else self.parallel.whole_model()

    def _declared(self) -> Any:
        if self.parallel is None:
            return nullcontext()
        return parallelism_config_set(self.accelerator, self._ranks_per_batch)


def _partly_read(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def divides_by_all_tokens(trainer: Any) -> bool:
    """Whether a trainer's loss of a batch is a sum divided by the tokens of all ranks."""
    return bool(
        trainer.args.average_tokens_across_devices
        and trainer.model_accepts_loss_kwargs
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
    )


def mask_padding_samples(inputs: Mapping[str, Any], accelerator: Any, mesh: ParallelMesh) -> dict[str, Any]:
    """Return a data rank's batch with no label on the samples that only fill the last batch up."""
    found = dict(inputs)
    state = accelerator.gradient_state
    # 0: the last batch is full; -1: the number of samples is unknown.
    if not (state.end_of_dataloader and state.remainder > 0 and accelerator.even_batches):
        return found
    for name in LABELS:
        labels = found.get(name)
        if isinstance(labels, torch.Tensor):
            real = max(0, state.remainder - mesh.data_parallel_rank * len(labels))
            found[name] = labels.clone()
            found[name][real:] = IGNORED
    return found


def mean_over_data_ranks(loss: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Return the mean over the data ranks of ``loss``, a scalar; the same on every rank."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.data_parallel_group)
    return total / mesh.data_parallel_size
