"""`ActSwapCallback` divides the Trainer's model, applies a plan while it trains, and logs statistics."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import TrainingArguments

from ..apply import (
    apply_plan,
    optimizer_in_backward,
    plan_while_training,
    say_what_to_know_of,
    set_weights_aside,
    sets_weights_aside,
)
from ..config import ActSwapConfig
from ..config.sizes import gib_text
from ..config.validation import is_off_word
from ..engine import AppliedPlan, Resources, SwapStats
from ..errors import ActSwapError, ConfigError, PlanError, Problem, short_traceback
from ..parallel import tensor_parallel_group
from ..parallel.mesh import reject_independent_processes, started_together
from ..parallel.rank_agreement import LostRanks, failing_together, parameters_fact
from ..plan import (
    ConfigOrPlan,
    MemoryPlan,
    ModelStructure,
    load_config_or_plan,
    model_structure,
    resolve_plan,
)
from ..plan.wrappers import WithoutCheckpointing, is_checkpointed, is_compiled
from ..planner import OptimizerInBackward, PlannedTraining, Planner
from ..planner.memory_errors import naming_memory_errors
from ..releases import compiled_regions_are_called
from ..report import PinningBar, Saving, console_logging, plan_summary, plan_table
from ..report.run_files import LOGS
from ..run_environment import EndedTraining, tell_run
from ..stream import ChunkBudget
from .checkpointing import (
    check_what_was_written,
    default_of,
    needs_its_place,
    problems_of_other_methods,
    without_checkpointing_argument,
)
from .parallel_checkpoint import checkpoint_fact, checkpoint_folder
from .parallel_limits import USE_OUR_TRAINER, ParallelTrainingError, reject_unsupported
from .parallel_training import DividedTraining, begin_parallel_training
from .pipeline_training import pipeline_of, stage_model
from .run_record import RunRecord
from .shared_config import facts_to_compare, worker_log


def weight_owners(trainer: Any) -> list[str]:
    """Return what places a Trainer's weights in its stead."""
    return [name for name in ("fsdp", "deepspeed") if getattr(trainer, f"is_{name}_enabled", False)]


_AGREED_ARGUMENTS = (
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


def _begin_for_trainer(trainer: Any, config: ActSwapConfig) -> DividedTraining:
    """Divide a Trainer's model among the ranks, in layers or stages, and prepare the Trainer for it.

    Every rank must call it, with the same configuration.
    """
    limit_s, asked = trainer.args.ddp_timeout, config.parallel_config
    agreed = {name: str(getattr(trainer.args, name, None)) for name in _AGREED_ARGUMENTS}
    parallel: DividedTraining
    if asked.runs_pipeline:
        with failing_together("pipeline", limit_s) as facts:
            facts.update(agreed, parameters=parameters_fact(trainer.model))
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


CHECKPOINT_PLAN = "actswap_plan.json"
"""The plan of a planner in a checkpoint's folder, as a plan file."""


def calling_trainer(callback: TrainerCallback) -> Any:
    """Return the Trainer whose event is running, read off the call stack, or ``None``.

    The Trainer does not hand itself to its events, and has none for an exception. The frame that raised the
    event is a method of the Trainer.
    """
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        handler = getattr(candidate, "callback_handler", None)
        if handler is not None and callback in handler.callbacks:
            return candidate
        frame = frame.f_back
    return None


def _read_gradients_later(callback: TrainerCallback) -> list[Problem]:
    """Return a problem for each callback of the user that acts between backward and the optimizer's step."""
    handler = getattr(calling_trainer(callback), "callback_handler", None)
    kinds = dict.fromkeys(map(type, getattr(handler, "callbacks", ())))
    stock = TrainerCallback.on_pre_optimizer_step
    return [
        replace(_READ_LATER, found=f"{kind.__module__}.{kind.__qualname__}")
        for kind in kinds
        if getattr(kind, stock.__name__) is not stock and kind.__module__.split(".")[0] not in _OWN_PACKAGES
    ]


def called_model(trainer: Any, model: nn.Module) -> nn.Module:
    """Return the model that ``trainer`` calls in training, if that is compiled; else ``model``.

    An event is given the bare model. By the time of ``on_train_begin`` a Trainer that compiles trains another
    object, ``model_wrapped``: ``torch.compile``'s wrapper, into whose graph hooks on the bare model would be
    traced; or, under regional compilation, a shallow copy of the model with compiled modules in it, beside
    which hooks on the bare model would never run.
    """
    wrapped = getattr(trainer, "model_wrapped", None)
    if isinstance(wrapped, nn.Module) and any(map(is_compiled, wrapped.modules())):
        return wrapped
    return model


def compiled_for(called: nn.Module, bare: nn.Module) -> bool:
    """Whether what a Trainer calls is a copy of its model in which layers were compiled one by one."""
    by_trainer = called is not bare and not is_compiled(called)
    return by_trainer and not any(map(is_compiled, bare.modules()))


logger = logging.getLogger(__name__)

_SEVERAL_DEVICES = Problem(
    "training arguments",
    "one process per device",
    "several devices in one process, which the Trainer drives by nn.DataParallel",
    "Start with `accelerate launch` or torchrun, or show it one device (CUDA_VISIBLE_DEVICES=0).",
)


_CLIPPED_LATER = Problem(
    "max_grad_norm",
    "0 beside memory.optimizer_in_backward, because no gradient is left to clip after backward",
    "",
    "Set it to 0; memory.in_backward_clip_value or in_backward_clip_last_norm clips in backward.",
)
_READ_LATER = Problem(
    "memory.optimizer_in_backward",
    "no callback with on_pre_optimizer_step: the optimizer has stepped by then, and no gradient is left",
    "",
    "What it changes in gradients would have no effect: use a hook on the parameter (register_hook). What "
    "needs no gradients can be in on_step_end.",
)
_OWN_PACKAGES = ("transformers", "hf_actswap")
_REGIONS_NOT_CALLED = Problem(
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    "accelerate 1.15 or newer beside a plan",
    "an older one, whose compiled layers are not called in mixed precision",
    'pip install "accelerate>=1.15", or compile the layers yourself: layer.compile().',
)
_ADDED_LATER = Problem(
    "parallel_config", "a callback of the Trainer's constructor", "add_callback", USE_OUR_TRAINER
)
_OWNED_WEIGHTS = Problem(
    "memory.weights",
    "",
    "host",
    "It owns the weights, and moves them itself: leave weights: host out, or train without it (DDP).",
)

_SHOWN = ("actswap_stall_ms",)
"""The statistics of a step in the log, beside peak and saving; ``log: full`` has all."""
_SAID_SHARE = 0.01
"""Of what is swapped: less than that staying on the device is not worth a warning. The planner's plans leave
the small tensors of an op whose large ones they swap."""

_IGNORED = "%s is ignored: the Trainer was given another ActSwapCallback."
_DOES_NOTHING = (
    'Nothing is swapped or recomputed: %s. actswap="auto" looks for a plan with all that the device has.'
)


class ActSwapCallback(TrainerCallback):
    """Puts a configuration on the model while the Trainer trains.

    At train begin the plan is applied to the model, to the compiled one under ``torch_compile``; rank 0 logs
    what it does, and shows a bar while host memory is page-locked. Peak, saving and waits of the last
    optimizer step go into the Trainer's log, and so to trackers; a line at the end sums them up. With
    ``log: full`` or ``reference`` the plan is a table, the log has all statistics, and every rank writes its
    lines to ``<output_dir>/worker_<rank>.log``, also windows that ``auto`` chooses later. The plan that a
    planner has found is written into each checkpoint, and used when the training goes on from there. The
    plan is removed when ``Trainer.train`` ends, also by an exception.

    Pass it to the Trainer's constructor (``callbacks=[...]``). Added later (``add_callback``) it applies and
    removes too, but until `bind` is called its statistics reach no log, and an exception in ``train`` leaves
    the plan on the model until the next ``train``, or until `remove`.

    With ``parallel_config.tensor_parallel_size`` above 1, or a pipeline, the model is divided among the ranks
    when the Trainer is constructed. That takes `ActSwapTrainer` or `ActSwapTrainerMixin`.

    Args:
        args: `ActSwapTrainingArguments`, or a configuration in any form that `load_config` takes, or a plan
            or its file.

    Attributes:
        applied: the plan on the model, or the planner that changes it, or ``None`` outside training.
        parallel: the training of a divided model, from the Trainer's construction on; ``None``: the model is
            not divided.

    Raises:
        ConfigError: the configuration is malformed. With several processes the Trainer's construction raises
            it, and ranks whose own configuration is valid raise `RankAgreementError`.
        PlanError: the plan is malformed; raised in the same places.
    """

    @short_traceback
    def __init__(self, args: TrainingArguments | ConfigOrPlan) -> None:
        self._source = getattr(args, "actswap", None) if isinstance(args, TrainingArguments) else args
        self._requested: ActSwapConfig | MemoryPlan = ActSwapConfig()
        self._fault: ActSwapError | None = None
        try:
            self._requested = load_config_or_plan(self._source)
        except (ConfigError, PlanError) as error:
            if not started_together():
                raise
            self._fault = error  # for `on_init_end`, where it is reported to the other ranks
        self._before = SwapStats()
        self._step = SwapStats()
        self._logged: MemoryPlan | None = None
        self._record: RunRecord | None = None
        self._saving: Saving | None = None
        self._in_backward: OptimizerInBackward | None = None
        self._bound = self._bytes_said = False
        self._resumed_from: str | None = None
        self.applied: AppliedPlan | Planner | None = None
        self.parallel: DividedTraining | None = None

    @property
    def _config(self) -> ActSwapConfig:
        return self._requested if isinstance(self._requested, ActSwapConfig) else ActSwapConfig()

    def _plan_for(self, structure: ModelStructure) -> MemoryPlan:
        asked = self._requested
        return asked if isinstance(asked, MemoryPlan) else resolve_plan(asked, structure)

    @property
    def _shows_all(self) -> bool:
        return self._config.log != "summary"

    @property
    def _divides(self) -> bool:
        parallel = self._config.parallel_config
        return parallel.tensor_parallel_size > 1 or parallel.runs_pipeline

    @short_traceback
    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Find the Trainer, which the event does not pass; wrap its methods (`bind`), divide its model.

        Frozen weights that wait on the host (``memory: {weights: host}``) are set aside here, before the
        Trainer moves the model to its device, and stay there after ``train``: evaluation needs them as well.

        Raises:
            MeshError: the launcher started processes that would each train alone, or too few processes.
            ParallelTrainingError, RankAgreementError, PatchError: the model cannot be divided as asked.
        """
        with failing_together("configuration of the callback", args.ddp_timeout) as facts:
            reject_independent_processes(args.world_size)
            if self._fault is not None:
                raise self._fault
            facts.update(facts_to_compare(self._requested))
        trainer = calling_trainer(self)
        if trainer is None:
            logger.warning("No Trainer found: the statistics stay in `applied.stats()` and reach no log.")
            return
        self.bind(trainer)
        with failing_together("frozen weights", args.ddp_timeout):
            owners = weight_owners(trainer)
            aside = sets_weights_aside(self._requested, trainer.model, args.device, owners)
            if aside and owners:
                raise PlanError([replace(_OWNED_WEIGHTS, expected=f"keep beside {name}") for name in owners])
            if aside:
                set_weights_aside(self._requested, trainer.model)
        if self._divides:
            with console_logging(logging.getLogger("hf_actswap")):
                self.parallel = _begin_for_trainer(trainer, self._config)
                self.parallel.shows_bars = not args.disable_tqdm

    def bind(self, trainer: Any) -> None:
        """Wrap methods of a Trainer: ``train`` removes the plan at its end, ``log`` adds the statistics.

        Under a planner ``training_step`` runs a micro-batch again if memory runs out. An error of ``train``
        names ranks that have ended (`LostRankError`), or the plan under which memory ran out.
        """
        train, log, step = trainer.train, trainer.log, trainer.training_step

        @short_traceback
        @functools.wraps(train)
        def train_and_remove(*args: Any, **kwargs: Any) -> Any:
            if self.parallel is not None:
                self.parallel.replace_fused_head()  # TRL adds one when the Trainer is constructed
            with failing_together("checkpoint", trainer.args.ddp_timeout) as facts:
                asked = kwargs.get("resume_from_checkpoint", next(iter(args), None))
                facts["resume_from_checkpoint"] = checkpoint_fact(asked, trainer.args.output_dir)
            folder = checkpoint_folder(asked, trainer.args.output_dir)
            self._resumed_from = None if folder is None else os.path.join(folder, CHECKPOINT_PLAN)
            lost_ranks = LostRanks() if self.parallel is None else self.parallel.lost_ranks
            with lost_ranks.named():
                try:
                    with naming_memory_errors(lambda: self.applied if self._acts() else None):
                        found = train(*args, **kwargs)
                finally:
                    self.remove()
            self._say_saving()
            return found

        @functools.wraps(log)
        def log_with_statistics(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if self._in_backward is not None and "grad_norm" in logs:
                norm = self._in_backward.grad_norm  # the Trainer finds no gradients, and says 0
                logs = {**logs, "grad_norm": 0.0 if norm is None else norm.item()}
            if self.applied is not None and "loss" in logs:
                every = self._step.as_log()
                shown = every if self._shows_all else {name: every[name] for name in _SHOWN}
                logs = {**logs, **shown}
                if self._record is not None:
                    logs.update(self._record.as_log(self._shows_all))
                    self._record.logged({"step": trainer.state.global_step, **logs})
            if self._record is not None and "train_loss" in logs:
                logs.update(self._record.as_log(self._shows_all))  # `train` returns these numbers too
            return log(logs, *args, **kwargs)

        @functools.wraps(step)
        def step_with_retry(*args: Any, **kwargs: Any) -> Any:
            if isinstance(self.applied, Planner):
                return self.applied.micro_batch(lambda: step(*args, **kwargs))
            return step(*args, **kwargs)

        self._bound = True
        trainer.train, trainer.log = train_and_remove, log_with_statistics
        trainer.training_step = step_with_retry

    @short_traceback
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the plan. Raises `PlanError` or `ParallelTrainingError`, before the first step."""
        self.remove()  # auto_find_batch_size starts training again without the event of its end
        if kwargs.get("model") is None:
            raise ValueError("ActSwapCallback needs the model: it is a callback of the Trainer")
        model = called_model(calling_trainer(self), kwargs["model"])
        with ExitStack() as undo:
            with self._console_on_rank_0(state), failing_together("checkpointing", args.ddp_timeout):
                checkpointing = self._take_over(model, args, undo)
            plan, own, self.applied = self._put_on_model(model, args, state, kwargs, checkpointing)
            self.applied.on_remove(undo.pop_all().close)
        if isinstance(self.applied, Planner):
            self.applied.logging_context = functools.partial(self._console_on_rank_0, state)
        self._before = self._step = SwapStats()
        self._logged, self._bytes_said = self.applied.plan, False
        self._record = self._begin_record(args, state, model, kwargs.get("optimizer"))
        if self._shows_all:
            with worker_log(_worker_path(args)) as worker:
                _log_plan(worker, own, self._config.notes)
        if state.is_world_process_zero:
            with console_logging(logger):
                self._say_plan(plan)

    def _take_over(
        self, model: nn.Module, args: TrainingArguments, undo: ExitStack
    ) -> WithoutCheckpointing | None:
        """Switch gradient checkpointing off if the planner decides, or if only a default asks for it.

        Returns what the planner has switched off.
        """
        if self._config.memory.mode == "adaptive":
            off = WithoutCheckpointing(model)
            undo.callback(off.undo)
            undo.callback(without_checkpointing_argument(args))
            return off
        elif self.parallel is None and any(map(is_checkpointed, model.modules())):
            with ExitStack() as on_again:
                on_again.callback(WithoutCheckpointing(model, reason="").undo)
                plan = self._plan_for(model_structure(model))
            check_what_was_written(plan)
            if (owner := default_of(args)) is not None and needs_its_place(plan):
                reason = f"({owner} has it on by default): the plan takes its place; it is on again after it"
                undo.callback(WithoutCheckpointing(model, reason).undo)
                undo.callback(without_checkpointing_argument(args))
        return None

    def _say_plan(self, plan: MemoryPlan) -> None:
        config, applied = self._config, self.applied
        notes = list(config.notes)
        if not self._shows_all and len(notes) > 1:
            notes[1:] = [f"{len(notes) - 1} more note(s) on the configuration (`log: full` lists them)."]
        _log_plan(logger, plan, notes, logging.INFO if config.log == "reference" else logging.DEBUG)
        searches = isinstance(applied, Planner) and applied.phase != "stable"
        if isinstance(applied, Planner) and not searches:
            plan = applied.plan
        if plan.does_anything or (self._divides and self._shows_all):
            self._show(plan, "")
        elif not searches and not self._divides and not self._moves_others:
            intended = isinstance(self._requested, MemoryPlan)  # a plan was found, and the step fits without
            logger.log(logging.INFO if intended else logging.WARNING, _DOES_NOTHING, self._why_nothing())

    @property
    def _moves_others(self) -> bool:
        """Whether the optimizer steps in backward, or its states or frozen weights wait on the host."""
        applied = self.applied
        moved = (applied.optimizer_states, applied.weights) if isinstance(applied, Planner) else ()
        return self._in_backward is not None or any(one is not None for one in moved)

    def _show(self, plan: MemoryPlan, title: str) -> None:
        if self._shows_all:
            logger.info("%s", f"{title}\n{plan_table(plan)}")
            return
        structure = None if self.applied is None else self.applied.structure
        for line in plan_summary(plan, structure):
            logger.info("%s", line)

    def _put_on_model(
        self,
        model: nn.Module,
        args: TrainingArguments,
        state: TrainerState,
        event: Mapping[str, Any],
        checkpointing: WithoutCheckpointing | None,
    ) -> tuple[MemoryPlan, MemoryPlan, AppliedPlan | Planner]:
        """Apply the plan to the model; return the whole model's plan, this rank's, and what is on it."""
        requested, config, parallel = self._requested, self._config, self.parallel
        group = None if parallel is None else parallel.tensor_group
        with nullcontext() if group is None else tensor_parallel_group(group):
            with failing_together("plan", args.ddp_timeout) as facts:
                if args.n_gpu > 1:
                    raise PlanError([_SEVERAL_DEVICES])
                if self._divides and parallel is None:
                    raise ParallelTrainingError([_ADDED_LATER])
                mixed = args.bf16 or args.fp16
                if mixed and compiled_for(model, event["model"]) and not compiled_regions_are_called():
                    raise PlanError([_REGIONS_NOT_CALLED])
                if config.memory.optimizer_in_backward and args.max_grad_norm:
                    raise PlanError([replace(_CLIPPED_LATER, found=f"{args.max_grad_norm:g}")])
                if config.memory.optimizer_in_backward and (problems := _read_gradients_later(self)):
                    raise PlanError(problems)
                with nullcontext() if parallel is None else parallel.whole_model():
                    structure = model_structure(model)
                plan = self._plan_for(structure)
                if plan.does_anything or config.memory.mode != "off":
                    trainer = calling_trainer(self)
                    callbacks = [] if trainer is None else trainer.callback_handler.callbacks
                    if problems := problems_of_other_methods(args, callbacks):
                        raise PlanError(problems)
                if parallel is not None:
                    facts.update(parallel.expect_batches(event.get("train_dataloader")))
            with self._console_on_rank_0(state):
                if isinstance(requested, MemoryPlan):
                    say_what_to_know_of(self._source, requested, structure)
                own = plan if parallel is None else parallel.plan_of_rank(plan)
            training = PlannedTraining(
                model,
                structure,
                own,
                config.memory,
                event.get("optimizer"),
                counts_steps=False,
                micro_batches=args.gradient_accumulation_steps,
                earlier_plan=self._resumed_from,
                checkpointing=checkpointing,
            )
            with self._console_on_rank_0(state):
                applied = self._put_on(training, args, state)
                self._in_backward = optimizer_in_backward(
                    model, config.memory, training.optimizer, applied, reads_norm=True
                )
            return plan, own, applied

    def _put_on(
        self, training: PlannedTraining, args: TrainingArguments, state: TrainerState
    ) -> AppliedPlan | Planner:
        """Put this rank's plan on the model, or start the planner that looks for one."""
        silent = PinningBar(shown=False) if args.disable_tqdm and state.is_world_process_zero else None
        parallel, memory, plan = self.parallel, training.memory, training.fixed
        passes = None if parallel is None else parallel.passes
        resources = Resources(progress=silent, passes=passes)
        if memory.mode == "off" or plan.streamed is not None:
            budget = None
            if memory.mode != "off":
                accumulates = args.gradient_accumulation_steps > 1
                budget = ChunkBudget(memory, training.optimizer, accumulates=accumulates)
            return apply_plan(training.model, plan, training.structure, resources, budget)
        if parallel is not None:
            training = parallel.training_of_rank(training, args.gradient_accumulation_steps)
        with self._console_on_rank_0(state), self._planners_agreeing():
            written = self._config if passes is None else None
            planner = plan_while_training(training, resources, written=written)
        if parallel is not None:
            parallel.phase = lambda: planner.phase
        if args.disable_tqdm:
            planner.progress = None
        return planner

    def _planners_agreeing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.parallel is None else self.parallel.planners_agreeing()

    def _begin_record(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, optimizer: Any
    ) -> RunRecord | None:
        """Begin a record on rank 0, in a pipeline on one rank of each stage."""
        parallel, config = self.parallel, self._requested
        stage = parallel.recorded_stage if parallel else 0 if state.is_world_process_zero else None
        if stage is None or self.applied is None:
            return None
        folder, logs = args.output_dir or ".", "tensorboard" in (args.report_to or ())
        beside_logs = os.path.join(folder, LOGS) if logs else None
        return RunRecord(
            folder if self._shows_all else beside_logs,
            model,
            self.applied,
            optimizer=optimizer,
            config=config if isinstance(config, ActSwapConfig) else None,
            stage=stage,
            stages=parallel.recorded_stages(args.gradient_accumulation_steps) if parallel else None,
        )

    @property
    def _asks(self) -> bool:
        """Whether a configuration or a plan was given; a word for off is none."""
        return self._source is not None and not is_off_word(self._source)

    def _why_nothing(self) -> str:
        if not self._asks:
            return f"actswap={self._source!r}"
        requested = self._requested
        if isinstance(requested, MemoryPlan):
            return "the plan keeps everything"
        does = "keeps everything" if requested.to_dict() else "is empty"
        return f"the configuration ({requested.source}) {does}"

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Let the planner, and the record of the run if it measures this step, know that it begins."""
        if isinstance(self.applied, Planner):
            self.applied.step_begins()
        if self._record is not None:
            self._record.step_starts()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Raise `UnsummedGradientError` if tagged gradients are not summed (a subclass clips by itself)."""
        if self.parallel is not None:
            self.parallel.check_summed()
        if self._record is not None:
            self._record.optimizer_starts()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Take the statistics of the optimizer step that ends; log changes of the plan in it."""
        if self.applied is None:
            return
        if self._record is not None:
            self._record.step_ends()
        now = self.applied.stats()
        if isinstance(self.applied, Planner):
            with self._planners_agreeing():
                self.applied.step_ended()
        first = not self._before.forwards
        self._step, self._before = now - self._before, now
        if first and state.is_world_process_zero:
            for reason, size_bytes in now.rejected.items():
                if size_bytes > _SAID_SHARE * now.offloaded_bytes:
                    text = "%s a step are swapped by the plan and stay on the device: %s."
                    _say(logging.WARNING, text, gib_text(size_bytes), reason)
        if state.is_world_process_zero and not self._bytes_said:
            self._say_bytes(self.applied)
        self._log_decisions(self.applied.plan, args, state)

    def _say_bytes(self, applied: AppliedPlan | Planner) -> None:
        """Log what a step moves and computes again, after the first one that ran under the final plan."""
        plan = applied.plan
        measures = any(row.fate == "swap" and row.windows is None for row in plan.rows)
        if isinstance(applied, Planner) or plan is not self._logged or measures or not self._step.forwards:
            return
        self._bytes_said = True
        moved, dropped = self._step.offloaded_bytes, applied.dropped_bytes
        if dropped is not None and (moved or dropped):
            again = gib_text(dropped * self._step.forwards)
            text = "A step moves %s to host memory and computes %s again."
            _say(logging.INFO, text, gib_text(moved), again)

    def _log_decisions(self, plan: MemoryPlan, args: TrainingArguments, state: TrainerState) -> None:
        """Log what the engine has added to the plan since it was logged: the windows that ``auto`` chose."""
        if isinstance(self.applied, Planner) and self.applied.phase != "stable":
            return  # the plan on the model is a trial
        logged, self._logged = self._logged, plan
        if logged is None or plan is logged:
            return
        if self._shows_all:
            with worker_log(_worker_path(args), append=True) as worker:
                for adjustment in plan.adjustments:
                    if adjustment not in logged.adjustments:
                        worker.info("%s", adjustment)
        if state.is_world_process_zero and (self._shows_all or isinstance(self.applied, Planner)):
            with console_logging(logger):
                self._show(plan, f"Decided in step {state.global_step}:")

    def _console_on_rank_0(self, state: TrainerState) -> AbstractContextManager[None]:
        package = logging.getLogger("hf_actswap")
        return console_logging(package) if state.is_world_process_zero else nullcontext()

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write the plan that a planner has found into the checkpoint; a training that goes on uses it."""
        if not isinstance(self.applied, Planner):
            return
        folder = os.path.join(args.output_dir or ".", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        path, parallel = os.path.join(folder, CHECKPOINT_PLAN), self.parallel
        with nullcontext() if parallel is None else parallel.storing_plans():
            if os.path.isdir(folder):
                self.applied.write_plan(path if parallel is None else parallel.plan_path(path))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Remove the plan; log how much memory it saved, unless the wrapped ``train`` does (`bind`)."""
        if self._record is not None and state.is_world_process_zero and self._acts():
            self._saving = self._record.saving()
        if self.applied is not None:
            ranks = args.process_index, args.world_size
            out = args.output_dir or "."
            tell_run(EndedTraining.of(self.applied, self._step, out, *ranks, state.global_step))
        self.remove()
        if not self._bound:
            self._say_saving()

    def _acts(self) -> bool:
        applied = self.applied
        return isinstance(applied, Planner) or (applied is not None and applied.plan.does_anything)

    def _say_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            _say(logging.INFO, "%s", saving.in_words())

    def remove(self) -> None:
        """Take the plan off the model. Safe to call again."""
        applied, record = self.applied, self._record
        self.applied = self._record = self._in_backward = None
        if record is not None:
            record.close()
        if applied is not None:
            applied.remove()


class ArgumentsCallback(ActSwapCallback):
    """The callback that a Trainer makes by itself if its arguments are `ActSwapTrainingArguments`.

    It applies their ``actswap``. If the Trainer was given another `ActSwapCallback`, it removes itself.
    """

    _named = "actswap of the training arguments"

    def __init__(self) -> None:
        super().__init__(None)

    def on_init_end(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        """Read ``actswap`` of the arguments, which are known only now; then as `ActSwapCallback`."""
        self._source = self._asked_by(args)
        if self._asks and not self._replaced_by_given_callback(args):
            self._requested = load_config_or_plan(self._source)
            super().on_init_end(args, *others, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the plan. Raises `PlanError` or `ParallelTrainingError`, before the first step."""
        if self._replaced_by_given_callback(args):
            return
        if self._asks:
            super().on_train_begin(args, state, control, **kwargs)
        elif state.is_world_process_zero:
            asked = self._source is not None
            _say(logging.INFO if asked else logging.WARNING, _DOES_NOTHING, self._why_nothing())

    def _asked_by(self, args: TrainingArguments) -> Any:
        return getattr(args, "actswap", None)

    def _gives_way_to(self, other: TrainerCallback, args: TrainingArguments) -> bool:
        if isinstance(other, ArgumentsCallback):  # that of the environment, where the arguments say nothing
            return self._source is None
        return isinstance(other, ActSwapCallback)

    def _replaced_by_given_callback(self, args: TrainingArguments) -> bool:
        trainer = calling_trainer(self)
        callbacks = [] if trainer is None else trainer.callback_handler.callbacks
        others = [item for item in callbacks if item is not self]
        given = next((item for item in others if self._gives_way_to(item, args)), None)
        if given is None:
            return False
        trainer.callback_handler.callbacks = others  # a new list: the event still iterates over the old one
        if self._source not in (None, given._source) and trainer.is_world_process_zero():
            _say(logging.WARNING, _IGNORED, self._named)
        return True


def _say(level: int, text: str, *values: object) -> None:
    with console_logging(logger):
        logger.log(level, text, *values)


def _worker_path(args: TrainingArguments) -> str:
    return os.path.join(args.output_dir or ".", f"worker_{args.process_index}.log")


def _log_plan(
    target: logging.Logger, plan: MemoryPlan, notes: Iterable[str], lines: int = logging.INFO
) -> None:
    """Log the notes at INFO, the reference's lines at ``lines``, and warnings likewise, or above INFO."""
    for note in notes:
        target.info("%s", note)
    for warning in plan.warnings:
        target.log(logging.WARNING if lines == logging.INFO else lines, "%s", warning)
    for line in plan.log_lines():
        target.log(lines, "%s", line)
