"""The frontier of compiled layers, as the steps of trials show it.

A trial has one or two points in it, and its step shows three sums: how long it lasted, what it swapped, and
its peak. Each sum is compared with the paper's, and the difference is laid to the points in proportion: time
to what is run again, bytes that moved to what is saved, and of the peak what is left then to what is on the
device only for a while. (Where nothing moved the peak tells of what is saved.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...plan.actions import MemoryPlan
from ..cost.compiled_shares import bytes_of_layers, points_in
from ..cost.simulate import predict
from ..profile import FrontierPoint, Prediction, Profile, Way
from ..trials import Trial

_FACTORS = 0.2, 5.0
"""By how much one step may change a point at most: a step that was disturbed must not spoil it."""

_MOST_PASSING = 1.5


@dataclass(frozen=True)
class Shown:
    """What a step of a trial has shown.

    Args:
        step_ms: of a step in which nothing was compiled or made ready; ``None``: there was none.
        peak_bytes: in use at most, what had to be evicted included.
        offloaded_bytes: that moved to the host.
    """

    step_ms: float | None
    peak_bytes: int
    offloaded_bytes: int


def shown_by(trial: Trial) -> Shown:
    """Return what the steps of a trial have shown; the first one compiles, and its time says nothing."""
    return Shown(
        min((step.step_ms for step in trial.steps[1:]), default=None),
        max(step.peak_bytes + step.evicted_bytes for step in trial.steps),
        trial.steps[-1].offloaded_bytes,
    )


def learned(profile: Profile, plan: MemoryPlan, shown: Shown) -> Profile:
    """Return ``profile`` with a frontier on which ``plan`` does what was shown; itself: nothing to learn.

    Args:
        profile: by which the plan was found.
        plan: that was tried.
        shown: of it.
    """
    points = dict(points_in(profile, plan))
    if not points:
        return profile
    predicted = predict(profile, plan)
    factors = (
        _time_factor(profile, points, predicted, shown),
        _bytes_factor(profile, plan, points, predicted, shown),
    )
    moved = {point.way: _moved(point, *factors) for point in points.values()}
    found = replace(profile, frontier=_merged(profile.frontier, moved))
    return _with_peak(found, plan, shown)


def _time_factor(
    profile: Profile, points: Mapping[int, FrontierPoint], predicted: Prediction, shown: Shown
) -> float:
    again_ms = sum(
        points[span.call[0]].again * span.forward_ms
        for span in profile.spans
        if isinstance(span.call[0], int) and span.call[0] in points
    )
    if shown.step_ms is None or again_ms <= 0:
        return 1.0
    return _clipped((again_ms + shown.step_ms - predicted.step_ms) / again_ms)


def _bytes_factor(
    profile: Profile,
    plan: MemoryPlan,
    points: Mapping[int, FrontierPoint],
    predicted: Prediction,
    shown: Shown,
) -> float:
    all_bytes = bytes_of_layers(profile)
    saved_bytes = {layer: point.saved * all_bytes.get(layer, 0) for layer, point in points.items()}
    moving = {layer for layer in points if (row := plan.row(layer, "")) is not None and row.fate == "swap"}
    moved_bytes = sum(saved_bytes[layer] for layer in moving)
    if moved_bytes > 0 and shown.offloaded_bytes:
        return _clipped((moved_bytes + shown.offloaded_bytes - predicted.swapped_bytes) / moved_bytes)
    kept_bytes = sum(saved_bytes.values()) - moved_bytes
    if moving or kept_bytes <= 0 or predicted.peak_at[0] not in profile.compiled_layers:
        return 1.0
    return _clipped((kept_bytes + shown.peak_bytes - predicted.peak_bytes) / kept_bytes)


def _moved(point: FrontierPoint, time_factor: float, bytes_factor: float) -> FrontierPoint:
    saved = min(point.saved * bytes_factor, 1.0)
    return replace(point, again=point.again * time_factor, saved=saved, measured=True)


def _with_peak(profile: Profile, plan: MemoryPlan, shown: Shown) -> Profile:
    """Lay what is left of the peak's difference to the point of the layer in which it is."""
    predicted = predict(profile, plan)
    points, scope = dict(points_in(profile, plan)), predicted.peak_at[0]
    all_bytes = bytes_of_layers(profile).get(scope, 0) if isinstance(scope, int) else 0
    if not isinstance(scope, int) or scope not in points or not all_bytes:
        return profile
    point = points[scope]
    passing = point.passing + (shown.peak_bytes - predicted.peak_bytes) / all_bytes
    passing = min(max(passing, -_MOST_PASSING), _MOST_PASSING)
    return replace(profile, frontier=_merged(profile.frontier, {point.way: replace(point, passing=passing)}))


def _merged(
    frontier: tuple[FrontierPoint, ...], moved: Mapping[Way, FrontierPoint]
) -> tuple[FrontierPoint, ...]:
    kept = [moved.get(point.way, point) for point in frontier]
    known = {point.way for point in frontier}
    return (*kept, *(point for way, point in moved.items() if way not in known))


def _clipped(factor: float) -> float:
    return min(max(factor, _FACTORS[0]), _FACTORS[1])
