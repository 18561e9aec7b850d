"""Ops that a compiled layer may be told to run again, and what that comes to, guessed before a step shows it.

PyTorch's own solver looks for the ops to run again by counting operations. Two combinations are good in every
decoder layer, and it does not always find them (at 32,768 tokens it prefers to run attention again):

* the feed-forward block and the outputs of the norms: wide, and few operations for each byte;
* the attention's projections too; what the attention core makes is dear, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ...plan.actions import MemoryPlan, PlanRow
from ...plan.compiled_rules import problems_of_compiled
from ...plan.mindformers_names import ATTENTION_CORE
from ...plan.outline import LayerOutline, Outline, is_below
from ...plan.record import Call, OpKey
from ..cost.compiled_shares import passing_of
from ..profile import FrontierPoint

_BESIDE_PRODUCTS, _CORE = 1.4, 1.6
"""Time of a layer's forward over that of its products: without the attention core, and what the core adds for
each of its operations over one of theirs. One H200, 7B shape: 1.7 at 8,192 tokens, 2.4 at 32,768."""


def ways_of(outline: Outline, root: nn.Module, tokens: int) -> tuple[FrontierPoint, ...]:
    """Return guessed points for layers that are compiled one by one; none where layers or names differ.

    Args:
        outline: of the model.
        root: the model inside its wrappers.
        tokens: length of a sequence.
    """
    layers = [layer for layer in outline.layers if layer.compiled]
    if not layers or outline.compiled or not outline.functions_known:
        return ()
    found = [tuple(_points(layer, root.get_submodule(layer.module_path), tokens)) for layer in layers]
    alike = all([point.way for point in points] == [point.way for point in found[0]] for points in found)
    return tuple(point for point in found[0] if alike and _is_possible(point, layers, outline))


def _is_possible(point: FrontierPoint, layers: Iterable[LayerOutline], outline: Outline) -> bool:
    rows = [PlanRow(layer.index, path, "recompute") for layer in layers for path in point.recomputed]
    return not problems_of_compiled(MemoryPlan(tuple(rows), len(outline.layers)), outline)


@dataclass(frozen=True)
class _WeightProduct:
    """A product with a weight.

    Args:
        key: of its call.
        source: who makes its input.
        in_features, out_features: of the weight.
    """

    key: OpKey
    source: OpKey
    in_features: int
    out_features: int

    @property
    def operations(self) -> int:
        """For each token, over 2."""
        return self.in_features * self.out_features


def _points(layer: LayerOutline, module: nn.Module, tokens: int) -> Iterator[FrontierPoint]:
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
    all_features = _features(products[:-1]) + products[-1].in_features
    core_features = sum(item.in_features + item.out_features for item in core)
    plus = sum(item.out_features for item in projections)
    core_operations = tokens * sum(item.in_features for item in core)
    unit = sum(item.operations for item in products) * _BESIDE_PRODUCTS + core_operations * _CORE
    for paths, kept, features, runs in (
        (recomputed, (), core_features + plus, again),
        (
            (*recomputed, *attention),
            (f"{attention[0]}.{ATTENTION_CORE}",),
            core_features,
            again + projections,
        ),
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


def _features(products: Sequence[_WeightProduct]) -> int:
    """Features that are saved for each token: each input once, and each output."""
    inputs = {item.source: item.in_features for item in products}
    return sum(inputs.values()) + sum(item.out_features for item in products)


def _inside(products: Iterable[_WeightProduct], path: str) -> list[_WeightProduct]:
    return [item for item in products if is_below(item.key[0], path)]


def _is_read(layer: LayerOutline, product: _WeightProduct, path: str) -> bool:
    """Whether something inside ``path`` reads it; else nobody needs it again."""
    return any(product.key in call.inputs and is_below(call.key[0], path) for call in layer.calls)


def _handed_on(calls: Iterable[Call], path: str) -> set[OpKey]:
    """What the ops inside ``path`` make and others read."""
    return {
        key
        for call in calls
        if not is_below(call.key[0], path)
        for key in call.inputs
        if is_below(key[0], path)
    }
