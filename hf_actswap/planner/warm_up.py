"""Warm-up: nothing is decided; steps are recorded, and running out of memory is survived.

Kernels are loaded, the optimizer makes its states, the allocator finds its blocks. The last two steps are
recorded: memory in the first of them, times in the second, because asking the allocator after each op takes
longer than a small op runs. Where there is one step only, or a step has several micro-batches (the last one
counts, when gradients are there), one step serves for both. If the two had batches of different sizes, the
memory is that of the first, and the times are scaled to its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..engine.agreement import from_all_ranks
from ..engine.autograd_state import pop_leaked_hooks
from ..engine.hook_wrappers import Undo, wrap_call
from ..engine.link import Link
from ..engine.tickets import Ticket, restore
from ..interrupts import uninterrupted
from ..plan.actions import Scope
from ..plan.compiled import called_modules, uncompiled
from ..plan.model_structure import ModelStructure, unwrapped
from .profile import Profile
from .record.clock import DeviceClock
from .record.recorder import StepRecorder
from .run import Run
from .search.compiled_frontier import variants_of
from .shape_buckets import Module, ModuleWeights, RecordedStep, tokens_of

logger = logging.getLogger(__name__)

LEAST_COMPILED_STEPS = 3
"""Of a first warm-up, where layers are compiled. Their first step compiles them and measures kernels, whose
buffers are no memory of a step: the step whose memory is recorded must be a later one, and not the last,
whose times are."""

_GATHERED = 3
"""Of sharded weights: a layer's, gathered, the next layer's beside it, and gradients not yet scattered."""

_DEQUANTISED = 4
"""Bytes of a dequantised weight for each byte of a quantised one (4 bits to 16)."""


def first_steps(run: Run) -> int:
    """Return the steps of the first warm-up: as many as asked for, but see `LEAST_COMPILED_STEPS`."""
    asked = run.memory.warmup_steps
    compiled = run.structure.compiled or any(layer.compiled for layer in run.structure.layers)
    if not compiled or asked >= LEAST_COMPILED_STEPS:
        return asked
    logger.info(
        "%s: %d warm-up steps instead of memory.warmup_steps: %d, because the layers are compiled: the "
        "memory of the first step is also the compiler's",
        run.name,
        LEAST_COMPILED_STEPS,
        asked,
    )
    return LEAST_COMPILED_STEPS


class WarmUp:
    """The first steps: nothing is decided, running out of memory is survived, the last steps are recorded.

    Args:
        run: the training.
        steps: how many, at least 1.
    """

    name = "warm-up"
    peak_bytes: int | None = None
    """The most that was in use in the last step, the worst of all ranks, once that has ended. ``None``:
    memory was recorded in that step, something had to be evicted, or its batch was of another size."""

    def __init__(self, run: Run, steps: int) -> None:
        self._run, self._steps_left = run, steps
        self._forwards_before = self._forwards = 0  # until a step has been counted
        self._recorder: StepRecorder | None = None
        self._held: HeldForwards | None = None
        self._memory: Profile | None = None
        self._states_bytes = self._baseline_bytes = 0
        self._weights: dict[Module, ModuleWeights] = {}
        logger.info("%s: warm-up, %d step(s)", run.name, steps)
        self._next()

    @property
    def steps_left(self) -> int:
        """Steps that are still to come."""
        return max(self._steps_left, 0)

    def forward_starts(self, _shape: tuple[int, ...] = ()) -> None:
        """A micro-batch of this step."""
        self._forwards += 1
        run = self._run
        first = self._forwards == self._forwards_before + 1
        if self._recorder is not None and self._memory is None and first:
            self._baseline_bytes = run.meter.allocated_bytes() + run.idle.away_bytes
            self._weights = module_weights(unwrapped(run.model), run.structure)

    def step_ended(self) -> RecordedStep | None:
        """Return what was recorded, once all ranks have it; every rank must call it."""
        self._steps_left -= 1
        self._forwards_before, self._forwards = max(self._forwards - self._run.chunks, 0), 0
        recorder, profile = self._stopped(), None
        if recorder is not None and all(from_all_ranks(recorder.complete)):
            profile = self._profile(recorder)
        if self._steps_left == 1:
            self._memory, profile = None if self._forwards_before else profile, None
        if profile is not None and self._memory is not None:
            measured = self._run.measured()
            if not measured.evicted_bytes and profile.batch_shape == self._memory.batch_shape:
                self.peak_bytes = measured.peak_bytes
            self._baseline_bytes += more_states_bytes(profile, self._memory)
            profile = with_memory_of(profile, self._memory)
        if self._steps_left <= 0:
            if profile is not None:
                return RecordedStep(replace(profile, link=self._link()), self._weights, self._baseline_bytes)
            logger.info("%s: the recorded step had no backward; another one is recorded", self._run.name)
            self._steps_left, self._memory = 1, None
        self._next()
        return None

    def close(self) -> None:
        """Stop recording. Safe to call again."""
        self._stopped()

    @uninterrupted()
    def _stopped(self) -> StepRecorder | None:
        """Stop recording; return what recorded, if anything did."""
        recorder, self._recorder = self._recorder, None
        held, self._held = self._held, None
        if recorder is not None:
            self._run.unwrap()
            recorder.stop()
        if held is not None:
            held.stop()
        return recorder

    @uninterrupted()
    def _next(self) -> None:
        """Prepare the step that comes: the last two are recorded, without a plan."""
        run = self._run
        if self._steps_left > 2:
            run.switch(None, guarded=True)
            return
        run.take_off()
        run.rescue(True)
        self._states_bytes = run.state_bytes()
        self._recorder = recorder = StepRecorder(
            run.model,
            run.structure,
            run.meter if self._memory is None else None,
            DeviceClock(run.transfer),
            run.pack_handler,
            forwards_before=self._forwards_before,
            away_bytes=lambda: run.idle.away_bytes,
            chunks=run.chunks,
        )
        self._held = HeldForwards(run.called, run.pack_handler, lambda: recorder.in_forward)
        self._held.start()
        recorder.start()
        run.wrap()

    def _profile(self, recorder: StepRecorder) -> Profile:
        run = self._run
        profile = recorder.profile(
            device=run.device_name,
            device_bytes=run.meter.limit_bytes(),
            optimizer_state_bytes=self._states_bytes,
        )
        tokens = profile.batch_shape[-1] if profile.batch_shape else 0
        return replace(profile, frontier=variants_of(run.structure, unwrapped(run.model), tokens))

    def _link(self) -> Link | None:
        from_all_ranks(0)  # start together: ranks may share a switch
        return self._run.transfer.link()


def more_states_bytes(times: Profile, memory: Profile) -> int:
    """Return what the optimizer has allocated since the memory was recorded."""
    return times.optimizer_state_bytes - memory.optimizer_state_bytes


def with_memory_of(times: Profile, memory: Profile) -> Profile:
    """Return the bytes of an earlier step, with the times of ``times`` if both ran the same ops.

    What the optimizer has allocated since is there in later steps, and is added. Times of a batch of another
    size are scaled to that whose bytes they get.
    """
    more, states_bytes = more_states_bytes(times, memory), times.optimizer_state_bytes
    if [op_event.call for op_event in times.op_events] != [op_event.call for op_event in memory.op_events]:
        logger.info("the two recorded steps ran different ops; the times of the earlier one are taken")
        times = memory
    elif times.batch_shape != memory.batch_shape:
        times = _at_shape_of(memory, times)
    return replace(
        times,
        op_events=tuple(
            replace(
                op_event,
                forward_base_bytes=other.forward_base_bytes + more,
                backward_base_bytes=other.backward_base_bytes + more,
            )
            for op_event, other in zip(times.op_events, memory.op_events, strict=True)
        ),
        outside_base_bytes=memory.outside_base_bytes,
        optimizer_state_bytes=states_bytes,
        reserved_bytes=memory.reserved_bytes,
    )


def _at_shape_of(memory: Profile, times: Profile) -> Profile:
    scale = tokens_of(memory.batch_shape) / max(tokens_of(times.batch_shape), 1)
    return replace(
        memory,
        op_events=tuple(
            replace(op_event, forward_ms=other.forward_ms * scale, backward_ms=other.backward_ms * scale)
            for op_event, other in zip(memory.op_events, times.op_events, strict=True)
        ),
        outside_ms=times.outside_ms,
        optimizer_state_bytes=times.optimizer_state_bytes,
    )


class HeldForwards:
    """Makes what the forwards of a recorded step save evictable, those that are not recorded.

    Of a step's micro-batches the recorder takes one, and no plan is on meanwhile. Without this the others
    would keep what they save as ever, and a step that does not fit would not survive. Start it before the
    recorder, and stop it after.

    Args:
        module: whose call is a forward.
        hold: makes what takes the place of a saved tensor.
        recorded: whether the recorder follows the forward that has just begun.
    """

    def __init__(
        self, module: nn.Module, hold: Callable[[torch.Tensor], Ticket], recorded: Callable[[], bool]
    ) -> None:
        self._module, self._hold, self._recorded = module, hold, recorded
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None
        self._undo: list[Undo] = []

    def start(self) -> None:
        """Hold what forwards save from now on."""
        self._undo = wrap_call(self._module, self._forward_starts, self._forward_ends)

    def stop(self) -> None:
        """Leave nothing behind; also in mid-step, after an exception. Safe to call again."""
        self._forward_ends()
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()

    def _forward_starts(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or self._recorded():
            return
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, restore)
        self._saving.__enter__()

    def _forward_ends(self, *_: Any) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            pop_leaked_hooks(saving.pack_hook)

    def _pack(self, tensor: torch.Tensor) -> Ticket:
        """Held detached: else a node's own output would keep it alive."""
        return self._hold(tensor.detach())


def module_weights(root: nn.Module, structure: ModelStructure) -> dict[Module, ModuleWeights]:
    """Return what the weights of modules need on the device while a step runs, beside lying there.

    For the modules of all scopes, as things are ahead of a forward.

    Args:
        root: the model inside its wrappers.
        structure: of it.
    """
    seen: set[int] = set()
    found: dict[Module, ModuleWeights] = {}
    for scope, module in _scope_modules(root, structure):
        sharded_bytes = _GATHERED * _weight_bytes(module, True) if structure.sharded else 0
        whole = uncompiled(module)
        for path, child in [("", whole), *called_modules(whole)]:
            new, passing = 0, sharded_bytes
            for weight in child._parameters.values():
                if weight is None:
                    continue
                if weight.requires_grad and weight.grad is None and id(weight) not in seen:
                    new += weight.nbytes // _ranks_of(weight)
                elif weight.requires_grad:
                    passing += weight.nbytes
                elif not weight.is_floating_point():
                    passing += _DEQUANTISED * weight.nbytes
                seen.add(id(weight))
            if new or passing:
                found[scope, path] = ModuleWeights(new, passing)
    return found


def _scope_modules(root: nn.Module, structure: ModelStructure) -> Iterator[tuple[Scope, nn.Module]]:
    """In the order of backward: a weight that two modules share gets its gradient from the first."""
    wrap_call: dict[Scope, str | None] = {"head": structure.head, "final_norm": structure.final_norm}
    for scope, path in wrap_call.items():
        if path is not None:
            yield scope, root.get_submodule(path)
    for layer in reversed(structure.layers):
        yield layer.index, root.get_submodule(layer.module_path)
    if structure.embedding is not None:
        yield "embedding", root.get_submodule(structure.embedding)


def _weight_bytes(module: nn.Module, recurse: bool) -> int:
    return sum(weight.nbytes for weight in module.parameters(recurse))


def _ranks_of(weight: torch.Tensor) -> int:
    """Over how many ranks a weight is sharded: ``nbytes`` is that of all of it."""
    mesh = getattr(weight, "device_mesh", None)
    return 1 if mesh is None else int(mesh.size())
