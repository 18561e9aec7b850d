"""The hooks by which a plan acts on a running model.

What `Engine` installs, and nothing else:

* on the model, and on the modules in it around a stack of layers, which some training loops call themselves
  (`entries`), a pair of hooks that pushes the saved-tensor hooks before the forward of the outermost one and
  pops them after it, and a wrapper of its call, which cleans up after an exception that skips even
  ``always_call`` hooks (`KeyboardInterrupt`);
* on each layer, and on the embedding, the final norm and the head, a pair that follows which of them runs;
* on the modules inside layers whose ops are decided one by one, a pair that follows the module path, and
  the `NamingMode` while the layer runs, both until the layer has a cached trace (`forward_pass`);
* on layers that are recomputed whole, ``torch.utils.checkpoint`` around their forward, non-reentrant with
  early stop.

Outside a training forward (no grad, evaluation, recomputation in backward) there is no `ForwardPass`, and
every hook returns at once.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ..config import Verify
from ..errors import PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import (
    SCOPES,
    Adjustment,
    MemoryPlan,
    OpCall,
    PlanRow,
    Scope,
    format_scopes,
)
from ..plan.dry_run import holds_several_sequences
from ..plan.model_structure import LayerStructure, ModelStructure, unwrapped
from ..plan.op_facts import COMMUNICATIONS, can_run_again, draws_random_numbers
from ..plan.opnames import OpStack, function_name
from ..plan.record import storage_key
from ..plan.saved_bytes import RUN_AGAIN
from ..plan.settle import DIFFERED, keep_what_differs, scopes_by_path, settled
from ..plan.wrapper_rules import problems_of_checkpointing
from ..plan.wrappers import called_modules, is_checkpointed, problems_of_fsdp1, uncompiled
from .autograd_state import function_mode_is_innermost, pop_leaked_hooks, running_backward
from .checkpointed_layer import CheckpointedLayer
from .compiled_regions import CompiledRegions
from .fates import KEEP, Action, FateTable, Slices
from .forward_pass import CachedTraces, ForwardPass
from .hook_wrappers import Undo, entries, replace_call, replace_forward, wrap_call, wrap_outermost_calls
from .host_budget import DryRunForecast, dropped_by
from .module_state import CalledModule, ModuleFacts, Surroundings, is_cache
from .owners import ScopeModules
from .plan_runtime import PlanRuntime, Resources
from .recompute import Region
from .stats import Counters
from .swapped_storages import PackHandler, checkpoint_of
from .verify import Derivations, RecomputeError, Verifier

logger = logging.getLogger(__name__)


class NamingMode(TorchFunctionMode):
    """Names the functions of one call of one layer, and runs recomputed ones as regions."""

    def __init__(
        self, forward: ForwardPass, fates: FateTable, counters: Counters, verifier: Verifier
    ) -> None:
        super().__init__()
        self._forward, self._fates, self._counters, self._verifier = forward, fates, counters, verifier

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        forward, name = self._forward, function_name(func)
        stack, scope = forward.stack, forward.scope
        if name is None or stack is None or scope is None or forward.packing:
            return func(*args, **kwargs)
        path, ordinal = stack.begin(name)
        call = scope, path, ordinal
        action = self._fates[call]
        inputs = _tensors((*args, *kwargs.values()) if kwargs else args)
        known = {forward.track(tensor) for tensor in inputs}
        region = self._region(func, call, name, args, kwargs, action)
        versions = None if region is None else [tensor._version for tensor in inputs]
        forward.running = action
        outer = forward.region
        if outer is not None and outer.called is not None:
            outer.called.draws_from(kwargs.get("generator"))
        kept = None if outer is None else outer.kept
        if outer is not None and kept is not None:
            foreign = region is None and action.kind not in ("recompute_inside", "recompute_function")
            random = foreign and draws_random_numbers(func, name, args, kwargs)
            kept.on_call(name, path, (args, kwargs), outer.packs, foreign, random)
        if region is not None:
            forward.region = region
        try:
            result = func(*args, **kwargs)
        finally:
            forward.running = None
            forward.region = outer
        if region is not None and versions != [tensor._version for tensor in inputs]:
            raise RecomputeError(
                f"{region.name}: it writes into what it reads, so it cannot be run again; keep it "
                "(select_recompute_exclude)"
            )
        self._own_outputs(result, known, path, action, region)
        if outer is not None and kept is not None:
            kept.on_return(name, path, result, outer.packs)
        return result

    def _region(
        self,
        func: Callable[..., Any],
        call: OpCall,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        action: Action,
    ) -> Region | None:
        # Inside a recomputed module only a communication has a region of its own: its result leaves the
        # module, which would keep it otherwise.
        if (
            action.kind != "recompute_function"
            or (self._forward.region is not None and name not in COMMUNICATIONS)
            or not torch.is_grad_enabled()
            or not can_run_again(func, name, kwargs)
        ):
            return None
        random = draws_random_numbers(func, name, args, kwargs)
        tickets = self._forward.ticket_of_input, self._forward.tickets_of_inputs()
        name, expect = f"{call[0]}.{call[1]}", self._verifier.of_call(call)
        return Region(name, func, args, kwargs, *tickets, self._counters, random, expect=expect)

    def _own_outputs(
        self, result: Any, known: set[int | None], path: str, action: Action, region: Region | None
    ) -> None:
        forward = self._forward
        fresh = False
        for position, tensor in enumerate(_tensors(result)):
            if storage_key(tensor) not in known:  # views and in-place results have no storage of their own
                forward.owners.own(tensor, action, region, position)
                if region is not None:
                    region.returned(position, tensor)
                fresh = True
        if fresh and forward.stack is not None:
            forward.stack.count(path)


def end_region(forward: ForwardPass, output: Any) -> None:
    """End the region of a recomputed module. Its output is kept, unless a repeated communication made it."""
    region, forward.region = forward.region, None
    if region is not None:
        region.close()
    for tensor in _tensors(output):
        owner = forward.owners.owner(tensor)
        if owner is None or owner.region is None:
            forward.owners.own(tensor, KEEP)


def _tensors(value: Any) -> list[torch.Tensor]:
    # Most arguments and results are flat, and flattening trees is slow.
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, tuple | list):
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    found: list[torch.Tensor] = []
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, tuple | list | dict):
            found += _tensors(item)
    return found


_THREADS = Problem(
    "model",
    "one call at a time under a plan",
    "a call in another thread while a training forward runs",
    "Let one thread train (a lock around forward and backward), or give each thread a model of its own.",
)
_TRANSFORM = Problem(
    "model",
    "loss.backward() or torch.autograd.grad",
    "a torch.func transform (grad, vmap, ...) around the model's call, which supports no saved-tensor hooks",
    "Remove the plan for this call: applied.suspend() before, applied.resume() after.",
)


class CallGuard:
    """Notes the thread in which the training forward of one model runs (``thread``; ``None``: none runs)."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self._lock = threading.Lock()

    @property
    def runs_elsewhere(self) -> bool:
        return self.thread is not None and self.thread != get_ident()

    def enter(self, prepares: bool) -> bool:
        """Note that a call of the model starts in this thread; return whether `release` must follow.

        It must after a training forward that is not within another.

        Args:
            prepares: whether a forward that runs is still being prepared: on fake tensors, which any call of
                the model would meet.
        """
        trains = torch.is_grad_enabled()
        with self._lock:
            if self.runs_elsewhere and (prepares or trains):
                raise PlanError([_THREADS])
            if not trains or self.thread is not None:
                return False
            self.thread = get_ident()
            return True

    def release(self) -> None:
        self.thread = None


_LEFT_BEHIND = Problem(
    "model",
    "an output of real tensors",
    "a fake tensor: code of the model keeps a tensor of its first call, which ran without data to record the "
    "operators, where it cannot be taken back",
    "Call the model once before the plan is applied, so that its code keeps a real one.",
)


def _reject_weights_elsewhere(root: nn.Module) -> None:
    if problems := problems_of_fsdp1(root):
        raise PlanError(problems)
    names = [
        f"{path}.{name}"
        for path, module in root.named_modules()
        if hasattr(module, "_hf_hook")
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_meta
    ]
    if names:
        found = f"{len(names)} weights on meta ({names[0]}, ...): accelerate loads them for each call"
        hint = (
            "Load the model without cpu_offload, disk_offload or a device_map that offloads. If it does not "
            "fit, quantise it, or shard it with FSDP2."
        )
        raise PlanError([Problem("model", "weights on the device", found, hint)])


_PACKED = (
    "position_ids restart within a row: it is packed. transformers keeps the sequences of such a row apart "
    "where there is no key-value cache, and under a plan there is none: the loss is that of use_cache=False."
)


class Engine:
    """The hooks of one applied plan and what they share. Made by `install.install`.

    Attributes:
        plan: the plan, with what was changed since it was applied.
        runtime: the device, host memory, transfer and counters that it works with.
    """

    def __init__(
        self, model: nn.Module, plan: MemoryPlan, structure: ModelStructure, resources: Resources
    ) -> None:
        self.plan, self.structure = plan, structure
        self._root = unwrapped(model)
        self._layers = {  # looked up between calls: within one, a pipeline stage has other modules there
            layer.index: self._root.get_submodule(layer.module_path) for layer in structure.all_layers
        }
        self._entries = entries(model, structure)
        self._watch = CheckpointWatch(self._root, plan, structure)
        self._counters = Counters()
        self._verifier = Verifier(plan.verify)
        self._surroundings = Surroundings(self._root, self._layers.values())
        self.differing: tuple[OpCall, ...] = ()
        self._keeps_what_differs = resources.replicas is None  # else the ranks' collectives would part
        self._fates = FateTable(
            plan, structure, None if resources.replicas is None else Slices(resources.replicas)
        )
        self._regions = CompiledRegions(self._fates.recomputed, structure)
        self.runtime = PlanRuntime(self._root, plan, self._fates, self._counters, resources, self.adjust)
        self._inside: set[nn.Module] = set()
        self._outside: tuple[nn.Module, ...] = ()
        self._forward: ForwardPass | None = None
        self._guard = CallGuard()
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None
        self._traces = CachedTraces(self._fates.traceable_scopes, self._fates.all_traceable)
        self._acts = bool(plan.rows) or resources.pack_handler is not None
        self._first_step = FirstStep(
            plan, structure, self._root, self._counters, one_of_several=resources.pack_handler is not None
        )
        self._named = self._fates.traceable_scopes & self._fates.named_layers
        self._inside_hooks: list[Undo] | None = None
        self._mode: NamingMode | None = None
        self.dropped_bytes: int | None = None
        """Bytes that one forward drops, to be rebuilt in backward; ``None``: not known, or no forward yet."""

    def set_pack_handler(self, pack_handler: PackHandler | None) -> None:
        """Let ``pack_handler`` make the tickets of tensors that stay, from the next forward on."""
        self.runtime.set_pack_handler(pack_handler)
        self._acts = bool(self.plan.rows) or pack_handler is not None

    def attach(self) -> list[Callable[[], None]]:
        """Install the hooks, also again after removal; return functions that remove them, oldest first."""
        self.runtime.set_allocator()  # now, as its log line is shown; at a forward again, if the model moved
        if not self._acts:
            return self._set_allocator_only() if self.runtime.sets_allocator else []
        self.runtime.bind()
        # Innermost: a planner changes plans in a wrapper of the call that is to run under the new one.
        undo = [replace_call(module, self._cleaning_up, innermost=True) for module in self._entries]
        if self.structure.compiled:
            (called,) = self._entries
            return [*undo, *wrap_call(called, self._start_compiled, self._end_compiled), self._clean_up]
        undo += wrap_outermost_calls(self._entries, self._start_forward, self._end_forward, innermost=True)
        paths = self.structure.scopes
        for scope in SCOPES:
            if scope in paths:
                undo += self._follow_scope(self._root.get_submodule(paths[scope]), scope, None)
        for layer in self.structure.all_layers:
            module = self._layers[layer.index]
            if layer.index in self._fates.checkpointed_layers:
                given = layer.module_path, layer.index, self._counters, self._verifier, self._surroundings
                undo.append(checkpointed(uncompiled(module), *given))
            undo += self._regions.attach(layer.index, module)
            undo += self._follow_scope(module, layer.index, layer)
            if layer.index in self._fates.named_layers - self._named:
                undo += self._follow_modules(layer)
        undo.append(self._leave_inside)
        if not self._traces.knows(self._named):
            self._follow_inside()
        if not self._outside:  # computed once: at each forward it would cost milliseconds
            self._outside = tuple(module for module in self._root.modules() if module not in self._inside)
        undo.append(self._clean_up)
        return undo

    def _set_allocator_only(self) -> list[Undo]:
        def before(*_: object) -> None:
            self.runtime.set_allocator()

        return wrap_outermost_calls(self._entries, before, lambda *_: None, innermost=True)

    def close(self) -> None:
        """Unbind the thread and free the host memory, once the hooks are off for good. Safe to call again."""
        self._say_what_differs()
        self._first_step.removed(self.plan, self._measures)
        self.runtime.unbind()
        self.runtime.close()

    def _follow_modules(self, layer: LayerStructure) -> list[Undo]:
        module = self._layers[layer.index]
        return [
            undo
            for path, child in called_modules(module)
            for undo in self._follow_path(child, layer.index, path)
        ]

    def _follow_inside(self) -> None:
        if self._inside_hooks is None:
            layers = [layer for layer in self.structure.all_layers if layer.index in self._named]
            with uninterrupted():
                self._inside_hooks = [undo for layer in layers for undo in self._follow_modules(layer)]

    def _leave_inside(self) -> None:
        if self._inside_hooks:
            with uninterrupted():
                undo, self._inside_hooks = self._inside_hooks, None
                for step in reversed(undo):
                    step()

    def _settle(self, forecast: DryRunForecast) -> None:
        saved = None
        if self._fates.recomputed.selective_layers and not forecast.compiled:
            saved = forecast.saved()
            if saved is None and (why := forecast.why_not):
                logger.info("All that is named is recomputed, whether it pays or not: no fake run (%s).", why)
        self._change(settled(self.plan, self.structure, saved))

    def verify(self, when: Verify) -> None:
        """Compare what recomputation rebuilds, as ``memory.verify`` says it, from the next forward on."""
        self._verifier.begin(when)
        self._change(replace(self.plan, verify=when))

    def _say_what_differs(self) -> None:
        """Warn of recomputation that gave other numbers in the step that has ended; keep single ops."""
        if not (differ := self._verifier.differing()):
            return
        kept = [call for call in differ if call[1] and self._keeps_what_differs]
        if kept:
            self.differing += tuple(kept)
            self._change(keep_what_differs(self.plan, kept), logging.WARNING)
        for path, scopes in scopes_by_path(call for call in differ if call not in kept).items():
            where = f"layers {format_scopes(scopes)}" + (f", {path}" if path else "")
            logger.warning("memory.verify: %s: %s. %s", where, DIFFERED, _STILL_RUN_AGAIN)

    def adjust(self, adjustments: Sequence[Adjustment], level: int = logging.INFO) -> None:
        """Add to the plan what was measured or found since it was applied, and log it."""
        self._change(replace(self.plan, adjustments=(*self.plan.adjustments, *adjustments)), level)

    def _change(self, plan: MemoryPlan, level: int = logging.INFO) -> None:
        """Replace the plan on the model, and log each new adjustment. No other method replaces the plan."""
        if plan is self.plan:
            return
        for adjustment in plan.adjustments[len(self.plan.adjustments) :]:
            logger.log(level, "%s", adjustment)
        self.plan = plan
        self._fates.use_plan(plan)

    def _start_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._guard.runs_elsewhere and not torch.is_grad_enabled():
            return
        self._clean_up()
        if not (self._acts and torch.is_grad_enabled()):
            self._first_step.without_gradients += 1
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise PlanError([_TRANSFORM])
        self._say_what_differs()
        self._watch.check()
        self._first_step.forward_starts(self.plan, self._measures)
        traces = CachedTraces(frozenset(), False) if self.runtime.evictable else self._traces
        if traces.knows(self._named):
            self._leave_inside()
        else:
            self._follow_inside()
        if self.runtime.context is None:
            _reject_weights_elsewhere(self._root)
        context, new = self.runtime.prepared()
        if new:
            forecast = DryRunForecast(self._root, self.structure, args, kwargs, module)
            self._settle(forecast)
            self.runtime.host.make_ready(context.pool, context.transfer.overlaps, self.plan, forecast)
            if not self.runtime.evictable:  # else the planner counts
                self.dropped_bytes = dropped_by(self.plan, forecast)
            if holds_several_sequences(kwargs):
                logger.info(_PACKED)
        call, derivations = (args, kwargs), Derivations() if self._verifier.on else None
        forward = ForwardPass(self.runtime.watched(context), self._outside, traces, call, derivations)
        self._forward = forward
        self._counters.forwards += 1
        self._saving = torch.autograd.graph.saved_tensors_hooks(forward.pack, forward.backward.unpack)
        self._saving.__enter__()

    @property
    def _measures(self) -> bool:
        context = self.runtime.context
        return context is not None and context.auto is not None and context.transfer.overlaps

    def _end_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if self._guard.runs_elsewhere:
            return
        forward, saving = self._forward, self._saving
        if forward is not None and saving is not None:
            saving.__exit__(None, None, None)
            self._forward = self._saving = None  # last, so that `_clean_up` finds them after an interrupt
            forward.end()
            self._first_step.forward_ends(output)

    def _start_compiled(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start the forward of a model that is one compiled region. All its layers have the same fate."""
        self._start_forward(module, args, kwargs)
        if self._forward is not None and not self._guard.runs_elsewhere:
            nodes = sum(layer.nodes for layer in self.structure.layers)
            self._forward.start_scope(ScopeModules(0, tuple(self._root.modules())), args, kwargs, nodes)
            if self._first_step.entered is not None:
                self._first_step.entered.update(self.plan.scopes)

    def _end_compiled(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._forward is not None and not self._guard.runs_elsewhere:
            self._forward.end_scope(None)
        self._end_forward(module, args, output)

    def _cleaning_up(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def cleaning_up(*args: Any, **kwargs: Any) -> Any:
            claimed = self._guard.enter(prepares=self._forward is None)
            try:
                return call(*args, **kwargs)
            except Exception:
                raise
            except BaseException:  # a KeyboardInterrupt skips hooks
                if not self._guard.runs_elsewhere:
                    self._clean_up()
                raise
            finally:
                if claimed:
                    self._guard.release()

        return cleaning_up

    def _clean_up(self) -> None:
        self._leave_mode()
        if self._forward is not None:
            with uninterrupted():
                forward, self._forward, self._saving = self._forward, None, None
                pop_leaked_hooks(forward.pack)
                forward.end()

    def _follow_scope(self, module: nn.Module, scope: Scope, layer: LayerStructure | None) -> list[Undo]:
        place = ScopeModules(scope, tuple(module.modules()))
        facts = ModuleFacts(module, self._surroundings)
        self._inside.update(place.modules)
        naming = layer if layer is not None and layer.index in self._fates.named_layers else None
        compiled_nodes = layer.nodes if layer is not None and layer.compiled else None

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = self._forward
            if forward is None or self._guard.thread != get_ident():
                whole = scope in self._fates.checkpointed_layers  # which runs again all the same
                if layer is not None and not whole and self._guard.thread is None:
                    self._first_step.called_alone(layer.module_path, (*args, *kwargs.values()))
                return
            if self._first_step.entered is not None:
                self._first_step.enters(scope, (*args, *kwargs.values()))
            checkpoint = checkpoint_of(module, layer, self._fates.checkpointed_layers)
            follow = forward.start_scope(place, args, kwargs, compiled_nodes, checkpoint)
            if naming is not None and follow:
                if scope in self._named:
                    self._follow_inside()  # needed if an earlier layer did not match its cached trace
                forward.stack = OpStack(naming.attention_paths)
                if self._fates.recomputed.is_root(scope, ""):
                    forward.region = self._region(forward, facts, scope, "", args, kwargs)
                self._mode = NamingMode(forward, self._fates, self._counters, self._verifier)
                self._mode.__enter__()

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            forward = self._forward
            if forward is None or self._guard.thread != get_ident():
                return
            if forward.stack is not None:
                self._leave_mode()
                forward.stack = None
                end_region(forward, ())
            forward.end_scope(output)

        return wrap_call(module, before, after)

    def _follow_path(self, module: nn.Module, scope: Scope, path: str) -> list[Undo]:
        facts = ModuleFacts(module, self._surroundings)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = self._forward
            if forward is None or forward.stack is None or self._guard.thread != get_ident():
                return
            forward.stack.enter(path)
            region = forward.region
            if region is None and self._fates.recomputed.is_root(scope, path):
                forward.region = self._region(forward, facts, scope, path, args, kwargs)
            elif region is None or region.kept is None:
                return
            elif self._fates.recomputed.is_kept_module(scope, path):
                region.kept.on_module_call(module, (args, kwargs), region.packs)

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            forward = self._forward
            if forward is None or forward.stack is None or self._guard.thread != get_ident():
                return
            region = forward.region
            if region is not None and region.function is module:
                end_region(forward, output)
            elif region is not None and region.kept is not None:
                region.kept.on_module_return(module, output, region.packs)
            forward.stack.leave(path)

        return wrap_call(module, before, after)

    def _region(
        self,
        forward: ForwardPass,
        facts: ModuleFacts,
        scope: Scope,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Region:
        name = f"{scope}.{path}" if path else str(scope)
        keeps = self._fates.recomputed.keeps_inside(scope, path)
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        called = CalledModule(name, facts, caches)
        tickets = forward.ticket_of_input, forward.tickets_of_inputs()
        call, verifier = (scope, path, None), self._verifier
        # What is kept inside is not computed again, and so no result of the same operators.
        ways = (verifier.of_call(call), None) if keeps else (None, verifier.runs_of(call))
        given = *tickets, self._counters, True, keeps, called, *ways
        return Region(name, facts.modules[0], args, kwargs, *given)

    def _leave_mode(self) -> None:
        mode = self._mode
        if mode is not None and function_mode_is_innermost(mode):
            mode.__exit__(None, None, None)
        self._mode = None  # last, so that `_clean_up` finds it after an interrupt


def checkpointed(
    layer: nn.Module,
    name: str,
    scope: Scope,
    counters: Counters,
    verifier: Verifier,
    around: Surroundings,
) -> Undo:
    """Put ``torch.utils.checkpoint`` around a layer's forward; return a function that removes it."""
    forward = layer.forward
    first = next(iter(inspect.signature(forward).parameters), "")
    again = CheckpointedLayer(name, layer, scope, counters, verifier, around)

    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not args and first in kwargs:  # saved-tensor hooks see only what is passed by position
            args = (kwargs.pop(first),)
        if args and isinstance(args[0], FakeTensor):  # a dry run records what the layer itself would save
            return forward(*args, **kwargs)
        if is_dynamo_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        held = (*(item for item in args if not isinstance(item, torch.Tensor)), *kwargs.values())
        device = next((item.device for item in args if isinstance(item, torch.Tensor)), torch.device("cpu"))
        call = again.called(device, held)
        run = partial(call.run, forward)
        return checkpoint(run, *args, use_reentrant=False, context_fn=call.contexts, **kwargs)

    return replace_forward(layer, checkpointed_forward)


class CheckpointWatch:
    """Checks the rules for a plan on ``model`` again if gradient checkpointing was switched on since."""

    def __init__(self, model: nn.Module, plan: MemoryPlan, structure: ModelStructure) -> None:
        self._plan, self._compiled = plan, structure.compiled
        self._layers = structure.layer_modules(model)
        self._known = [layer.checkpointed for layer in structure.all_layers]

    def check(self) -> None:
        """Raise `PlanError` if it was switched on and the plan cannot act beside it."""
        now = [layer.training and is_checkpointed(layer) for layer in self._layers.values()]
        if not any(on and not known for on, known in zip(now, self._known, strict=True)):
            return
        if problems := problems_of_checkpointing(self._layers, self._plan, self._compiled):
            raise PlanError(problems)
        self._known = [on or known for on, known in zip(now, self._known, strict=True)]


def _is_fake(values: Iterable[object]) -> bool:
    return any(isinstance(value, FakeTensor) for value in values)


_PAYS_NOT = "each op that it names would hold more than it drops (see the adjustments of the applied plan)"


_STILL_RUN_AGAIN = (
    "They still run again: kept, whole layers would take the memory that the plan saves, and tensor-parallel "
    "ranks would no longer run the same collectives."
)

_STEPS_WITHOUT_A_LAYER = 8
"""Steps that may leave out all that a plan names before this is said."""


class FirstStep:
    """Warns, once, if a plan swapped or recomputed nothing in its first step, and says why.

    It follows the steps under the plan until it has judged one: a forward and the backward through it. One
    that enters nothing of what the plan names is not judged at once: layers may be left out at random
    (LayerDrop).

    Args:
        plan: the plan as it was applied.
        structure: structure of the model.
        root: the model inside its wrappers.
        counters: what the plan has done so far.
        one_of_several: whether the planner puts plans on in turn. Then one without a training forward is
            usual: it was put on after the last step.

    Attributes:
        entered: scopes that forwards have entered so far; ``None``: a step has been judged.
        without_gradients: number of forwards that started without gradients.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        structure: ModelStructure,
        root: nn.Module,
        counters: Counters,
        one_of_several: bool,
    ) -> None:
        self.entered: set[Scope] | None = set()
        self.without_gradients = 0
        self._one_of_several = one_of_several
        self._plan, self._counters, self._layers = plan, counters, structure.layer_modules(root)
        self._compiled = {
            layer.index for layer in structure.all_layers if layer.compiled or structure.compiled
        }
        self._is_fake = _is_fake(root.parameters())
        self._backward_ran, self._waits = False, _STEPS_WITHOUT_A_LAYER
        self._received_gradients: set[Scope] = set()

    def enters(self, scope: Scope, values: Iterable[object]) -> None:
        """Note that a forward enters a scope, with these arguments."""
        if self.entered is not None:
            self.entered.add(scope)
        if any(getattr(value, "requires_grad", False) for value in values):
            self._received_gradients.add(scope)  # a frozen layer behind a trained prompt

    def called_alone(self, path: str, values: Iterable[object]) -> None:
        """Warn that a layer is called outside of a forward, and not run again in backward."""
        again = running_backward() != -1
        if self.entered is None or again or not torch.is_grad_enabled() or _is_fake(values):
            return
        self.entered = None
        logger.warning(
            "%s is called by itself, not by the model or the decoder: the plan does nothing there. Call the "
            "module that runs the layers.",
            path,
        )

    def forward_starts(self, plan: MemoryPlan, measures: bool) -> None:
        """Judge the step before, if its backward has run; called when a training forward starts.

        Args:
            plan: the plan after it was settled.
            measures: whether open windows are chosen by measurement, which logs its own decisions.
        """
        if self.entered is not None and self._backward_ran:
            self._judge(plan, measures)

    def forward_ends(self, output: Any) -> None:
        """Note that a forward has returned ``output``, and listen for its backward.

        Raises:
            PlanError: a forward on real tensors has returned a fake one.
        """
        if self.entered is None or self._backward_ran:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, FakeTensor) and not self._is_fake and active_fake_mode() is None:
                raise PlanError([_LEFT_BEHIND])
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(self._backward_runs)

    def removed(self, plan: MemoryPlan, measures: bool) -> None:
        """Judge the last step, or warn that no forward had gradients; called when the plan is removed."""
        count = self.without_gradients
        if plan.rows and count and not self._counters.forwards and not self._one_of_several:
            logger.warning("The plan did nothing: all %d forwards under it ran without gradients.", count)
        elif self.entered is not None and self._backward_ran:
            self._waits = 0
            self._judge(plan, measures)

    def _backward_runs(self, _gradients: object) -> None:
        self._backward_ran = True

    def _judge(self, plan: MemoryPlan, measures: bool) -> None:
        entered = self.entered or set()
        if self._waits and not entered & {row.scope for row in self._plan.rows}:
            self._waits, self._backward_ran = self._waits - 1, False
            return
        self.entered = None
        swapping = [row for row in plan.rows if row.fate == "swap" and not (measures and row.windows is None)]
        if swapping and not self._counters.offloads:
            rejected = "; ".join(
                f"{size:,} bytes {reason}" for reason, size in self._counters.rejected.items()
            )
            why = f"all that it names stays: {rejected}" if rejected else self._why(swapping, entered)
            logger.warning("The plan swaps nothing in a step: %s.", why)
        asked, left = ([row for row in one.rows if row.fate in RUN_AGAIN] for one in (self._plan, plan))
        whole = {row.scope for row in left if not row.op_path}
        seen = self._counters.recomputes or any(self._trains(scope) for scope in whole & entered)
        if asked and not seen and not any(row.scope in self._compiled for row in asked):
            logger.warning(
                "The plan recomputes nothing in a step: %s.", self._why(left, entered) if left else _PAYS_NOT
            )

    def _why(self, rows: Sequence[PlanRow], entered: set[Scope]) -> str:
        scopes = {row.scope for row in rows}
        if not scopes & entered:
            return f"the model does not call what it names ({format_scopes(scopes)})"
        frozen = "" if any(map(self._trains, scopes)) else ", where no weight needs a gradient"
        return f"autograd saves nothing of what it names ({format_scopes(scopes)}){frozen}"

    def _trains(self, scope: Scope) -> bool:
        layer = self._layers.get(scope)
        return (  # whether it has a backward; what is no layer counts as if it had
            layer is None
            or scope in self._received_gradients
            or any(weight.requires_grad for weight in layer.parameters())
        )
