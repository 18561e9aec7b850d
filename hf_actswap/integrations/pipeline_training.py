"""A training of a model in a pipeline: what Accelerate and the Trainer have to do differently for it.

====================== ==================================================================================
what                   how
====================== ==================================================================================
who holds what         a mesh (stages, data axis, tensor axis). Before the optimizer is built the model is
                       checked (`check_cut`), divided over the tensor axis and checked again, and cut
batches                by data rank; gradient accumulation steps are the micro-batches
a step                 the whole schedule runs at the first micro-batch of an optimizer step; then the losses
                       are handed out one by one, as the Trainer adds them up
gradients              of tied weights are summed over the stages that hold them, tagged ones over the
                       tensor axis, then all are averaged over the data axis, once per optimizer step
norm and clip          of the whole model, the same on every rank
random numbers         each stage draws its own in a step, from the seed, the step and the stage; the ranks of
                       its tensor axis draw the same
====================== ==================================================================================

Opens or makes a model on a pipeline rank, which has the weights of its own stage only.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..config import ActSwapConfig
from ..config.schema import ParallelConfig
from ..engine.agreement import agreeing_among
from ..errors import Problem, short_traceback
from ..parallel.gradients import TaggedGradients
from ..parallel.mesh import (
    REPLICATED_DATA_AXIS,
    MeshError,
    ParallelMesh,
    launch_command,
    mesh_of,
    own_group,
    started_processes,
)
from ..parallel.patch_model import patch_model
from ..parallel.rank_agreement import failing_together
from ..pipeline import (
    PipelineError,
    PipelineRuntime,
    StagedModel,
    StageGradients,
    check_cut,
    gathered_on_first_rank,
    whole_state,
)
from ..pipeline.runtime import Call, bubble_share, passes_in_flight, problem_of_schedule
from ..pipeline.stages import is_cut, layout_of, stage_of_rank
from ..plan import ConfigOrPlan, MemoryPlan, load_config_or_plan, model_structure
from ..plan.actions import format_scopes
from ..planner import BudgetError, PlannedTraining
from ..report.run_files import RecordedStages
from .parallel_checkpoint import (
    Names,
    entries_by_name,
    gathered_entries,
    names_of_parameters,
    numbered_state,
    own_state,
)
from .parallel_limits import problems_of_trainer
from .parallel_training import DividedTraining, patched_attribute, prepare_without_ddp

logger = logging.getLogger(__name__)

_TRAINER = "transformers.trainer"
_OWN_STEPS = ("compute_loss", "training_step", "prediction_step")
"""Methods that a Trainer's subclass must not override: they run on one stage only, or not at all."""


class PipelineTraining(DividedTraining):
    """A staged model in a training that a Trainer drives; see `DividedTraining`.

    Args:
        staged: the model, after `check_cut` and `StagedModel.cut`.
        parallel: the section ``parallel_config`` of the configuration.
        pipeline_group: one rank of each stage, in the order of the stages: the ranks that have this rank's
            places on the data axis and the tensor axis.
        tensor_group: ranks that hold this rank's stage together; ``None``: this rank holds it alone.
        stage_group: ranks of all pipelines that hold this rank's stage.
    """

    _all_stable = False

    def __init__(
        self,
        accelerator: Any,
        mesh: ParallelMesh,
        staged: StagedModel,
        parallel: ParallelConfig,
        pipeline_group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None,
        stage_group: dist.ProcessGroup,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(accelerator, mesh, staged.model, timeout_s)
        assert parallel.schedule is not None
        device = accelerator.device
        self.staged, self._group, self.tensor_group = staged, pipeline_group, tensor_group
        self._schedule, self.passes = parallel.schedule, staged.passes
        self._stage_group = stage_group
        self._runtime = PipelineRuntime(staged, pipeline_group, parallel.schedule, device)
        self._gradients = StageGradients(staged, pipeline_group, device, tensor_group, timeout_s)
        self._tagged = None if tensor_group is None else TaggedGradients(staged.model, tensor_group)
        self._batches: Sequence[Mapping[str, Any]] = ()
        self._losses: Iterator[torch.Tensor] = iter(())
        self._are_summed = True

    @property
    def _tensor_rank(self) -> int:
        return 0 if self.tensor_group is None else self.tensor_group.rank()

    def wrap(self, model: nn.Module, _ddp_settings: Mapping[str, Any] | None = None) -> nn.Module:
        # Autocast is put on the module, which every stage calls.
        return prepare_without_ddp(self._accelerator, model)

    @property
    def recorded_stage(self) -> int | None:
        first = self._tensor_rank == 0 and self.mesh.data_parallel_rank == 0
        return self.staged.stage if first else None

    def recorded_stages(self, micro_batches: int) -> RecordedStages:
        layout, name = self.staged.layout, self._schedule
        stages, vpp = range(layout.pp), layout.vpp
        passes = [passes_in_flight(name, micro_batches, layout.pp, vpp, stage) for stage in stages]
        return {
            "schedule": name,
            "micro_batches": micro_batches,
            "bubble_share": bubble_share(micro_batches, layout.pp, vpp),
            "layers": tuple(tuple(layout.layers_of(stage)) for stage in stages),
            "in_flight": tuple(count / vpp for count in passes),
        }

    def training_of_rank(self, training: PlannedTraining, micro_batches: int) -> PlannedTraining:
        layout, stage, memory = self.staged.layout, self.staged.stage, training.memory
        passes = passes_in_flight(self._schedule, micro_batches, layout.pp, layout.vpp, stage)
        earlier = training.earlier_plan
        if memory.plan_file is not None:
            memory = replace(memory, plan_file=self.plan_path(memory.plan_file))
        layers = format_scopes(layout.layers_of(stage))
        part = f", stage {stage} with layers {layers}, {passes} passes in flight"
        return replace(
            training,
            memory=memory,
            in_flight=passes / layout.vpp,
            chunks=layout.vpp,
            part=part,
            earlier_plan=None if earlier is None else self.plan_path(earlier),
        )

    def plan_path(self, path: str) -> str:
        whole = Path(path)
        return str(whole.with_name(f"{whole.stem}.stage_{self.staged.stage}{whole.suffix}"))

    @contextmanager
    def storing_plans(self) -> Iterator[None]:
        with failing_together("checkpoint plan", self._timeout_s):
            pass  # a checkpoint's folder, which one rank makes, is there from here on
        with agreeing_among(self._stage_group):
            yield

    @contextmanager
    def planners_agreeing(self) -> Iterator[None]:
        together: AbstractContextManager[Any] = nullcontext()
        if not self._all_stable:  # else nothing can fail, and ranks do not wait for each other
            together = failing_together("memory plan", self._timeout_s)
        with together, agreeing_among(self._stage_group):
            try:
                yield
            except BudgetError as error:
                raise error.with_hint(f"This is stage {self.staged.stage} of the pipeline.") from None

    def replace_fused_head(self) -> None:
        pass  # trainers with a `compute_loss` of their own (TRL's) are rejected

    def begin_step(self, batches: Sequence[Mapping[str, Any]]) -> None:
        self._batches = batches

    def training_step(
        self, trainer: Any, _stock: Any, model: nn.Module, _inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the loss of the next micro-batch; the first call in an optimizer step runs the schedule."""
        if self._batches:
            model.train()
            if callable(getattr(trainer.optimizer, "train", None)):
                trainer.optimizer.train()
            batches = [trainer._prepare_inputs(batch) for batch in self._batches]
            self._batches = ()
            with self._own_random_numbers(trainer):
                call = self._call(trainer, num_items_in_batch, len(batches))
                losses = self._runtime.step(batches, call, self._one_by_one())
            self._are_summed = False
            self._losses = iter(losses)
        return next(self._losses)

    def _sum_gradients(self) -> None:
        """Sum or average gradients over the ranks that share them, unless that is done in this step.

        Not after each schedule: where a dataset without a length ends in mid-step, the Trainer makes no
        optimizer step, and the next epoch's gradients are added to these.
        """
        if self._are_summed:
            return
        self._are_summed = True
        self._gradients.sum_shared()
        if self._tagged is not None:
            self._tagged.reduce()
        if self.mesh.data_parallel_size > 1:
            self._gradients.average_over_data(self.mesh.data_parallel_group)

    def _one_by_one(self) -> bool:
        """Whether a planner of this pipeline is in its warm-up, which records one micro-batch at a time.

        Data-parallel pipelines are in the same phases.
        """
        if self.phase is None:
            return False
        found = self._of_model(self.phase())
        self._all_stable = all(phase == "stable" for phase in found)
        return "warm-up" in found

    def prediction_step(
        self, trainer: Any, stock: Callable[..., Any], _model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return on every rank what the Trainer's method, ``stock``, returns on the last stage."""
        batch, model, items = trainer._prepare_inputs(inputs), trainer.model, None
        if all(batch.get(name) is not None for name in trainer.label_names):
            items = trainer._get_num_items_in_batch([batch], trainer.args.device)  # a collective

        def call(batch: Mapping[str, Any], is_last: bool) -> Any:
            if is_last:
                return stock(model, dict(batch), *args, **kwargs)
            with trainer.compute_loss_context_manager():
                return model(**_without_labels(trainer, batch))

        with patched_attribute(trainer, "_get_num_items_in_batch", lambda *_: items):
            return self._runtime.evaluate(batch, call)

    def _call(self, trainer: Any, items: Any, count: int) -> Call:
        """Return the function that calls the model on a stage: on the last one for the Trainer's loss."""
        model = trainer.model_wrapped
        is_sum = getattr(trainer, "loss_is_scaled_for_ga", None)  # a trainer may say it of its own loss
        if is_sum is None:
            of_model = trainer.model_accepts_loss_kwargs and items is not None
            is_sum = of_model or trainer.compute_loss_func is not None

        def call(batch: Mapping[str, Any], is_last: bool) -> Any:
            with trainer.compute_loss_context_manager():
                if not is_last:
                    return model(**_without_labels(trainer, batch))
                loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
            return loss if is_sum else loss / count

        return call

    @contextmanager
    def _own_random_numbers(self, trainer: Any) -> Iterator[None]:
        """Within the block draw random numbers (dropout) from a stream of this stage and step alone."""
        device = self._accelerator.device
        devices = [] if device.type == "cpu" else [device]
        kind = {} if device.type == "cpu" else {"device_type": device.type}
        with torch.random.fork_rng(devices, **kind):
            rank = trainer.args.process_index - self._tensor_rank
            number = trainer.state.global_step * trainer.args.world_size + rank
            torch.manual_seed(trainer.args.seed + 1 + number)
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        self._sum_gradients()
        norm = self._gradients.norm(norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def check_summed(self) -> None:
        self._sum_gradients()  # unless clipping has done it in this step: the optimizer's step follows

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        with self.staged.whole(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* to a meta parameter in the current model, which is a no-op")
            yield

    def plan_of_rank(self, plan: MemoryPlan) -> MemoryPlan:
        recomputes = any(row.fate == "recompute" and not row.op_path for row in plan.rows)
        if self._schedule == "zero_bubble" and recomputes:
            logger.warning(
                "zero_bubble makes the gradients of inputs and of weights apart: on all stages but the first "
                "a layer that is recomputed whole runs again for its inputs and for each of its groups of "
                "weights. 1f1b and interleaved_1f1b run it again once."
            )
        return replace(self.staged.plan_of_stage(plan), unsupported=())

    def whole_weights(self, keeps: bool) -> dict[str, torch.Tensor]:
        found = whole_state(self.staged, self._group, self.tensor_group)
        return found if keeps else {}

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer, keeps: bool) -> dict[str, Any]:
        state, names = optimizer.state_dict(), self._names(optimizer)
        held, partitions = self.staged.own_state(), self.staged.own_partitions()
        own = {
            name: entries
            for name, entries in entries_by_name(state, names).items()
            if self.staged.holders(name)[0] == self.staged.stage
        }
        whole = dict(gathered_entries(own, held, partitions, self.tensor_group))
        found = gathered_on_first_rank(whole, self._group)
        full = numbered_state(state["param_groups"], self._whole(names), found)
        return full if keeps else {}

    def own_optimizer_state(
        self, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
    ) -> dict[str, Any]:
        names, staged = self._names(optimizer), self.staged
        held, partitions = staged.own_state(), staged.own_partitions()
        return own_state(full, names, self._whole(names), held, partitions, self._tensor_rank)

    def _whole(self, names: Names) -> Names:
        """Return the names of each group over all stages, in the model's order. Every rank must call it."""
        order, found = dict.fromkeys(self.staged.entries.values()), self._of_model(names)
        together = [{name for of_rank in found for name in of_rank[group]} for group in range(len(names))]
        return [[name for name in order if name in group] for group in together]

    def _of_model(self, own: Any) -> list[Any]:
        """Return what each rank of this model has given; every one of them must call it."""
        found: list[Any] = [None] * self.ranks_per_model
        dist.all_gather_object(found, own, group=self.mesh.tensor_parallel_group)
        return found

    def _names(self, optimizer: torch.optim.Optimizer) -> Names:
        entries = self.staged.entries
        return [
            [entries[name] for name in names] for names in names_of_parameters(self.staged.model, optimizer)
        ]


_CUT_BEFORE = Problem(
    "model",
    "a whole model",
    "one that another training has cut into stages",
    "Load it again, for example from that training's checkpoint.",
)


def stage_model(trainer: Any, config: ActSwapConfig) -> StagedModel:
    """Check that a Trainer's model can be cut into stages; return it in stages, with nothing freed yet.

    It does not communicate: all ranks come to the same result, or raise the same error.
    """
    parallel = config.parallel_config
    stages, world_size = parallel.pipeline_stage, trainer.args.world_size
    size = parallel.tensor_parallel_size
    if world_size % (stages * size):
        found = f"{world_size} process{'' if world_size == 1 else 'es'}"
        hint = f"Start with: {launch_command(stages * size)}."
        each = "one" if size == 1 else f"{size} (tensor_parallel_size)"
        count = f"{stages * size} processes, {each} per stage"
        expected = f"{count}, or a multiple (with parallel_config.schedule)"
        raise MeshError([Problem("parallel_config.pipeline_stage", expected, found, hint)])
    if problems := list(_problems_of_settings(trainer, config)):
        raise PipelineError(problems)
    if is_cut(trainer.model):
        raise PipelineError([_CUT_BEFORE])
    structure = model_structure(trainer.model)
    layout = layout_of(structure, parallel)
    stage = stage_of_rank(trainer.args.process_index, world_size, stages)
    staged = StagedModel(trainer.model, structure, layout, stage, parallel.sequence_ranks)
    if absent := [name for name, tensor in staged.own_state().items() if tensor.is_meta]:
        hint = "Open it by hf_actswap.stage_from_pretrained with the configuration of this training."
        raise PipelineError([Problem("model", f"the weights of stage {stage}", f"no {absent[0]}", hint)])
    check_cut(staged, trainer.accelerator.autocast)
    trained = [name for name, item in trainer.model.named_parameters() if item.requires_grad]
    for stage in range(stages):
        if not any(stage in staged.holders(staged.entries[name]) for name in trained):
            raise PipelineError([Problem(f"stage {stage}", "a parameter that is trained", "none")])
    return staged


def pipeline_of(trainer: Any, staged: StagedModel, parallel: ParallelConfig) -> PipelineTraining:
    """Divide a Trainer's model, cut it and set its accelerator up for the stages. Every rank must call it."""
    count, stages = trainer.args.gradient_accumulation_steps, parallel.pipeline_stage
    if count < stages and trainer.args.process_index == 0:
        logger.warning(
            "gradient_accumulation_steps: %d micro-batches for %d stages; each stage waits for %.0f %% of a "
            "step. Four times as many as stages are usual.",
            count,
            stages,
            100 * bubble_share(count, stages, parallel.pp_interleave_num),
        )
    kind, size = trainer.accelerator.device.type, parallel.tensor_parallel_size
    models, timeout_s = trainer.args.world_size // (stages * size), trainer.args.ddp_timeout
    ranks = torch.arange(stages * models * size).view(stages, models, size)
    by_model = ranks.transpose(0, 1).reshape(models, stages * size)
    model_group = own_group(by_model.tolist(), timeout_s)
    mesh = mesh_of(by_model, kind, REPLICATED_DATA_AXIS, model_group, timeout_s)
    stage_group = own_group(ranks.view(stages, -1).tolist(), timeout_s)
    pipeline_group, tensor_group = model_group, None
    if size > 1:
        pipeline_group = own_group(ranks.view(stages, -1).T.tolist(), timeout_s)
        tensor_group = own_group(ranks.view(-1, size).tolist(), timeout_s)
        patch_model(trainer.model, parallel, tensor_group, timeout_s=timeout_s)
        whole = staged
        staged = StagedModel(trainer.model, whole.structure, whole.layout, whole.stage, whole.sequence_ranks)
        check_cut(staged, trainer.accelerator.autocast)
    staged.cut()
    return PipelineTraining(
        trainer.accelerator, mesh, staged, parallel, pipeline_group, tensor_group, stage_group, timeout_s
    )


def _without_labels(trainer: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    labels = {*trainer.label_names, "shift_labels"}
    return {name: value for name, value in batch.items() if name not in labels}


def _problems_of_planning(config: ActSwapConfig) -> Iterator[Problem]:
    memory, parallel = config.memory, config.parallel_config
    if memory.mode == "off":
        return
    expected = "a setting that goes with planning by stage (memory.mode beside parallel_config.schedule)"
    if parallel.schedule == "zero_bubble":
        hint = "Write 1f1b, interleaved_1f1b or gpipe."
        yield Problem("parallel_config.schedule", expected, parallel.schedule, hint)
    if memory.preference == "memory_saving":
        yield Problem("memory.preference", expected, memory.preference, "Leave it out.")


def _problems_of_settings(trainer: Any, config: ActSwapConfig) -> Iterator[Problem]:
    parallel = config.parallel_config
    args, expected = trainer.args, "a setting that goes with a pipeline (parallel_config.schedule)"
    for problem in problems_of_trainer(trainer):
        yield problem if problem.where == "Trainer" else replace(problem, expected=expected)
    yield from _problems_of_planning(config)
    if config.stacks:
        yield Problem("stacks", "no other stack of layers", ", ".join(config.stacks), "Leave it out.")
    count = args.gradient_accumulation_steps
    if parallel.schedule is not None and (
        why := problem_of_schedule(
            parallel.schedule,
            count,
            parallel.pipeline_stage,
            parallel.pp_interleave_num,
            parallel.tensor_parallel_size,
        )
    ):
        hint = "Change gradient_accumulation_steps, the number of micro-batches, or the schedule."
        yield Problem("parallel_config.schedule", "one that fits the layout and the micro-batches", why, hint)
    asked = (
        ("average_tokens_across_devices", "false", not args.average_tokens_across_devices),
        ("neftune_noise_alpha", "a number", args.neftune_noise_alpha is not None),
        ("save_on_each_node", "true", args.save_on_each_node),
        ("optimizers", "an optimizer of the whole model", trainer.optimizer is not None),
        ("dispatch_batches", "true", bool(trainer.accelerator.dispatch_batches)),
    )
    for name, found, is_asked in asked:
        if is_asked:
            yield Problem(name, expected, found, "Leave it out.")
    for name in _OWN_STEPS:
        for owner in type(trainer).__mro__:
            if name not in vars(owner) or owner.__module__.startswith((_TRAINER, f"{__package__}.")):
                continue
            hint = "It would run on one stage only. Give the Trainer a compute_loss_func."
            yield Problem(f"{owner.__name__}.{name}", f"the {name} of transformers.Trainer", "another", hint)


_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_NOT_BESIDE = ("device_map", "distributed_config", "output_loading_info", "quantization_config", "state_dict")


@short_traceback
def stage_from_pretrained(kind: Any, source: str | os.PathLike[str], config: ConfigOrPlan, **how: Any) -> Any:
    """Load a pretrained model as ``kind.from_pretrained`` does, with the weights of this rank's stage only.

    The model has all modules and names. Parameters and buffers of other stages (their layers, the embedding,
    the norm, the head) are on ``meta``: they are neither read nor allocated. Pass the model to
    `ActSwapTrainer` with the same configuration. Adapters (PEFT) are added as usual.

        model = stage_from_pretrained(AutoModelForCausalLM, "meta-llama/Llama-3.1-70B", "config.yaml")

    Conversions of weights (experts) are transformers'. Files other than safetensors are read whole. Tied
    weights are read on the first and the last stage. With ``tensor_parallel_size`` each rank reads its whole
    stage, then divides it. If the configuration has no pipeline, the whole model is loaded.

    Args:
        kind: a class of transformers, or an auto class (``AutoModelForCausalLM``).
        source: a folder or a Hub id.
        config: as for `hf_actswap.apply`; its ``parallel_config`` sets the stages and their layers.
        how: further arguments of ``from_pretrained``.

    Raises:
        ConfigError: the configuration is malformed.
        PipelineError: the model cannot be divided into stages, or an argument in ``how`` is not supported.
    """
    parallel = _parallel_of(config)
    if not parallel.runs_pipeline:
        return kind.from_pretrained(source, **how)
    expected = "no such argument beside parallel_config.schedule"
    unfit = [Problem(name, expected, "it is given", "Leave it out.") for name in _NOT_BESIDE if how.get(name)]
    if unfit:
        raise PipelineError(unfit)
    whole = _on_meta(kind, source, how)
    return _opened_without(_foreign_parts(whole, parallel), type(whole), source, how)


@short_traceback
def stage_from_config(
    kind: Any, made_of: PreTrainedConfig, config: ConfigOrPlan, seed: int = 0, **how: Any
) -> Any:
    """Make a model with random weights for this rank's stage; the other stages stay on ``meta``.

        model = stage_from_config(AutoModelForCausalLM, LlamaConfig(...), "config.yaml", seed=42)

    Each module draws its weights from a seed of its own, made of ``seed`` and the module's name: the weights
    are the same in any number of stages and in one process, but not those of ``from_config``, which draws
    all from one stream. The global generators stay as they are.

    Args:
        kind: a class of transformers, or an auto class.
        made_of: the model's transformers configuration.
        config: the actswap configuration, as for `stage_from_pretrained`; without a pipeline the whole model
            is made.
        seed: the seed of all weights; the same on every rank.
        how: further arguments of ``from_config`` (``dtype``, ``attn_implementation``).

    Raises:
        ConfigError: the configuration is malformed.
        PipelineError: the model has no parts to divide it by.
    """
    parallel = _parallel_of(config)
    whole = _on_meta(kind, "", {"config": made_of, **how})
    foreign = _foreign_parts(whole, parallel) if parallel.runs_pipeline else ()
    given = {"config": whole.config, "state_dict": {}, **how}
    return _opened_without(foreign, type(whole), None, given, seed).train()


def _parallel_of(config: ConfigOrPlan) -> ParallelConfig:
    loaded = load_config_or_plan(config)
    return loaded.parallel_config if isinstance(loaded, ActSwapConfig) else ParallelConfig()


def _foreign_parts(whole: PreTrainedModel, parallel: ParallelConfig) -> tuple[str, ...]:
    structure = model_structure(whole)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = int(os.environ.get("RANK", "0")), started_processes(os.environ)
    stage = stage_of_rank(rank, world_size, parallel.pipeline_stage)
    return StagedModel(whole, structure, layout_of(structure, parallel), stage).foreign_parts()


def _on_meta(kind: Any, source: str | os.PathLike[str], how: Mapping[str, Any]) -> PreTrainedModel:
    trusts = {name: how[name] for name in ("trust_remote_code",) if name in how}
    config = how.get("config")
    if config is None:
        of_hub = {name: how[name] for name in _OF_THE_HUB if name in how}
        config = AutoConfig.from_pretrained(source, **of_hub, **trusts)
    with torch.device("meta"):
        made: PreTrainedModel = (
            kind(config) if issubclass(kind, PreTrainedModel) else kind.from_config(config, **trusts)
        )
    return made


def _and(names: Any, more: set[str]) -> Any:
    """Return names of a model's class and more; a model has a set, in older releases a list or ``None``."""
    kind = list if names is None else type(names)
    return kind([*(names or ()), *more])


def _but(names: Any, fewer: set[str]) -> Any:
    return None if names is None else type(names)(name for name in names if name not in fewer)


def _opened_without(
    foreign: tuple[str, ...],
    kind: type[PreTrainedModel],
    source: Any,
    how: Mapping[str, Any],
    seed: int | None = None,
) -> PreTrainedModel:
    """Load a model without the modules at paths ``foreign``; then put these back, on ``meta``.

    Args:
        foreign: paths of the modules of other stages.
        kind, source, how: see `stage_from_pretrained`.
        seed: each module draws its weights from a seed of its own; ``None``: from the global generator.
    """
    taken: dict[str, nn.Module] = {}
    tied: dict[str, str] = {}
    absent: set[str] = set()

    @functools.wraps(kind.__init__)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        if seed is not None:
            _draw_by_name(self, seed)
            # transformers would list all weights in a warning
            self._keys_to_ignore_on_load_missing = _and(self._keys_to_ignore_on_load_missing, {""})
        for path in foreign:
            taken[path] = self.get_submodule(path)
            self.set_submodule(path, nn.Identity())
        tied.update(self.all_tied_weights_keys)
        absent.update(f"{path}.{name}" for path in taken for name, _ in taken[path].named_parameters())
        self.all_tied_weights_keys = {
            name: other for name, other in tied.items() if absent.isdisjoint((name, other))
        }

    known, quiet = kind._keys_to_ignore_on_load_unexpected, {rf"^{re.escape(path)}\." for path in foreign}
    names: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__init__": construct,
        "_keys_to_ignore_on_load_unexpected": _and(known, quiet),
    }
    opening: Any = type(kind.__name__, (kind,), names)
    model: Any = opening.from_pretrained(source, **how)
    for path, module in taken.items():
        model.set_submodule(path, module)
        for name, parameter in module.named_parameters(prefix=path):  # as transformers does after loading
            if any(kept in name for kept in model._get_dtype_plan(model.dtype)):
                parameter.data = parameter.data.float()
            parameter.requires_grad_(parameter.is_floating_point())
    if seed is not None:
        model._keys_to_ignore_on_load_missing = _but(model._keys_to_ignore_on_load_missing, {""})
        for module in model.modules():
            vars(module).pop("_init_weights", None)
    model.__class__, model.all_tied_weights_keys = kind, tied
    model._keys_to_ignore_on_load_unexpected = _but(model._keys_to_ignore_on_load_unexpected, quiet)
    if not absent.isdisjoint((*tied, *tied.values())):
        model.tie_weights()  # those on meta
    found: PreTrainedModel = model.eval()
    return found


def _draw_by_name(model: PreTrainedModel, seed: int) -> None:
    """Let each module of a model draw its first weights from a seed of its own."""
    names = {module: name for name, module in model.named_modules()}

    def drawn(draw: Callable[[nn.Module], None], module: nn.Module) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(zlib.crc32(f"{seed} {names.get(module)}".encode()))
            draw(module)

    for module in names:
        if isinstance(module, PreTrainedModel):
            vars(module)["_init_weights"] = functools.partial(drawn, module._init_weights)
