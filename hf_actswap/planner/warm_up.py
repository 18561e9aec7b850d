"""Warm-up: nothing is decided; steps are recorded, and running out of memory is survived.

Kernels are loaded, the optimizer makes its states, the allocator finds its blocks. The last two steps are
recorded: memory in the first of them, times in the second, because asking the allocator after each op takes
longer than a small op runs. Where there is one step only, or a step has several micro-batches (the last one
counts, when gradients are there), one step serves for both. If the two had batches of different sizes, the
memory is that of the first, and the times are scaled to its tokens.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ..engine.agreement import from_all_ranks
from ..engine.link import Link
from ..interrupts import uninterrupted
from ..plan.outline import unwrapped
from .held_forwards import HeldForwards
from .model_weights import module_weights
from .profile import Profile
from .record.clock import DeviceClock
from .record.recorder import StepRecorder
from .run import Run
from .search.compiled_ways import ways_of
from .shape_buckets import Module, ModuleWeights, RecordedStep, tokens_of

logger = logging.getLogger(__name__)

LEAST_COMPILED_STEPS = 3
"""Of a first warm-up, where layers are compiled. Their first step compiles them and measures kernels, whose
buffers are no memory of a step: the step whose memory is recorded must be a later one, and not the last,
whose times are."""


def first_steps(run: Run) -> int:
    """Return the steps of the first warm-up: as many as asked for, but see `LEAST_COMPILED_STEPS`."""
    asked = run.memory.warmup_steps
    compiled = run.outline.compiled or any(layer.compiled for layer in run.outline.layers)
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
    """See the module's text.

    Args:
        run: the training.
        steps: how many, at least 1.
        micro_batches: forwards of a step, if it is known.
    """

    name = "warm-up"
    peak_bytes: int | None = None
    """The most that was in use in the last step, the worst of all ranks, once that has ended. ``None``:
    memory was recorded in that step, something had to be evicted, or its batch was of another size."""

    def __init__(self, run: Run, steps: int, micro_batches: int = 1) -> None:
        self._run, self._steps_left, self._micro_batches = run, steps, micro_batches
        self._forwards = 0
        self._recorder: StepRecorder | None = None
        self._held: HeldForwards | None = None
        self._memory: Profile | None = None
        self._states_bytes = self._resting_bytes = 0
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
        if self._recorder is not None and self._memory is None and self._forwards == self._micro_batches:
            self._resting_bytes = run.meter.allocated_bytes() + run.idle.away_bytes
            self._weights = module_weights(unwrapped(run.model), run.outline)

    def step_ended(self) -> RecordedStep | None:
        """Return what was recorded, once all ranks have it; every rank must call it."""
        self._steps_left -= 1
        self._micro_batches, self._forwards = max(self._forwards, 1), 0
        recorder, profile = self._stopped(), None
        if recorder is not None and all(from_all_ranks(recorder.complete)):
            profile = self._profile(recorder)
        if self._steps_left == 1:
            self._memory, profile = profile if self._micro_batches == 1 else None, None
        if profile is not None and self._memory is not None:
            measured = self._run.measured()
            if not measured.evicted_bytes and profile.batch_shape == self._memory.batch_shape:
                self.peak_bytes = measured.peak_bytes
            self._resting_bytes += more_states_bytes(profile, self._memory)
            profile = with_memory_of(profile, self._memory)
        if self._steps_left <= 0:
            if profile is not None:
                return RecordedStep(replace(profile, link=self._link()), self._weights, self._resting_bytes)
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
            self._run.take_around()
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
            run.outline,
            run.meter if self._memory is None else None,
            DeviceClock(run.transfer),
            run.keeper,
            forwards_before=self._micro_batches - 1,
            away_bytes=lambda: run.idle.away_bytes,
        )
        self._held = HeldForwards(run.called, run.keeper, lambda: recorder.in_forward)
        self._held.start()
        recorder.start()
        run.put_around()

    def _profile(self, recorder: StepRecorder) -> Profile:
        run = self._run
        profile = recorder.profile(
            device=run.device_name,
            device_bytes=run.meter.limit_bytes(),
            optimizer_state_bytes=self._states_bytes,
        )
        tokens = profile.batch_shape[-1] if profile.batch_shape else 0
        return replace(profile, frontier=ways_of(run.outline, unwrapped(run.model), tokens))

    def _link(self) -> Link | None:
        from_all_ranks(0)  # start together: ranks may share a switch
        return self._run.transfer.link()


def more_states_bytes(times: Profile, memory: Profile) -> int:
    """Return what the optimizer has allocated since the memory was recorded."""
    return times.optimizer_state_bytes - memory.optimizer_state_bytes


def with_memory_of(times: Profile, memory: Profile) -> Profile:
    """Return ``times`` with the bytes of an earlier step, if both did the same; else it has none: ``memory``.

    What the optimizer has allocated since is there in later steps, and is added. Times of a batch of another
    size are scaled to that whose bytes they get.
    """
    if [span.call for span in times.spans] != [span.call for span in memory.spans]:
        logger.info("the two recorded steps ran different ops; the times of the earlier one are taken")
        return memory
    more = more_states_bytes(times, memory)
    if times.batch_shape != memory.batch_shape:
        times = _at_shape_of(memory, times)
    return replace(
        times,
        spans=tuple(
            replace(
                span,
                forward_base_bytes=other.forward_base_bytes + more,
                backward_base_bytes=other.backward_base_bytes + more,
            )
            for span, other in zip(times.spans, memory.spans, strict=True)
        ),
        outside_base_bytes=memory.outside_base_bytes,
        reserved_bytes=memory.reserved_bytes,
    )


def _at_shape_of(memory: Profile, times: Profile) -> Profile:
    scale = tokens_of(memory.batch_shape) / max(tokens_of(times.batch_shape), 1)
    return replace(
        memory,
        spans=tuple(
            replace(span, forward_ms=other.forward_ms * scale, backward_ms=other.backward_ms * scale)
            for span, other in zip(memory.spans, times.spans, strict=True)
        ),
        outside_ms=times.outside_ms,
        optimizer_state_bytes=times.optimizer_state_bytes,
    )
