"""How much memory a plan saves in a step, and how long the step takes, as numbers and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine import AppliedPlan
from ..engine.stats import gib, gib_text
from ..planner import Planner

COUNTED = "counted: what it swaps and recomputes"
COUNTED_SWAPS = "counted: what it swaps"
"""`Saving.source` if no step was measured without the plan. The counted bytes are then an upper bound: the
peak falls by less if the plan moves it to another moment of the step."""


@dataclass(frozen=True)
class Saving:
    """Memory that a plan saves in one step on one rank, and the time of the step.

    Args:
        saved_bytes: how much less device memory the step needs with the plan; ``None``: not known.
        source: how ``saved_bytes`` was obtained, or why it is not known.
        peak_bytes: the most device memory in use in a step with the plan; ``None``: not measured.
        step_ms: time of the step with the plan; ``None``: not known.
        without_step_ms: time of the step without the plan; ``None``: not known.
        time_source: how ``without_step_ms`` was obtained, in words.
        stall_ms: part of ``step_ms`` in which compute waits for copies.
    """

    saved_bytes: int | None
    source: str
    peak_bytes: int | None
    step_ms: float | None = None
    without_step_ms: float | None = None
    stall_ms: float = 0.0
    time_source: str = "predicted"

    @property
    def without_peak_bytes(self) -> int | None:
        """The peak of the same step without the plan; an upper bound if it was counted."""
        if self.peak_bytes is None or self.saved_bytes is None:
            return None
        return self.peak_bytes + self.saved_bytes

    @property
    def at_most(self) -> str:
        """Text to put before `without_peak_bytes`: "at most ", or nothing."""
        return "at most " if self.source.startswith("counted") else ""

    def as_log(self, prefix: str = "actswap_") -> dict[str, float]:
        """Return numbers for a training log, in GiB, by names that begin with ``prefix``."""
        numbers = {} if self.saved_bytes is None else {f"{prefix}saved_gib": gib(self.saved_bytes)}
        if self.peak_bytes is not None:
            numbers[f"{prefix}peak_gib"] = gib(self.peak_bytes)
        return numbers

    def in_words(self) -> str:
        """Return the saving and the time as one line of text."""
        return f"{self._memory_in_words()} {self._time_in_words()}".rstrip()

    def _memory_in_words(self) -> str:
        peak = "Peak not measured" if self.peak_bytes is None else f"Peak memory {gib_text(self.peak_bytes)}"
        if self.saved_bytes is None:
            return f"{peak} ({self.source})."
        saved = gib_text(self.saved_bytes)
        if self.without_peak_bytes is None:
            return f"{saved} less kept for backward than without a plan ({self.source}); peak not measured."
        if not self.saved_bytes:
            return f"{peak}, as without a plan ({self.source})."
        share = self.saved_bytes / self.without_peak_bytes
        without = f"{self.at_most}{gib_text(self.without_peak_bytes)} without a plan ({self.source})"
        return f"{peak} in place of {without}: {saved} less, {share:.0%}."

    def _time_in_words(self) -> str:
        if self.step_ms is None:
            return ""
        words = f"A step takes {self.step_ms:,.1f} ms"
        if self.stall_ms >= 0.05:
            words += f", {self.stall_ms:,.1f} ms of it waiting for copies"
        if self.without_step_ms is not None:
            words += f"; {self.without_step_ms:,.1f} ms without a plan ({self.time_source})"
        return f"{words}."


_TILED = "what it would be without tiles or chunks is not known"
_COMPILED = "what compiled layers recompute is not counted"


def saving_of(applied: AppliedPlan | Planner, peak_bytes: int | None = None, stall_ms: float = 0.0) -> Saving:
    """Return what is known of the memory that a plan saves in a step, on this rank.

    Args:
        applied: the plan on the model, or the planner that looks for one.
        peak_bytes: the measured peak of the steps with the plan; ``None``: not measured.
        stall_ms: time of a step in which compute waits for copies.
    """
    if isinstance(applied, Planner):
        if (found := applied.outcome) is not None:
            saved_bytes = max(found.without_peak_bytes - found.peak_bytes, 0)
            known = None if applied.trials else peak_bytes  # a plan file's is of another run
            times = found.step_ms, found.without_step_ms, stall_ms, found.time_source
            return Saving(saved_bytes, found.source, known or found.peak_bytes, *times)
        if applied.final_plan is None:
            left = f"the training ended in the planner's {applied.phase}, before a plan was found"
            return Saving(None, left, peak_bytes, stall_ms=stall_ms)
        applied = applied.final_plan
    plan, total = applied.plan, applied.stats()
    if plan.tiles or plan.streamed:
        return Saving(None, _TILED, peak_bytes, stall_ms=stall_ms)
    if not plan.rows:
        return Saving(0, "it keeps everything", peak_bytes)
    if not total.forwards:
        return Saving(None, "no step has run", peak_bytes)
    swapped_bytes = total.offloaded_bytes // total.forwards
    if applied.dropped_bytes is None:
        known_bytes = swapped_bytes if swapped_bytes else None
        source = f"{COUNTED_SWAPS}; {_COMPILED}" if swapped_bytes else _COMPILED
        return Saving(known_bytes, source, peak_bytes, stall_ms=stall_ms)
    return Saving(applied.dropped_bytes + swapped_bytes, COUNTED, peak_bytes, stall_ms=stall_ms)
