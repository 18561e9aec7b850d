"""Times that a few layers have shown, for all layers of a model.

The bytes are those of the whole model's step on fake tensors; the times are the measured ones. A layer that
was not measured gets the mean of those measured layers that do the same: the same ops, which save as much.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import Problem
from ..plan.actions import Scope
from ..planner.profile import Profile, Span
from .model_source import ModelError

_Key = tuple[Scope | None, str, int | None, int]
"""A call, and which of its spans."""
_Times = tuple[float, float]
"""Forward and backward, in ms."""


def for_all_layers(
    measured: Profile,
    whole: Profile,
    measured_weights: int,
    weights: int,
    layer_types: Sequence[str] = (),
) -> Profile:
    """Return the profile of the whole model with measured times.

    Args:
        measured: of the model's first layers, and what is around them.
        whole: of all layers, from shapes.
        measured_weights, weights: how many both have; the optimizer's time is in their relation.
        layer_types: of each layer, what ops and bytes do not show: sliding or full attention.

    Raises:
        ModelError: layers do what none of the measured ones does, or a real step runs other ops than the
            step on fake tensors.
    """
    kinds = _kinds(whole, layer_types)
    alike = _representatives(kinds, measured.num_layers)
    times = {key: (span.forward_ms, span.backward_ms) for key, span in _keyed(measured.spans)}
    spans = []
    missing: Counter[str] = Counter()
    for (scope, path, ordinal, number), span in _keyed(whole.spans):
        scopes = alike[scope] if isinstance(scope, int) else (scope,)
        found = [times[key] for at in scopes if (key := (at, path, ordinal, number)) in times]
        if not found:
            missing[f"{scope}, {path or 'what is around'}"] += 1
            continue
        forward_ms, backward_ms = _mean(found)
        spans.append(replace(span, forward_ms=forward_ms, backward_ms=backward_ms))
    if missing:
        raise ModelError([_other_ops(missing)])
    return replace(
        whole,
        spans=tuple(spans),
        link=measured.link,
        device=measured.device,
        device_bytes=measured.device_bytes,
        outside_ms=measured.outside_ms * weights / measured_weights,
        reserved_bytes=measured.reserved_bytes,
        source="measured",
    )


def _keyed(spans: Iterable[Span]) -> Iterator[tuple[_Key, Span]]:
    """Yield spans by call and number; spans of no kernel too, so that both profiles count alike."""
    seen: Counter[object] = Counter()
    for span in spans:
        yield (*span.call, seen[span.call]), span
        seen[span.call] += 1


def _kinds(whole: Profile, layer_types: Sequence[str]) -> Mapping[int, object]:
    """What each layer does: its type, its calls in order, and the bytes that they save."""
    calls: dict[int, list[object]] = defaultdict(list)
    for span in whole.spans:
        scope, path, ordinal = span.call
        if isinstance(scope, int):
            calls[scope].append((path, ordinal))
    sizes: dict[int, dict[str, int]] = defaultdict(dict)
    for (scope, path), size_bytes in whole.saved.by_op().items():
        if isinstance(scope, int):
            sizes[scope][path] = size_bytes
    types = dict(enumerate(layer_types))
    return {
        layer: (types.get(layer), tuple(calls[layer]), tuple(sorted(sizes[layer].items()))) for layer in calls
    }


def _representatives(kinds: Mapping[int, object], measured: int) -> Mapping[int, tuple[int, ...]]:
    """Return, for each layer, the measured ones whose times it gets: itself, or all of its kind."""
    by_kind: dict[object, list[int]] = defaultdict(list)
    for layer in range(measured):
        by_kind[kinds[layer]].append(layer)
    strange = [layer for layer, kind in kinds.items() if kind not in by_kind]
    if strange:
        expected = f"at least {strange[0] + 1}: no earlier layer does what layer {strange[0]} does"
        raise ModelError([Problem("--layers", expected, str(measured))])
    return {layer: (layer,) if layer < measured else tuple(by_kind[kind]) for layer, kind in kinds.items()}


def _mean(times: list[_Times]) -> _Times:
    return sum(forward for forward, _ in times) / len(times), sum(back for _, back in times) / len(times)


def _other_ops(missing: Counter[str]) -> Problem:
    first = next(iter(missing))
    return Problem(
        "--layers",
        "a model that runs the same ops on this device as on fake tensors",
        f"{missing.total()} op(s) that were not met, the first in layer {first}",
        "Leave --layers out: then all layers are measured.",
    )
