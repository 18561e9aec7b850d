"""Compiled layers that save less than by default: predicts the profile that they would have.

A profile is recorded with layers as the compiler compiles them by default. Two things make them save less: a
limit on the share of their activation memory, within which PyTorch's solver does its best, and ops that the
compiler is asked to run again. The cost and saving of each variant is a `FrontierPoint`: a guess at first,
then what steps have measured. The guess for a share that no step has measured is corrected by the errors of
the measured shares next to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...plan.actions import COMPILE_BUDGET, MemoryPlan
from ...plan.model_structure import OUTPUT
from ...plan.saved_bytes import SavedStorage
from ..profile import FrontierPoint, OpEvent, Profile

SHARES = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.0)
"""The shares below 1 that plans may use; no finer ones, as a layer saves about 15 tensors of equal size."""

_AGAIN = ((0.0, 1.43), (0.2, 0.51), (0.5, 0.22), (1.0, 0.0))
"""(share, time that is added to backward, divided by that of forward). One H200, 16 layers of 7B shape, 8,192
tokens: 329 ms by default, a third of it forward; 353 at 0.5, 385 at 0.2, 486 where everything runs again."""

_PASSING, _PASSING_SLOPE = 0.75, 1.8
"""Rebuilt tensors are on the device beside saved ones (`passing_of`). Same runs: 16.9, 9.2, 5.3, 2.5 GiB."""

_LEVELS = 0.2, 5.0
"""The least and the largest factor by which a guess is corrected."""


def point_of_share(profile: Profile, share: float) -> FrontierPoint:
    """Return the point of a share: as measured, or guessed and corrected by the measured points."""
    if share >= 1:
        return FrontierPoint()
    guess = _guessed(share)
    known = {point.share: point for point in profile.frontier if point.measured and not point.recomputed}
    if share in known:
        return known[share]

    def level(value: Callable[[FrontierPoint], float]) -> float:
        pairs = [(at, value(point), value(_guessed(at))) for at, point in sorted(known.items())]
        points = [(at, min(max(found / own, _LEVELS[0]), _LEVELS[1])) for at, found, own in pairs if own > 0]
        return _interpolated(points, share) if points else 1.0

    return replace(
        guess,
        saved=min(guess.saved * level(lambda point: point.saved), 1.0),
        again=guess.again * level(lambda point: point.again),
    )


def offered_points(profile: Profile) -> tuple[FrontierPoint, ...]:
    """Return the ways to compile layers beside the default; none if the model is compiled as a whole."""
    calls = {op_event.call for op_event in profile.op_events}
    if not profile.compiled_layers or any(
        (layer, "", None) not in calls for layer in profile.compiled_layers
    ):
        return ()
    shares = dict.fromkeys((*SHARES, *(point.share for point in profile.frontier if not point.recomputed)))
    named = [point for point in profile.frontier if point.recomputed]
    return (*(point_of_share(profile, share) for share in shares if share < 1), *named)


def passing_of(saved: float) -> float:
    """Return a guess of `FrontierPoint.passing` for a layer with `FrontierPoint.saved`."""
    return _PASSING * max(0.0, 1 - _PASSING_SLOPE * saved)


def compile_points_of(profile: Profile, plan: MemoryPlan) -> tuple[tuple[int, FrontierPoint], ...]:
    """Return (layer, point) of the compiled layers that save less under ``plan`` than by default.

    A combination of recomputed ops of which nothing is known is assumed to change nothing.
    """
    rows: dict[int, list[tuple[str, str, float]]] = {}
    for row in plan.rows:
        if isinstance(row.scope, int) and row.scope in profile.compiled_layers and row.op_path != OUTPUT:
            share = float(row.parameters.get(COMPILE_BUDGET, 1.0)) if not row.op_path else 1.0
            rows.setdefault(row.scope, []).append((row.op_path, row.fate, share))
    named = {point.variant: point for point in profile.frontier if point.recomputed}
    found = []
    for layer, said in sorted(rows.items()):
        share = min(share for _, _, share in said)
        recomputed = tuple(sorted(path for path, fate, _ in said if path and fate == "recompute"))
        kept = tuple(sorted(path for path, fate, _ in said if path and fate == "keep")) if recomputed else ()
        point = named.get((share, recomputed, kept)) if recomputed else None
        point = point or point_of_share(profile, share)
        if point.variant != FrontierPoint().variant:
            found.append((layer, point))
    return tuple(found)


def without_compile_options(profile: Profile, plan: MemoryPlan) -> MemoryPlan:
    """Return ``plan`` without the rows and parameters that tell the compiler what to save."""
    return replace(
        plan,
        rows=tuple(
            replace(row, parameters={})
            for row in plan.rows
            if row.scope not in profile.compiled_layers or row.op_path in ("", OUTPUT)
        ),
    )


def with_compile_points(profile: Profile, points: Mapping[int, FrontierPoint]) -> Profile:
    """Return ``profile`` with the bytes and times of these layers changed to those of their points."""
    all_bytes = bytes_of_layers(profile)
    saved = replace(profile.saved, storages=tuple(_storage(item, points) for item in profile.saved.storages))
    op_events = tuple(_op_event(op_event, points, all_bytes) for op_event in profile.op_events)
    return replace(profile, saved=saved, op_events=op_events)


def bytes_of_layers(profile: Profile) -> Mapping[int, int]:
    """Return the bytes that each layer saves by default, without its input and its output."""
    found: dict[int, int] = {}
    for storage in profile.saved.storages:
        scope = _owner(storage)
        if scope is not None:
            found[scope] = found.get(scope, 0) + storage.size_bytes
    return found


def _owner(storage: SavedStorage) -> int | None:
    """Return the layer that makes a storage and alone reads it; ``None``: there is none."""
    scope = storage.uses[0].producer[0]
    alone = all(use.at[0] == scope and use.producer[0] == scope for use in storage.uses)
    return scope if alone and isinstance(scope, int) else None


def _storage(storage: SavedStorage, points: Mapping[int, FrontierPoint]) -> SavedStorage:
    scope = _owner(storage)
    if scope is None or scope not in points:
        return storage
    saved = points[scope].saved
    uses = tuple(
        replace(
            use,
            start_bytes=int(use.start_bytes * saved),
            stop_bytes=int(use.stop_bytes * saved),
            size_bytes=int(use.size_bytes * saved),
        )
        for use in storage.uses
    )
    return SavedStorage(int(storage.size_bytes * saved), uses)


def _op_event(
    op_event: OpEvent, points: Mapping[int, FrontierPoint], all_bytes: Mapping[int, int]
) -> OpEvent:
    scope = op_event.call[0]
    if not isinstance(scope, int) or scope not in points:
        return op_event
    point = points[scope]
    passing_bytes = int(point.passing * all_bytes.get(scope, 0))
    return replace(
        op_event,
        backward_ms=op_event.backward_ms + point.again * op_event.forward_ms,
        forward_base_bytes=max(op_event.forward_base_bytes + passing_bytes, 0),
        backward_base_bytes=max(op_event.backward_base_bytes + passing_bytes, 0),
    )


def _guessed(share: float) -> FrontierPoint:
    again = _interpolated(_AGAIN, share)
    return FrontierPoint(share, saved=share, again=again, passing=passing_of(share))


def _interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at ``at`` by linear interpolation, constant beyond the ends. ``points`` ascend."""
    below = [point for point in points if point[0] <= at] or [points[0]]
    above = [point for point in points if point[0] >= at] or [points[-1]]
    (low, first), (high, last) = below[-1], above[0]
    return first if high == low else first + (last - first) * (at - low) / (high - low)
