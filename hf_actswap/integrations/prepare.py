"""`prepare`: puts a configuration or plan on a model for a training loop of your own with Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from ..apply import apply, set_weights_aside, sets_weights_aside
from ..config import ActSwapConfig
from ..engine import AppliedPlan
from ..errors import Problem, short_traceback
from ..parallel import tensor_parallel_group
from ..parallel.mesh import reject_independent_processes
from ..parallel.rank_agreement import LostRanks, failing_together
from ..pipeline import PipelineError
from ..plan import ConfigOrPlan, load_config_or_plan
from ..planner import Planner
from .parallel_limits import ParallelTrainingError
from .parallel_training import ParallelTraining, begin_parallel_training
from .shared_config import facts_to_compare


@dataclass
class Prepared:
    """What `prepare` returns: a model that is ready to train.

    Attributes:
        model: the model to call, in autocast and DDP where these are on.
        optimizer: the optimizer in Accelerate's wrapper, or ``None`` if none was given.
        applied: the plan on the model, or the planner that changes it; ``remove()`` takes it off.
        parallel: the training of a divided model; ``None``: the model is not divided.
    """

    model: nn.Module
    optimizer: Any
    applied: AppliedPlan | Planner
    parallel: ParallelTraining | None
    _bare: Any
    _accelerator: Any

    def naming_lost_ranks(self) -> AbstractContextManager[None]:
        """Return a ``with`` block for the loop: its errors of collectives name the ranks that have ended.

        Of collectives of any library, DDP's and Accelerate's too; they become
        `hf_actswap.parallel.LostRankError`. All ranks must enter it: within it a thread of each rank answers
        the others. With one process it does nothing.
        """
        return (LostRanks() if self.parallel is None else self.parallel.lost_ranks).named()

    def save_pretrained(self, folder: str, **how: Any) -> None:
        """Save the whole model in Hugging Face's format. Every rank must call it; the main process writes."""
        writes = self._accelerator.is_main_process
        if self.parallel is not None:
            how["state_dict"] = self.parallel.whole_weights(writes)
        if writes:
            self._bare.save_pretrained(folder, **how)
        self._accelerator.wait_for_everyone()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state with whole tensors, on the main process. Every rank must call it."""
        if self.parallel is None:
            state: dict[str, Any] = self.optimizer.state_dict()
            return state
        return self.parallel.full_optimizer_state(self.optimizer.optimizer, self._accelerator.is_main_process)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `optimizer_state_dict` returned, on any number of ranks."""
        if self.parallel is not None:
            state = self.parallel.own_optimizer_state(self.optimizer.optimizer, state)
        self.optimizer.load_state_dict(dict(state))


@short_traceback
def prepare(
    accelerator: Any,
    model: nn.Module,
    config: ConfigOrPlan,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    shard_over_data: bool = False,
) -> Prepared:
    """Put a configuration on a model and prepare both for training, in place of ``accelerator.prepare``.

    With ``parallel_config.tensor_parallel_size`` above 1 the model is divided among the ranks. Data loaders
    that ``accelerator`` prepares afterwards give the ranks of one model the same batches;
    ``accelerator.clip_grad_norm_`` clips by the norm of the whole model; tagged gradients are summed there
    or, at the latest, when the optimizer steps; DDP covers the data axis only. The loop stays as it is:

        prepared = hf_actswap.prepare(accelerator, model, "config.yaml", optimizer)
        model, optimizer = prepared.model, prepared.optimizer
        loader = accelerator.prepare(loader)
        with prepared.naming_lost_ranks():
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        prepared.save_pretrained("out")

    ``accelerator.save_state`` would write rank 0's part: it raises, and so does ``load_state``. An
    Accelerate scheduler steps once per process; step a plain one yourself.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: a causal language model, whole and not prepared.
        config: ``"auto"``, a plan, or whatever else `hf_actswap.apply` takes.
        optimizer: built on ``model``, before its first step; its parameters become the divided ones.
        shard_over_data: shard the parts over the data axis too, by FSDP2 in place of DDP. Gradients are then
            averaged per micro-batch. Only with ``tensor_parallel_size`` above 1, and not with Accelerate's
            own ``fsdp_plugin``, which shards over all processes.

    Raises:
        ConfigError, PlanError: see `hf_actswap.apply`.
        RankAgreementError: another rank failed, was given another configuration, or does not answer.
        MeshError, PatchError, ValueError: see `begin_parallel_training`.
        ParallelTrainingError: a setting of the accelerator does not work with a divided model.
        PipelineError: the configuration runs a pipeline, which only `ActSwapTrainer` supports.
    """
    with failing_together("hf_actswap.prepare") as facts:
        requested = load_config_or_plan(config)
        loaded = requested if isinstance(requested, ActSwapConfig) else ActSwapConfig()
        reject_independent_processes(accelerator.num_processes)
        facts.update(facts_to_compare(requested), shard_over_data=str(shard_over_data))
        if loaded.parallel_config.runs_pipeline:
            raise PipelineError([_PIPELINE])
        if loaded.parallel_config.tensor_parallel_size > 1:
            _reject(accelerator)
        elif shard_over_data:
            raise ParallelTrainingError([_SHARDED_ALONE])
    if loaded.parallel_config.tensor_parallel_size == 1:
        # The planner measures the wrapped model; Accelerate's optimizer knows which micro-batch is the last.
        planned = loaded.memory.mode != "off" or loaded.memory.optimizer_in_backward
        if planned and optimizer is not None:
            with ExitStack() as undo:
                owned = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
                if not owned and sets_weights_aside(requested, model, accelerator.device):
                    undo.callback(set_weights_aside(requested, model))
                wrapped, prepared_optimizer = accelerator.prepare(model, optimizer)
                applied = apply(wrapped, requested, optimizer=prepared_optimizer)
                applied.on_remove(undo.pop_all().close)
            return Prepared(wrapped, prepared_optimizer, applied, None, model, accelerator)
        applied, prepared_optimizer = apply(model, requested, optimizer=optimizer), None
        if optimizer is None:
            wrapped = accelerator.prepare(model)
        else:
            wrapped, prepared_optimizer = accelerator.prepare(model, optimizer)  # FSDP2 needs both at once
        return Prepared(wrapped, prepared_optimizer, applied, None, model, accelerator)
    model = model.to(accelerator.device)
    parallel = begin_parallel_training(accelerator, model, loaded, optimizer)
    with tensor_parallel_group(parallel.patched.group):
        applied = apply(model, loaded, optimizer=optimizer)
    if shard_over_data:
        parallel.shard_over_data(optimizer)
    if optimizer is not None:
        # This optimizer alone; a global hook would see every optimizer of the process.
        optimizer.register_step_pre_hook(lambda *_: parallel.sum_gradients())
    accelerator.register_save_state_pre_hook(_reject_state)
    accelerator.register_load_state_pre_hook(_reject_state)
    prepared_optimizer = None if optimizer is None else accelerator.prepare_optimizer(optimizer)
    return Prepared(parallel.wrap(model), prepared_optimizer, applied, parallel, model, accelerator)


_PIPELINE = Problem(
    "parallel_config.schedule",
    "a training under hf_actswap.ActSwapTrainer",
    "hf_actswap.prepare",
    "A loop calls the model once per micro-batch, and a schedule runs all micro-batches of a step in its own "
    "order.",
)

_SHARDED_ALONE = Problem(
    "shard_over_data",
    "tensor_parallel_size above 1",
    "1",
    "Without tensor parallelism use Accelerate's own FSDP2 (fsdp_plugin, fsdp_version 2).",
)


_PART = Problem(
    "accelerator.save_state / load_state",
    "a model that one rank holds",
    "a part of it",
    "Use save_pretrained, optimizer_state_dict and load_optimizer_state_dict of what hf_actswap.prepare "
    "returned.",
)

_HINT = "Use DDP (or shard_over_data=True in place of Accelerate's FSDP), bf16 and no compiling."


def _reject(accelerator: Any) -> None:
    asked = (
        ("distributed_type", str(accelerator.distributed_type.value), ("FSDP", "DEEPSPEED", "MEGATRON_LM")),
        ("mixed_precision", str(accelerator.mixed_precision), ("fp16", "fp8")),
        ("dynamo_backend", str(accelerator.state.dynamo_plugin.backend.value), None),
    )
    problems = [
        Problem(name, "a setting that works with tensor_parallel_size above 1", found, _HINT)
        for name, found, rejected in asked
        if (found.upper() != "NO" if rejected is None else found in rejected)
    ]
    if problems:
        raise ParallelTrainingError(problems)


def _reject_state(*_: Any) -> None:
    raise ParallelTrainingError([_PART])
