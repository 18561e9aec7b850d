"""What a plan recomputes in one compiled layer: equal rules, one graph."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from torch.utils.checkpoint import CheckpointPolicy

from ..plan.actions import COMPILE_BUDGET
from ..plan.model_structure import OUTPUT, LayerStructure, is_below
from ..plan.recomputed_modules import RecomputedModules
from ..plan.record import OpKey

_TAGS_VERSION = 2
"""Part of the key: another way to tag must not find graphs of the old one in a cache."""


@dataclass(frozen=True)
class RegionRules:
    """What is recomputed in one compiled layer. Equal rules: one graph.

    Args:
        budget: share of the activation memory that may be saved, above 0; ``None``: not touched.
        fates: op path -> whether it is recomputed; the longest path wins. Empty: no tags.
        outputs: what recomputed modules hand on: not recomputed.
        modules: op paths of the layer's modules.
        attention: those of its attention modules.
    """

    budget: float | None
    fates: tuple[tuple[str, bool], ...]
    outputs: tuple[OpKey, ...]
    modules: tuple[str, ...]
    attention: tuple[str, ...]

    @functools.cached_property
    def key(self) -> str:
        """Says all of it, the same in every process."""
        return hashlib.sha256(f"{_TAGS_VERSION} {self!r}".encode()).hexdigest()

    @functools.cached_property
    def _table(self) -> dict[str, bool]:
        return dict(self.fates)

    @property
    def tagged(self) -> bool:
        """Whether any op needs a tag."""
        return bool(self.fates) or (self.budget is not None and self.budget < 1)

    def tag_of_random(self) -> CheckpointPolicy:
        """The tag of an op that draws random numbers and is not named."""
        free = self.budget is None or self.budget == 1
        return CheckpointPolicy.PREFER_SAVE if free else CheckpointPolicy.MUST_SAVE

    def recomputes(self, op: OpKey) -> bool:
        """Whether the output of ``op`` is rebuilt in backward."""
        path = op[0]
        while path not in self._table:
            if not path:
                return False
            path = path.rpartition(".")[0]
        return self._table[path] and op not in self.outputs


def region_rules(recomputed: RecomputedModules, layer: LayerStructure) -> RegionRules | None:
    """Return what a plan recomputes inside a layer, if it is compiled and not recomputed whole.

    The compiler decides op by op: it gets a table of fates, and what recomputed modules hand on.

    Args:
        recomputed: index of the plan that is applied to the layer's model.
        layer: of it.
    """
    if not layer.compiled:
        return None
    plan = recomputed.plan
    rows = {row.op_path: row for row in plan.rows if row.scope == layer.index and row.ordinal is None}
    root = rows.get("")
    budget = root.parameters.get(COMPILE_BUDGET) if root is not None else None
    fates = {path: row.fate == "recompute" for path, row in rows.items() if path != OUTPUT}
    if not any(fates.values()) or not any(fates.keys()):
        fates = {}  # nothing, or the layer as a whole
    if budget == 0:
        budget, fates = None, {"": True}
    if budget is None and not fates:
        return None
    modules = tuple(op.path for op in layer.ops if op.kind != "function")
    roots = [path for path in fates if path and recomputed.is_root(layer.index, path)]
    return RegionRules(
        budget,
        tuple(sorted(fates.items())),
        tuple(sorted({key for path in roots for key in _outputs_of(layer, path)})),
        modules,
        tuple(sorted(layer.attention_paths)),
    )


def _outputs_of(layer: LayerStructure, module_path: str) -> set[OpKey]:
    """The ops inside a module whose outputs are read outside of it."""
    read = {key for call in layer.calls if not is_below(call.key[0], module_path) for key in call.inputs}
    if layer.output_of is not None:
        read.add(layer.output_of)
    return {key for key in read if is_below(key[0], module_path)}
