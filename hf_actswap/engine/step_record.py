"""One measured step as plain data: what compute did when, what moved, what was in memory.

Times in ms since the step began, in compute's own order of work; sizes in bytes of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.actions import Scope
from .layer_marks import Phase
from .watched_copies import Way


@dataclass(frozen=True, slots=True)
class ComputePart:
    """Compute in one layer, or outside the layers.

    Args:
        phase: ``outside``: the optimizer's step, and what is around it.
        layer: its index; ``None``: what is around the layers.
        start_ms, end_ms: waits for copies included.
    """

    phase: Phase
    layer: int | None
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class MeasuredCopy:
    """One copy.

    Args:
        way: to the host, or back.
        scope, op_path: of the plan row that swaps it.
        size_bytes: that moved.
        asked_ms: where compute was when the copy was asked for.
        start_ms, end_ms: of the copy: it starts when it was asked for, when the one before it has ended, and
            (in) when its bytes are out.
    """

    way: Way
    scope: Scope | None
    op_path: str
    size_bytes: int
    asked_ms: float
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Compute waited for a copy."""

    way: Way
    scope: Scope | None
    op_path: str
    start_ms: float
    length_ms: float


@dataclass(frozen=True)
class StepTimeline:
    """What ran when.

    Args:
        step_ms: all of it.
        compute: in order, without gaps.
        copies: in the order in which they were asked for.
        stalls: in order.
        overlaps: whether copies run beside compute.
    """

    step_ms: float
    compute: tuple[ComputePart, ...]
    copies: tuple[MeasuredCopy, ...]
    stalls: tuple[Stall, ...]
    overlaps: bool


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Device memory at one moment.

    Args:
        ms: since the step began.
        total_bytes: in use.
        kept_bytes: saved for backward, and neither swapped nor recomputed.
        swapped_bytes: swapped, and on the device at this time.
    """

    ms: float
    total_bytes: int
    kept_bytes: int
    swapped_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """How memory was used.

    Args:
        step_ms: all of it; with the watching, so longer than an ordinary step.
        start_bytes: in use before the step: weights, gradients, optimizer states.
        samples: in order of time.
        parts: of compute, for orientation.
    """

    step_ms: float
    start_bytes: int
    samples: tuple[MemorySample, ...]
    parts: tuple[ComputePart, ...]
