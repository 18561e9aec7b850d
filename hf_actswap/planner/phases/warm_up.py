"""The warm-up phase: no plan is on, steps are recorded, and running out of memory is survived.

Kernels are loaded, the optimizer makes its states, the allocator finds its blocks. The last two steps are
recorded: memory in the first of them, times in the second, because asking the allocator after each op takes
longer than a small op runs. One step serves for both if there is only one, or if a step has several
micro-batches (then the last is recorded, when gradients exist). If the two steps had batches of different
sizes, the memory is that of the first, and the times are scaled to its tokens.

A step may run several forwards ahead of its backward. Then the last is recorded too, and what autograd saves
in the others is taken off the recorded memory: it is there by the plan.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from math import prod

from torch import nn

from ...engine.agreement import from_all_ranks
from ...interrupts import uninterrupted
from ...plan.model_structure import ModelStructure, unwrapped
from ...plan.wrappers import called_modules, uncompiled
from ..planning import without_others
from ..profile import Profile
from ..record.recorder import DeviceClock, StepRecorder
from ..recorded_step import ModuleName, ModuleWeights, RecordedStep
from ..run import Run
from ..search.compiled_frontier import variants_of

logger = logging.getLogger(__name__)

LEAST_COMPILED_STEPS = 3
"""Least number of steps of the first warm-up where layers are compiled. The first step compiles and measures
kernels, whose buffers are not a step's memory. So memory is recorded in a later step, and in one before the
last, in which times are recorded."""

_GATHERED = 3
"""How often FSDP2 holds a layer's whole weights at once: gathered, the next layer's, gradients to scatter."""

_DEQUANTISED = 4
"""Bytes of a dequantised weight for each byte of a quantised one (4 bits to 16)."""


def first_steps(run: Run) -> int:
    asked = run.training.memory.warmup_steps
    if not run.training.structure.compiles or asked >= LEAST_COMPILED_STEPS:
        return asked
    run.log.info(
        "%d warm-up steps instead of memory.warmup_steps: %d, because the layers are compiled: the "
        "memory of the first step is also the compiler's",
        LEAST_COMPILED_STEPS,
        asked,
    )
    return LEAST_COMPILED_STEPS


class WarmUp:
    """The phase of the first steps, without a plan, of which the last one or two are recorded.

    Attributes:
        micro_batches: how many micro-batches the latest step had.
        peak_bytes: peak device memory of the last step, the worst of all ranks. ``None``: it has not ended,
            memory was recorded in it, something had to be evicted, or its batch was of another size.
    """

    name = "warm-up"

    def __init__(self, run: Run, steps: int) -> None:
        self._run, self._steps_left = run, steps
        self._forwards = 0
        self._forwards_before = run.forwards.most - 1  # of a step's forwards the last is recorded
        self.micro_batches = 1
        self.peak_bytes: int | None = None
        self._said = False
        self._recorder: StepRecorder | None = None
        self._memory: Profile | None = None
        self._states_bytes = self._baseline_bytes = 0
        self._in_flight = run.in_flight
        self._weights: dict[ModuleName, ModuleWeights] = {}
        self._next()

    @property
    def steps_left(self) -> int:
        return max(self._steps_left, 0)

    def forward_starts(self, _shape: tuple[int, ...] = ()) -> None:
        """Count a micro-batch of this step; ahead of the recorded one, note what is on the device."""
        if not self._said:
            self._said = True
            self._run.log.info("warm-up, %d step(s)", self._steps_left)
        self._forwards += 1
        run = self._run
        ahead = self._forwards <= self._forwards_before + 1 and not run.forwards
        if self._recorder is not None and self._memory is None and ahead:
            self._baseline_bytes = run.meter.allocated_bytes() + run.idle.away_bytes
            self._weights = module_weights(unwrapped(run.training.model), run.training.structure)

    def step_ended(self) -> RecordedStep | None:
        """End a step; after the last, return what was recorded. Every rank must call it."""
        self._steps_left -= 1
        self.micro_batches = max(self._forwards // self._run.training.chunks, 1)
        self._forwards_before, self._forwards = max(self._forwards - self._run.training.chunks, 0), 0
        recorder, profile = self._stopped(), None
        known, self._in_flight = self._in_flight == self._run.in_flight, self._run.in_flight
        if recorder is not None and all(from_all_ranks(recorder.complete and known)):
            profile = self._profile(recorder)
        if self._steps_left == 1:
            self._memory, profile = None if self._forwards_before else profile, None
        if profile is not None and self._memory is not None:
            measured = self._run.measured()
            if not measured.evicted_bytes and profile.batch_shape == self._memory.batch_shape:
                self.peak_bytes = measured.peak_bytes
            self._baseline_bytes += profile.optimizer_state_bytes - self._memory.optimizer_state_bytes
            profile = with_memory_of(profile, self._memory)
        if self._steps_left <= 0:
            if profile is not None:
                streamed = self._run.weights
                from_all_ranks(0)  # start together: ranks may share a switch
                others = self._run.forwards.most - 1
                return RecordedStep(
                    without_others(replace(profile, link=self._run.transfer.link()), others),
                    self._weights,
                    self._baseline_bytes,
                    {} if streamed is None else streamed.sizes_bytes,
                )
            self._run.log.info("the recorded step had no backward, or more forwards; another one is recorded")
            self._steps_left, self._memory = 1, None
        self._next()
        return None

    def close(self) -> None:
        self._stopped()

    @uninterrupted()
    def _stopped(self) -> StepRecorder | None:
        """Stop recording; return the recorder, if there was one."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._run.unwrap()
            self._run.idle.around_copies = nullcontext
            recorder.stop()
        return recorder

    @uninterrupted()
    def _next(self) -> None:
        run = self._run
        if self._steps_left > 2:
            run.replace_plan(None, guarded=True)
            return
        run.take_off()
        run.set_guard(True)
        self._states_bytes = run.state_bytes()
        clock = DeviceClock(run.transfer)
        # Else evictions would count as compute, beside which fates seem to cost little.
        run.idle.around_copies = clock.pause
        # Tensors that unrecorded micro-batches save must be evictable too: no plan is on meanwhile.
        self._recorder = StepRecorder(
            run.training.model,
            run.training.structure,
            run.meter if self._memory is None else None,
            clock,
            run.pack_handler,
            forwards_before=self._forwards_before,
            away_bytes=lambda: run.idle.away_bytes,
            chunks=run.training.chunks,
        )
        self._recorder.start()
        run.wrap()

    def _profile(self, recorder: StepRecorder) -> Profile:
        run = self._run
        profile = recorder.profile(
            device=run.device_name,
            device_bytes=run.meter.limit_bytes(),
            optimizer_state_bytes=self._states_bytes,
        )
        tokens = profile.batch_shape[-1] if profile.batch_shape else 0
        return replace(
            profile, frontier=variants_of(run.training.structure, unwrapped(run.training.model), tokens)
        )


def with_memory_of(times: Profile, memory: Profile) -> Profile:
    """Return a profile with the bytes of ``memory`` and the times of ``times``, a later step.

    If the two ran different ops, the times are those of ``memory`` too. Optimizer states allocated since are
    added to the bytes. If the batches differ in size, times are scaled to that of ``memory``.
    """
    states_bytes = times.optimizer_state_bytes
    more = states_bytes - memory.optimizer_state_bytes
    if [op_event.call for op_event in times.op_events] != [op_event.call for op_event in memory.op_events]:
        logger.info("the two recorded steps ran different ops; the times of the earlier one are taken")
        times = memory
    elif times.batch_shape != memory.batch_shape:
        scale = prod(memory.batch_shape) / max(prod(times.batch_shape), 1)
        op_events = tuple(
            replace(op_event, forward_ms=other.forward_ms * scale, backward_ms=other.backward_ms * scale)
            for op_event, other in zip(memory.op_events, times.op_events, strict=True)
        )
        times = replace(memory, op_events=op_events, outside_ms=times.outside_ms)
    op_events = tuple(
        replace(
            op_event,
            forward_base_bytes=other.forward_base_bytes + more,
            backward_base_bytes=other.backward_base_bytes + more,
        )
        for op_event, other in zip(times.op_events, memory.op_events, strict=True)
    )
    return replace(
        times,
        op_events=op_events,
        outside_base_bytes=memory.outside_base_bytes,
        optimizer_state_bytes=states_bytes,
        reserved_bytes=memory.reserved_bytes,
    )


def module_weights(root: nn.Module, structure: ModelStructure) -> dict[ModuleName, ModuleWeights]:
    """Return the device memory that each module's weights need during a step, beside the weights themselves.

    Call it ahead of a forward, with the model inside its wrappers. It covers the modules of all scopes.
    """
    seen: set[int] = set()
    found: dict[ModuleName, ModuleWeights] = {}
    # the last first: of a weight that head and embedding share, the head allocates the gradient
    for scope, place in reversed([*structure.scopes.items()]):
        module = root.get_submodule(place)
        sharded_bytes = (
            _GATHERED * sum(weight.nbytes for weight in module.parameters()) if structure.sharded else 0
        )
        whole = uncompiled(module)
        for path, child in [("", whole), *called_modules(whole)]:
            new, passing = 0, sharded_bytes
            for weight in child._parameters.values():
                if weight is None:
                    continue
                if weight.requires_grad and weight.grad is None and id(weight) not in seen:
                    mesh = getattr(weight, "device_mesh", None)  # `nbytes` counts the shards of all its ranks
                    new += weight.nbytes // (1 if mesh is None else int(mesh.size()))
                elif weight.requires_grad:
                    passing += weight.nbytes
                elif not weight.is_floating_point():
                    passing += _DEQUANTISED * weight.nbytes
                seen.add(id(weight))
            if new or passing:
                found[scope, path] = ModuleWeights(new, passing)
    return found
