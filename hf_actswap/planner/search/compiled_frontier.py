"""Ways to compile a layer so that it saves less: guessed costs at first, then corrected by measured trials.

A point of this frontier (`FrontierPoint`) is a set of ops that a compiled layer may be asked to run again,
with what they cost and save. PyTorch's own solver looks for such ops by counting operations. Two combinations
are good in every decoder layer, and it does not always find them (at 32,768 tokens it prefers to run
attention again):

* the feed-forward block and the outputs of the norms: wide, with few operations for each byte;
* the attention's projections too, while the costly result of the attention core stays.

Counted in the graphs of PyTorch 2.13 at 7B's proportions and 32,768 tokens, these two save 0.37 and 0.19 of a
layer's bytes and run 0.27 and 0.42 of its forward's operations again. For 0.33 and 0.19 of the bytes the
solver runs 0.60 and 0.72 again: a few values of its budget cannot take their place.

The plan of a trial has one or two points, and its steps give three sums: time, swapped bytes, and peak. Each
is compared with its prediction, and the difference is attributed to the points in proportion: time to what
runs again, swapped bytes to what is saved, and what then remains of the peak to temporary memory. (If nothing
is swapped, the peak corrects what is saved.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from ...plan.actions import MemoryPlan, PlanRow
from ...plan.model_structure import LayerStructure, ModelStructure, is_below
from ...plan.opnames import ATTENTION_CORE
from ...plan.record import Call, OpKey
from ...plan.wrapper_rules import problems_of_compiled
from ..cost.compiled_shares import bytes_of_layers, compile_points_of, passing_of
from ..cost.simulate import predict
from ..plan_file import Trial
from ..profile import FrontierPoint, Prediction, Profile

_FACTORS = 0.2, 5.0
"""The least and largest factor by which one trial changes a point: a disturbed step must not spoil it."""

_MOST_PASSING = 1.5

_BESIDE_PRODUCTS, _CORE = 1.4, 1.6
"""Time of a layer's forward without the attention core, as a multiple of that of its matrix products; and
time of one operation of the core, as a multiple of that of one operation of these products. Measured sums on
one H200, 7B shape: 1.7 times the products at 8,192 tokens, 2.4 at 32,768."""


@dataclass(frozen=True)
class Shown:
    """What the steps of a trial have measured. ``None``: each of them compiled or prepared something.

    Part of the peak is what was missing when memory ran out.
    """

    step_ms: float | None
    peak_bytes: int
    offloaded_bytes: int


def shown_by(trial: Trial) -> Shown:
    """Return what the steps of a trial have measured; the time of the first, which compiles, is left out."""
    return Shown(
        min((step.step_ms for step in trial.steps[1:]), default=None),
        max(step.peak_bytes + step.missing_bytes for step in trial.steps),
        trial.steps[-1].offloaded_bytes,
    )


def learned(profile: Profile, plan: MemoryPlan, shown: Shown) -> Profile:
    """Return ``profile``, by which ``plan`` was found, with its frontier corrected by the plan's trial.

    It is ``profile`` itself if the plan has no point.
    """
    points = dict(compile_points_of(profile, plan))
    if not points:
        return profile
    predicted = predict(profile, plan)
    time_factor = _time_factor(profile, points, predicted, shown)
    bytes_factor = _bytes_factor(profile, plan, points, predicted, shown)
    moved = [
        replace(
            point,
            again=point.again * time_factor,
            saved=min(point.saved * bytes_factor, 1.0),
            measured=True,
        )
        for point in points.values()
    ]
    return _with_peak(_with_points(profile, moved), plan, shown)


def _time_factor(
    profile: Profile, points: Mapping[int, FrontierPoint], predicted: Prediction, shown: Shown
) -> float:
    again_ms = sum(
        points[op_event.call[0]].again * op_event.forward_ms
        for op_event in profile.op_events
        if isinstance(op_event.call[0], int) and op_event.call[0] in points
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


def _with_peak(profile: Profile, plan: MemoryPlan, shown: Shown) -> Profile:
    """Attribute what is left of the peak's difference to the point of the layer in which the peak is."""
    predicted = predict(profile, plan)
    points, scope = dict(compile_points_of(profile, plan)), predicted.peak_at[0]
    all_bytes = bytes_of_layers(profile).get(scope, 0) if isinstance(scope, int) else 0
    if not isinstance(scope, int) or scope not in points or not all_bytes:
        return profile
    point = points[scope]
    passing = point.passing + (shown.peak_bytes - predicted.peak_bytes) / all_bytes
    passing = min(max(passing, -_MOST_PASSING), _MOST_PASSING)
    return _with_points(profile, [replace(point, passing=passing)])


def _with_points(profile: Profile, points: Iterable[FrontierPoint]) -> Profile:
    """Return ``profile`` with these points in its frontier, in place of those of equal variants."""
    frontier = {point.variant: point for point in (*profile.frontier, *points)}
    return replace(profile, frontier=tuple(frontier.values()))


def _clipped(factor: float) -> float:
    return min(max(factor, _FACTORS[0]), _FACTORS[1])


def variants_of(structure: ModelStructure, root: nn.Module, tokens: int) -> tuple[FrontierPoint, ...]:
    """Return guessed points for layers that are compiled one by one; none if the layers differ.

    ``root`` is the model inside its wrappers, ``tokens`` the length of a sequence.
    """
    layers = [layer for layer in structure.layers if layer.compiled]
    if not layers or structure.compiled or not structure.functions_known:
        return ()
    found = [tuple(_points(layer, root.get_submodule(layer.module_path), tokens)) for layer in layers]
    if any([point.variant for point in points] != [point.variant for point in found[0]] for points in found):
        return ()

    def is_possible(point: FrontierPoint) -> bool:
        rows = [PlanRow(layer.index, path, "recompute") for layer in layers for path in point.recomputed]
        return not problems_of_compiled(MemoryPlan(tuple(rows), len(structure.layers)), structure)

    return tuple(filter(is_possible, found[0]))


@dataclass(frozen=True)
class _WeightProduct:
    """A matrix product with a weight: the key of its call, and of the call that makes its input."""

    key: OpKey
    source: OpKey
    in_features: int
    out_features: int

    @property
    def operations(self) -> int:
        """Half the operations for each token: multiplications alone."""
        return self.in_features * self.out_features


def _points(layer: LayerStructure, module: nn.Module, tokens: int) -> Iterator[FrontierPoint]:
    tops = [op.path for op in layer.ops if op.kind == "module" and "." not in op.path]
    products = list(_products(layer.calls, module))
    attention = [path for path in tops if path in layer.attention_paths]
    blocks = [path for path in tops if path not in attention and _inside(products, path)]
    if len(attention) != 1 or not blocks:
        return
    norms = [path for path in tops if path not in (*attention, *blocks)]
    names = {key[0] for path in norms for key in _handed_on(layer.calls, path)}
    recomputed = (*blocks, *sorted(names))
    attended = _inside(products, attention[0])
    core = [item for item in attended if is_below(item.source[0], attention[0])]
    again = [item for path in blocks for item in _inside(products, path) if _is_read(layer, item, path)]
    projections = [item for item in attended if item not in core]
    inputs = {item.source: item.in_features for item in products[:-1]}  # saved for each token, once each
    outputs = sum(item.out_features for item in products[:-1])
    all_features = sum(inputs.values()) + outputs + products[-1].in_features
    core_features = sum(item.in_features + item.out_features for item in core)
    plus = sum(item.out_features for item in projections)
    core_operations = tokens * sum(item.in_features for item in core)
    unit = sum(item.operations for item in products) * _BESIDE_PRODUCTS + core_operations * _CORE
    kept_core = (f"{attention[0]}.{ATTENTION_CORE}",)
    for paths, kept, features, runs in (
        (recomputed, (), core_features + plus, again),
        ((*recomputed, *attention), kept_core, core_features, again + projections),
    ):
        saved = min(features / all_features, 1.0)
        share = sum(item.operations for item in runs) / unit
        yield FrontierPoint(1.0, tuple(sorted(paths)), kept, saved, share, passing_of(saved))


def _products(calls: Iterable[Call], module: nn.Module) -> Iterator[_WeightProduct]:
    for call in calls:
        path, _, name = call.key[0].rpartition(".")
        weight = getattr(module.get_submodule(path), "weight", None) if name == "linear" else None
        if weight is not None and weight.dim() == 2 and call.inputs:
            yield _WeightProduct(call.key, call.inputs[0], int(weight.shape[1]), int(weight.shape[0]))


def _inside(products: Iterable[_WeightProduct], path: str) -> list[_WeightProduct]:
    return [item for item in products if is_below(item.key[0], path)]


def _is_read(layer: LayerStructure, product: _WeightProduct, path: str) -> bool:
    """Return whether a call inside ``path`` reads the product's result; else it need not run again."""
    return any(product.key in call.inputs and is_below(call.key[0], path) for call in layer.calls)


def _handed_on(calls: Iterable[Call], path: str) -> set[OpKey]:
    """Return the keys of calls inside ``path`` whose results are read outside of it."""
    return {
        key
        for call in calls
        if not is_below(call.key[0], path)
        for key in call.inputs
        if is_below(key[0], path)
    }
