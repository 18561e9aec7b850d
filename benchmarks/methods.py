"""What is put on a model before it is measured: our plans, the planner, and what others offer.

Every method is a context manager that takes a `TrainingStep` and its options, puts the mechanism on, and
takes it off again at exit, so that the next row finds the model as it was. The planner trains until its plan
is stable, within a budget that others' peaks give.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

import hf_actswap
from benchmarks.meters import give_back_cached_memory
from benchmarks.records import Result, available_host_bytes
from benchmarks.workloads import TrainingStep, layer_saved_bytes, layer_weight_bytes, timed_step_ms
from hf_actswap import AppliedPlan
from hf_actswap.apply import plan_while_training
from hf_actswap.config import load_config
from hf_actswap.config.keys import RECOMPUTE_KEYS
from hf_actswap.engine import SwapStats
from hf_actswap.plan import MemoryPlan, model_structure, resolve_plan
from hf_actswap.planner import CountingMeter, PlannedTraining, Planner
from hf_actswap.planner.trials import best_trial

TRL_MODULE = "trl.models.activation_offloading"
"""It imports torch, psutil, accelerate and transformers only: trl's packages load the rest lazily."""
TRL_VARIABLE = "HF_ACTSWAP_TRL"
"""Names a folder that holds this one file of TRL, for machines without the rest."""
_TRL_FILE = "trl/models/activation_offloading.py"
LIGER_VARIABLE = "HF_ACTSWAP_LIGER"
"""Names a folder that holds ``liger_kernel``, where it is not installed."""

_SHARE_OF_HOST_MEMORY = 0.6
_PINNED_OVER_SAVED = 1.3
"""PyTorch's pinned allocator rounds each tensor up to a power of two."""


GIB = 2**30
MOST_STEPS = 24
"""Whoever is not stable by then is measured as it is; ``steps_to_stable`` says so."""


@dataclass(frozen=True)
class Budget:
    """What the planner is allowed, from what others took on the same workload.

    Args:
        peak_of: a row whose peak is the budget; ``""``: see ``share``.
        share: of eager's activation peak, added to what is not activations.
        reduce_share: of eager's activation peak, by how much the peak shall fall (``reduce_by_gib``); 0: see
            above.
    """

    peak_of: str = ""
    share: float = 0.0
    reduce_share: float = 0.0

    @property
    def needs(self) -> tuple[str, ...]:
        """Rows that must have been measured before, eager apart."""
        return (self.peak_of,) if self.peak_of else ()

    def memory(self, results: Mapping[str, Result]) -> tuple[dict[str, float], int] | None:
        """Return the key of the ``memory`` section and the budget in bytes, or ``None``: nobody knows.

        Peaks are what the allocator held where there is one: that is what the planner keeps within.

        Args:
            results: of this workload so far, by method.
        """
        eager = results.get("eager")
        if eager is None or not eager.activation_bytes or _peak_bytes(eager) is None:
            return None
        if self.peak_of:
            base = results.get(self.peak_of)
            peak = None if base is None or base.ms is None else _peak_bytes(base)
            return None if peak is None else ({"budget_gib": peak / GIB}, peak)
        kept_share = self.share or 1 - self.reduce_share
        peak = (_peak_bytes(eager) or 0) - round((1 - kept_share) * eager.activation_bytes)
        if self.reduce_share:
            return {"reduce_by_gib": self.reduce_share * eager.activation_bytes / GIB}, peak
        return {"budget_gib": peak / GIB}, peak


def _peak_bytes(result: Result) -> int | None:
    return result.peak_reserved_bytes or result.peak_allocated_bytes


@dataclass
class Planned:
    """A planner that stands where an applied plan stands, and what it took to get there.

    Args:
        planner: on the model.
        budget_bytes: of the row.
        step_ms: of each step until it was stable.
    """

    planner: Planner
    budget_bytes: int
    step_ms: list[float] = field(default_factory=list)

    @property
    def plan(self) -> MemoryPlan:
        """What is on the model."""
        return self.planner.plan

    def stats(self) -> SwapStats:
        """Totals over all plans so far."""
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
    """Train until the planner's plan is stable, and keep it on.

    Args:
        step: its context tells the planner of the end of each step.
        options: ``memory``: keys of the section; ``budget_bytes``: what they come to.
    """
    planned = _start(step, options)
    before, step.context = step.context, _ending_steps(step.context, planned.planner)
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
    if step.device.type == "cpu":  # counts what the frontier counts, and rejects nothing
        meter = CountingMeter()
        leaves = step.leaves().values()
        meter.own(item for leaf in leaves for item in (leaf.detach(), leaf.grad) if item is not None)
    training = PlannedTraining(
        step.model, shape, resolve_plan(config, shape), config.memory, counts_steps=False
    )
    return Planned(plan_while_training(training, meter=meter), options["budget_bytes"])


def _ending_steps(
    inner: Callable[[], AbstractContextManager[Any]], planner: Planner
) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def around_a_step() -> Iterator[None]:
        with inner():
            yield
        planner.step_ended()

    return around_a_step


def options_of(budget: Budget, compiles: bool, results: Sequence[Result]) -> dict[str, Any] | str:
    """Return what a row's setup is given, or why its budget is not known.

    Args:
        budget: of the row.
        compiles: whether `compiled` puts it on.
        results: of the workload so far.
    """
    found = budget.memory({result.method: result for result in results})
    if found is None:
        return f"its budget is the peak of {budget.peak_of or 'eager'}, which was not measured"
    memory, budget_bytes = found
    planned = {"memory": memory, "budget_bytes": budget_bytes}
    return {"planned": planned} if compiles else planned


Setup = Callable[[TrainingStep, Any], AbstractContextManager[AppliedPlan | Planned | None]]
"""Takes the step and the row's configuration; gives the applied plan where there is one."""

Obstacle = Callable[[TrainingStep], str]
"""Says why a row cannot be measured there, ``""`` if it can."""


@contextmanager
def nothing(_step: TrainingStep, _options: object) -> Iterator[None]:
    """Leave the model as it is."""
    yield None


@contextmanager
def hf_checkpointing(step: TrainingStep, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Put transformers' own checkpointing of whole layers on; ``options`` are its arguments."""
    with _hooks_restored(step.model):
        _checkpointing_verb(step.model, "enable")(**(options or {}))
        try:
            yield None
        finally:
            _checkpointing_verb(step.model, "disable")()


def _checkpointing_verb(model: Any, verb: str) -> Callable[..., None]:
    """The method under its present name, or under the one that it had before."""
    method = getattr(model, f"activation_checkpointing_{verb}", None)
    return method or getattr(model, f"gradient_checkpointing_{verb}")


@contextmanager
def save_on_cpu(step: TrainingStep, _options: object) -> Iterator[None]:
    """Put ``torch.autograd.graph.save_on_cpu`` around every step: all saved tensors, weights included."""
    device_type = step.device.type
    hooks = torch.autograd.graph.save_on_cpu
    yield from _with_context(step, lambda: hooks(pin_memory=device_type != "cpu", device_type=device_type))


def trl_module() -> ModuleType:
    """Return TRL's module, from the folder that ``HF_ACTSWAP_TRL`` names or as installed.

    Raises:
        ImportError: it is neither there nor here.
    """
    folder = os.environ.get(TRL_VARIABLE)
    if not folder or TRL_MODULE in sys.modules:
        return importlib.import_module(TRL_MODULE)
    path = Path(folder, _TRL_FILE)
    if not path.is_file():
        raise ImportError(f"no such file: {path}")
    # By itself: its package would look for the rest of TRL, and it needs nothing of that.
    spec = importlib.util.spec_from_file_location(TRL_MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a module: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[TRL_MODULE] = module
    return module


@contextmanager
def trl_offloading(step: TrainingStep, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Put TRL's activation offloading around every step, as its trainers do.

    Args:
        step: the hooks that TRL leaves on an output head are taken off at exit.
        options: ``checkpointing``: transformers' checkpointing as well.
    """
    module = trl_module()
    with ExitStack() as stack:
        stack.enter_context(_hooks_restored(step.model))
        if (options or {}).get("checkpointing"):
            stack.enter_context(hf_checkpointing(step, None))
        manager = module.get_act_offloading_ctx_manager(step.model, warn_if_no_head=False)
        yield from _with_context(step, lambda: manager)


def liger_module(name: str) -> ModuleType:
    """Return a module of ``liger_kernel``, as installed or from the folder that ``HF_ACTSWAP_LIGER`` names.

    Raises:
        ImportError: it is neither here nor there, or Triton is missing.
    """
    folder = os.environ.get(LIGER_VARIABLE)
    if folder and folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"liger_kernel.{name}")


@contextmanager
def liger_checkpointing(step: TrainingStep, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Put Liger's fused head and loss on a whole model, beside transformers' checkpointing of layers.

    None of Liger's other kernels, which replace names in transformers for good.

    Args:
        step: of a whole model.
        options: ``tiled_mlp``: Liger's tiles of each MLP as well, of the size that it chooses.
    """
    put_on = liger_module("transformers").apply_liger_kernel_to_llama
    with ExitStack() as stack:
        stack.enter_context(hf_checkpointing(step, None))
        stack.callback(vars(step.model).pop, "forward", None)
        put_on(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, model=step.model)
        if (options or {}).get("tiled_mlp"):
            in_tiles = liger_module("ops.tiled_mlp").apply_tiled_mlp
            for mlp in (layer.mlp for layer in step.decoder_layers):
                stack.callback(vars(mlp).pop, "forward")
                mlp.forward = partial(in_tiles, type(mlp).forward, mlp)
        yield None


def _with_context(step: TrainingStep, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    before, step.context = step.context, context
    try:
        yield None
    finally:
        step.context = before


@contextmanager
def _hooks_restored(model: nn.Module) -> Iterator[None]:
    """Take off the forward hooks that were added meanwhile and that nobody kept a handle of."""
    before = {module: _hook_tables(module) for module in model.modules()}
    known = {module: [set(table) for table in tables] for module, tables in before.items()}
    try:
        yield
    finally:
        for module, tables in before.items():
            for table, keys in zip(tables, known[module], strict=True):
                for key in [key for key in table if key not in keys]:
                    del table[key]


def _hook_tables(module: nn.Module) -> list[Any]:
    return [module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called]


@contextmanager
def compiled(step: TrainingStep, options: Mapping[str, Any] | None) -> Iterator[AppliedPlan | Planned | None]:
    """Compile each layer by itself.

    Args:
        step: its layers share one graph, so that one compilation serves them all.
        options: ``memory_budget``: the partitioner's activation memory budget, 0 to 1; ``checkpointing``:
            transformers' checkpointing, inside the compiled layers; ``actswap``: a configuration of
            hf_actswap, applied to the compiled layers; ``planned``: what `actswap_plan` takes, instead;
            ``backend``: ``torch.compile``'s.
    """
    options = options or {}
    layers = step.decoder_layers
    budget = options.get("memory_budget", 1.0)
    with ExitStack() as stack:
        stack.callback(_uncompile, layers)
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


def _uncompile(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer._compiled_call_impl = None  # there is no public way back from Module.compile
    torch._dynamo.reset()


@contextmanager
def actswap(step: TrainingStep, config: Any) -> Iterator[AppliedPlan]:
    """Put a configuration of hf_actswap on."""
    with hf_actswap.apply(step.model, config) as applied:
        yield applied


def no_obstacle(_step: TrainingStep) -> str:
    """Nothing is in the way anywhere."""
    return ""


def no_device(step: TrainingStep) -> str:
    """Offloading needs a device that has memory of its own."""
    return "the CPU has no memory of its own to offload from" if step.device.type == "cpu" else ""


def no_offload_option(step: TrainingStep) -> str:
    """transformers can swap what its checkpointing keeps, in newer versions and off a device."""
    if "offload" not in inspect.signature(_checkpointing_verb(step.model, "enable")).parameters:
        return no_device(step) or "this version of transformers cannot offload what its checkpointing keeps"
    return no_device(step)


def no_room_on_host(step: TrainingStep) -> str:
    """Everything that is saved goes to pinned memory, and nobody asks how much there is."""
    if no_device(step):
        return no_device(step)
    workload = step.workload
    # Twice shared storages are copied twice, and the weights' transposes are copied, too.
    of_a_layer = 1.4 * layer_saved_bytes(workload) + layer_weight_bytes(workload)
    needed = workload.layers * of_a_layer * _PINNED_OVER_SAVED
    available = available_host_bytes()
    if needed <= _SHARE_OF_HOST_MEMORY * available:
        return ""
    return f"about {needed / 2**30:.0f} GiB of pinned memory, of {available / 2**30:.0f} GiB that are free"


def no_head(step: TrainingStep) -> str:
    """A stack of layers has neither head nor loss."""
    return "" if step.workload.head else "it has no head and no loss: a preset of a whole model has"


def no_trl(step: TrainingStep) -> str:
    """TRL is an extra."""
    if no_device(step):
        return no_device(step)
    try:
        trl_module()
    except ImportError as error:
        return (
            f"TRL cannot be imported ({error}): pip install 'hf-actswap[bench]', or let {TRL_VARIABLE} name "
            f"a folder in which its module lies ({_TRL_FILE})"
        )
    return ""


def no_liger(step: TrainingStep) -> str:
    """Liger is no extra; its kernels are Triton's."""
    if step.device.type == "cpu":
        return "Liger's kernels are Triton's, which has none for the CPU"
    try:
        liger_module("transformers")
    except ImportError as error:
        return f"Liger cannot be imported ({error}): pip install liger-kernel, or see {LIGER_VARIABLE}"
    return ""


def without_key(key: str) -> Obstacle:
    """Return the obstacle that this version reads no such key of ``recompute_config``."""

    def missing(_step: TrainingStep) -> str:
        return "" if key in RECOMPUTE_KEYS else f"this version has no recompute_config.{key}"

    return missing


def no_compiler(step: TrainingStep) -> str:
    """On the CPU inductor calls a C++ compiler."""
    missing = step.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++")))
    return "there is no C++ compiler" if missing else ""
