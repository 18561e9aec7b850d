"""Warm-up: nothing is decided; steps are recorded, and running out of memory is survived.

Kernels are loaded, the optimizer makes its states, the allocator finds its blocks. The last two steps are
recorded: memory in the first of them, times in the second, because asking the allocator after each op takes
longer than a small op runs. Where there is one step only, or a step has several micro-batches (the last one
counts, when gradients are there), one step serves for both.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ..engine.agreement import from_all_ranks
from ..engine.link import Link
from ..plan.outline import unwrapped
from .held_forwards import HeldForwards
from .profile import Profile
from .record.clock import DeviceClock
from .record.recorder import StepRecorder
from .run import Run
from .search.compiled_ways import ways_of

logger = logging.getLogger(__name__)


class WarmUp:
    """See the module's text.

    Args:
        run: the training.
        steps: how many, at least 1.
        micro_batches: forwards of a step, if it is known.
    """

    name = "warm-up"

    def __init__(self, run: Run, steps: int, micro_batches: int = 1) -> None:
        self._run, self._steps_left, self._micro_batches = run, steps, micro_batches
        self._forwards = 0
        self._recorder: StepRecorder | None = None
        self._held: HeldForwards | None = None
        self._memory: Profile | None = None
        self._states_bytes = 0
        logger.info("%s: warm-up, %d step(s)", run.name, steps)
        self._next()

    @property
    def steps_left(self) -> int:
        """Steps that are still to come."""
        return max(self._steps_left, 0)

    def forward_starts(self) -> None:
        """A micro-batch of this step."""
        self._forwards += 1

    def step_ended(self) -> Profile | None:
        """Return the profile, once all ranks have one; every rank must call it."""
        self._steps_left -= 1
        self._micro_batches, self._forwards = max(self._forwards, 1), 0
        recorder, self._recorder = self._recorder, None
        profile = None
        if recorder is not None:
            self._stop(recorder)
            if all(from_all_ranks(recorder.complete)):
                profile = self._profile(recorder)
        if self._steps_left == 1:
            self._memory, profile = profile if self._micro_batches == 1 else None, None
        if profile is not None and self._memory is not None:
            profile = with_memory_of(profile, self._memory)
        if self._steps_left <= 0:
            if profile is not None:
                return replace(profile, link=self._link())
            logger.info("%s: the recorded step had no backward; another one is recorded", self._run.name)
            self._steps_left, self._memory = 1, None
        self._next()
        return None

    def close(self) -> None:
        """Stop recording. Safe to call again."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._stop(recorder)

    def _stop(self, recorder: StepRecorder) -> None:
        self._run.take_around()
        recorder.stop()
        held, self._held = self._held, None
        if held is not None:
            held.stop()

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


def with_memory_of(times: Profile, memory: Profile) -> Profile:
    """Return ``times`` with the bytes of an earlier step, if both did the same; else it has none: ``memory``.

    What the optimizer has allocated since is there in later steps, and is added.
    """
    if [span.call for span in times.spans] != [span.call for span in memory.spans]:
        logger.info("the two recorded steps ran different ops; the times of the earlier one are taken")
        return memory
    more = times.optimizer_state_bytes - memory.optimizer_state_bytes
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
