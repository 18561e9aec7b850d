"""The methods that are measured on a model: our plans, the planner, and methods of other libraries.

Every method is a context manager that takes a `TrainingStep` and its options, puts the method on the model,
and removes it at exit, so that the next row finds the model as it was. The planner trains until its plan is
stable, within a budget that is taken from the peaks of other methods.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_actswap
from benchmarks.meters import give_back_cached_memory
from benchmarks.records import Result
from benchmarks.workloads import TrainingStep, layer_saved_bytes, layer_weight_bytes, timed_step_ms
from hf_actswap import AppliedPlan
from hf_actswap.apply import plan_while_training
from hf_actswap.config import load_config
from hf_actswap.engine import SwapStats
from hf_actswap.engine.host_memory import available_bytes
from hf_actswap.plan import MemoryPlan, model_structure, resolve_plan
from hf_actswap.planner import CountingMeter, PlannedTraining, Planner
from hf_actswap.planner.plan_file import best_trial

TRL_MODULE = "trl.models.activation_offloading"
"""It imports only torch, psutil, accelerate and transformers, because TRL's packages load the rest lazily."""
_SHARE_OF_HOST_MEMORY = 0.6
_PINNED_OVER_SAVED = 1.3
"""PyTorch's pinned allocator rounds each tensor up to a power of two."""


GIB = 2**30
MOST_STEPS = 24
"""The most steps before a planner is measured even if not stable; ``steps_to_stable`` is then ``None``."""


@dataclass(frozen=True)
class Budget:
    """The planner's memory budget, from the peaks of other methods on the same workload.

    One of the three arguments is set.

    Args:
        peak_of: name of a row whose peak is the budget.
        share: fraction of eager's activation peak; memory that is not activations is added.
        reduce_share: fraction of eager's activation peak by which the peak shall fall (``reduce_by_gib``).
    """

    peak_of: str = ""
    share: float = 0.0
    reduce_share: float = 0.0

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the rows, beside eager, that must be measured before."""
        return (self.peak_of,) if self.peak_of else ()

    def options(self, compiles: bool, results: Sequence[Result]) -> dict[str, Any] | str:
        """Return the options for a row's setup, or a text that says why the budget is not known.

        Peaks are those of reserved memory if the allocator counts it, because the planner limits that.
        """
        found = {result.method: result for result in results}
        eager, base = found.get("eager"), found.get(self.peak_of or "eager")
        unknown = f"its budget is the peak of {self.peak_of or 'eager'}, which was not measured"
        if eager is None or not eager.activation_bytes or _peak_bytes(eager) is None:
            return unknown
        if base is None or base.ms is None or (peak := _peak_bytes(base)) is None:
            return unknown
        fall_bytes = (self.reduce_share or 1 - self.share) * eager.activation_bytes
        if not self.peak_of:
            peak -= round(fall_bytes)
        by_fall, by_peak = {"reduce_by_gib": fall_bytes / GIB}, {"budget_gib": peak / GIB}
        memory = by_fall if self.reduce_share else by_peak
        planned = {"memory": memory, "budget_bytes": peak}
        return {"planned": planned} if compiles else planned


def _peak_bytes(result: Result) -> int | None:
    return result.peak_reserved_bytes or result.peak_allocated_bytes


@dataclass
class Planned:
    """A planner in the place of an applied plan, with its budget and the steps until it was stable."""

    planner: Planner
    budget_bytes: int
    step_ms: list[float] = field(default_factory=list)

    @property
    def plan(self) -> MemoryPlan:
        return self.planner.plan

    def stats(self) -> SwapStats:
        return self.planner.stats()

    def fill(self, result: Result) -> None:
        """Write the planner's own numbers into a row."""
        best = best_trial(self.planner.trials, self.budget_bytes)
        result.budget_bytes = self.budget_bytes
        result.planner_step_ms = self.step_ms
        result.steps_to_stable = len(self.step_ms) if self.planner.phase == "stable" else None
        result.planning_s = max(self.planner.planning_s, default=None)
        result.trials = len(self.planner.trials)
        if best is not None:
            result.predicted_peak_bytes = best.prediction.peak_bytes
            result.predicted_ms = best.prediction.step_ms


@contextmanager
def actswap_plan(step: TrainingStep, options: Mapping[str, Any]) -> Iterator[Planned]:
    """Train until the planner's plan is stable, and keep it on the model within the block.

    Args:
        step: model and input; its context is replaced by one that calls `Planner.step_ended`.
        options: ``memory``: keys of that section; ``budget_bytes``: the budget that they give.
    """
    planned = _start(step, options)
    before = step.context

    @contextmanager
    def ending_steps() -> Iterator[None]:
        with before():
            yield
        planned.planner.step_ended()

    step.context = ending_steps
    try:
        while planned.planner.phase != "stable" and len(planned.step_ms) < MOST_STEPS:
            planned.step_ms.append(timed_step_ms(step))
        yield planned
    finally:
        step.context = before
        planned.planner.remove()
        give_back_cached_memory(step.device)


def _start(step: TrainingStep, options: Mapping[str, Any]) -> Planned:
    config = load_config({"memory": {"mode": "adaptive", **options["memory"]}})
    shape = model_structure(step.model)
    meter = None
    if step.device.type == "cpu":  # counts the same storages as the frontier, without a limit
        meter = CountingMeter()
        leaves = step.leaves().values()
        meter.own(item for leaf in leaves for item in (leaf.detach(), leaf.grad) if item is not None)
    plan = resolve_plan(config, shape)
    training = PlannedTraining(step.model, shape, plan, config.memory, counts_steps=False)
    return Planned(plan_while_training(training, meter=meter), options["budget_bytes"])


Setup = Callable[[TrainingStep, Any], AbstractContextManager[AppliedPlan | Planned | None]]
"""A method: takes the step and the row's configuration; its context has the applied plan, or ``None``."""

Obstacle = Callable[[TrainingStep], str]
"""Function of a step that returns why a row cannot be measured with it; ``""``: it can."""


def nothing(_step: TrainingStep, _options: object) -> AbstractContextManager[None]:
    """Leave the model as it is."""
    return nullcontext()


@contextmanager
def hf_checkpointing(step: TrainingStep, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Switch on transformers' own checkpointing of whole layers; ``options`` are its arguments."""
    name = "activation" if hasattr(step.model, "activation_checkpointing_enable") else "gradient"  # older
    with _hooks_restored(step.model):
        getattr(step.model, f"{name}_checkpointing_enable")(**(options or {}))
        try:
            yield None
        finally:
            getattr(step.model, f"{name}_checkpointing_disable")()


def save_on_cpu(step: TrainingStep, _options: object) -> AbstractContextManager[None]:
    """Put ``torch.autograd.graph.save_on_cpu`` around every step: all saved tensors, weights included."""
    kind = step.device.type
    return _with_context(step, lambda: torch.autograd.graph.save_on_cpu(kind != "cpu", device_type=kind))


def flash_attention(step: TrainingStep, _options: object) -> AbstractContextManager[None]:
    """Run every step with flash attention, as those that compare gradients do, and not with the default."""
    return _with_context(step, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))


@contextmanager
def trl_offloading(step: TrainingStep, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Put TRL's activation offloading around every step, as its trainers do.

    With the option ``checkpointing`` transformers' checkpointing is used as well. Hooks that TRL leaves on an
    output head are removed at exit.
    """
    module = import_module(TRL_MODULE)
    with ExitStack() as stack:
        stack.enter_context(_hooks_restored(step.model))
        if (options or {}).get("checkpointing"):
            stack.enter_context(hf_checkpointing(step, None))
        manager = module.get_act_offloading_ctx_manager(step.model, warn_if_no_head=False)
        stack.enter_context(_with_context(step, lambda: manager))
        yield None


@contextmanager
def liger_checkpointing(step: TrainingStep, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Put Liger's fused head and loss on a whole model, and switch on transformers' checkpointing of layers.

    With the option ``tiled_mlp`` Liger's tiled MLPs are used as well, with tiles of the size that it chooses.
    Its other kernels are not used: they replace names in transformers for good.
    """
    put_on = import_module("liger_kernel.transformers").apply_liger_kernel_to_llama
    with ExitStack() as stack:
        stack.enter_context(hf_checkpointing(step, None))
        stack.callback(vars(step.model).pop, "forward", None)
        put_on(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, model=step.model)
        if (options or {}).get("tiled_mlp"):
            in_tiles = import_module("liger_kernel.ops.tiled_mlp").apply_tiled_mlp
            for mlp in (layer.mlp for layer in step.decoder_layers):
                stack.callback(vars(mlp).pop, "forward")
                mlp.forward = partial(in_tiles, type(mlp).forward, mlp)
        yield None


@contextmanager
def _with_context(step: TrainingStep, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    before, step.context = step.context, context
    try:
        yield None
    finally:
        step.context = before


@contextmanager
def _hooks_restored(model: nn.Module) -> Iterator[None]:
    """At the end of the block remove the forward hooks that were added in it, also those without a handle."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    tables = [getattr(module, name) for module in model.modules() for name in names]
    before = [set(table) for table in tables]
    try:
        yield
    finally:
        for table, known in zip(tables, before, strict=True):
            for key in set(table) - known:
                del table[key]


@contextmanager
def compiled(step: TrainingStep, options: Mapping[str, Any] | None) -> Iterator[AppliedPlan | Planned | None]:
    """Compile each layer by itself.

    Args:
        step: model and input; its layers share one graph, so that one compilation serves them all.
        options: ``memory_budget``: the partitioner's activation memory budget, 0 to 1; ``checkpointing``:
            transformers' checkpointing, inside the compiled layers; ``actswap``: a configuration of
            hf_actswap, applied to the compiled layers; ``planned``: in place of it, the options of
            `actswap_plan`; ``backend``: the backend of ``torch.compile``.
    """
    options = options or {}
    layers = step.decoder_layers
    budget = options.get("memory_budget", 1.0)
    with ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        for layer in layers:  # there is no public way back from Module.compile
            stack.callback(setattr, layer, "_compiled_call_impl", None)
        # Read while the layers are traced, in the first steps: the setting must outlast this function.
        stack.enter_context(functorch_config.patch(activation_memory_budget=budget))
        if options.get("checkpointing"):
            stack.enter_context(hf_checkpointing(step, None))
        for layer in layers:
            layer.compile(backend=options.get("backend", "inductor"))
        applied: AppliedPlan | Planned | None = None
        if options.get("planned"):
            applied = stack.enter_context(actswap_plan(step, options["planned"]))
        elif options.get("actswap"):
            applied = stack.enter_context(hf_actswap.apply(step.model, options["actswap"]))
        yield applied


def actswap(step: TrainingStep, config: Any) -> Any:
    """Apply a configuration of hf_actswap; return the `AppliedPlan`, which takes it off again at exit."""
    return hf_actswap.apply(step.model, config)


def no_device(step: TrainingStep) -> str:
    return "the CPU has no memory of its own to offload from" if step.device.type == "cpu" else ""


def no_room_on_host(step: TrainingStep) -> str:
    workload = step.workload
    # A storage that is saved twice is copied twice, and transposed weights are copied too.
    of_a_layer = 1.4 * layer_saved_bytes(workload) + layer_weight_bytes(workload)
    needed = workload.layers * of_a_layer * _PINNED_OVER_SAVED
    available = available_bytes()
    if no_device(step) or available is None or needed <= _SHARE_OF_HOST_MEMORY * available:
        return no_device(step)
    return f"about {needed / 2**30:.0f} GiB of pinned memory, of {available / 2**30:.0f} GiB that are free"


def no_head(step: TrainingStep) -> str:
    return "" if step.workload.head else "it has no head and no loss: a preset of a whole model has"


def no_trl(step: TrainingStep) -> str:
    return no_device(step) or _not_imported(TRL_MODULE, "pip install 'hf-actswap[bench]'")


def no_liger(step: TrainingStep) -> str:
    if step.device.type == "cpu":
        return "Liger's kernels are Triton's, which has none for the CPU"
    return _not_imported("liger_kernel.transformers", "pip install liger-kernel")


def _not_imported(module: str, hint: str) -> str:
    try:
        import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported ({error}): {hint}, or let PYTHONPATH name a folder that has it"
    return ""


def no_compiler(step: TrainingStep) -> str:  # which inductor calls on the CPU
    missing = step.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++")))
    return "there is no C++ compiler" if missing else ""
