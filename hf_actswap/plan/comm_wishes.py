"""Paints what the user wrote about communication inside layers: keep its results, or communicate again.

A communication is a function of a layer like any other (``input_layernorm.all_gather``); MindFormers names
the op that it stands beside (``attention_norm.norm``). A model without parallel layers has none: then the
names are checked and logged, and `without_effect` says the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

from .actions import PlanRow
from .outline import OUTPUT
from .rules import EXCLUDE_BEATS_ALL, RECOMPUTE_BEATS_SWAP, LayerFates
from .wishes import Painter, Selection

NONE_BESIDE = "no communication stands beside what it names"
RESULT_IS_SMALLER = (
    "what it reduces would have to be kept, and is at least as large as its result, unless that is "
    "recomputed too"
)
NOTHING_RECOMPUTED = "no recomputed layer communicates"
INPUT_IS_SPLIT = "with sequence parallelism each rank holds its own part of the input already"
INPUT_IS_SWAPPED = "its input is swapped"
NOT_WHOLE = "no layer is recomputed whole"


class CommunicationPainter:
    """Wishes about communication, painted by a `Painter`.

    Args:
        painter: of the same plan.
        swap: whether ``swap_config.swap`` is on.
    """

    def __init__(self, painter: Painter, swap: bool) -> None:
        self._painter, self._swap = painter, swap
        self._communicates = any(fates.layer.communications for fates in painter.fates.values())

    def again(self, table: Selection, full: tuple[int, ...]) -> None:
        """``select_comm_recompute``: communicate again in backward, beside the named ops.

        Layers that are recomputed whole do as ``mp_comm_recompute`` says (MindFormers, LayerSetting: full
        recomputation of a layer, and selection is not applied to it).
        """
        where = "recompute_config.select_comm_recompute"
        for pattern, (_, layers) in table.items():
            wanted = [layer for layer in layers if layer not in full]
            for layer, targets in self._named(pattern, wanted, where, "select_comm"):
                fates = self._painter.fates[layer]
                paths = [path for target in targets for path in fates.layer.communications_beside(target)]
                if not paths:
                    self._override(where, pattern, "recompute communication", "no effect", NONE_BESIDE, layer)
                for path in paths:
                    self._again(fates, path, where, layer)

    def keep(self, table: Selection, used: set[str]) -> None:
        """``select_comm_recompute_exclude``: keep the results of what the named ops communicate."""
        where = "recompute_config.select_comm_recompute_exclude"
        for pattern, (_, layers) in table.items():
            effective = pattern in used
            for layer, targets in self._named(pattern, layers, where, "comm_exclude"):
                fates = self._painter.fates[layer]
                paths = [path for target in targets for path in fates.layer.communications_beside(target)]
                for path in fates.keep_communications(paths):
                    effective = True
                    self._override(where, path, "recompute communication", "keep", EXCLUDE_BEATS_ALL, layer)
            if not effective and self._communicates:
                reason = "nothing that it names is communicated again"
                self._override(where, pattern, "keep communication", "no effect", reason, None)

    def keep_all(self) -> None:
        """``mp_comm_recompute: false``: what is recomputed keeps the results of its communications.

        (MindSpore's ``Cell.recompute``: the communication beside an op is excluded from recomputation.)
        """
        kept = [
            path
            for fates in self._painter.fates.values()
            for path in fates.keep_communications(fates.layer.communications, recomputed_only=True)
        ]
        if self._communicates and not kept:
            where = "recompute_config.mp_comm_recompute"
            self._override(where, "", "false", "no effect", NOTHING_RECOMPUTED, None)

    def slice_inputs(self, full: Iterable[int], sequence_parallel: bool) -> None:
        """``recompute_slice_activation``: each rank keeps 1/tp of the input of a layer recomputed whole."""
        where, painter = "recompute_config.recompute_slice_activation", self._painter
        held = [layer for layer in full if layer in painter.fates]
        if sequence_parallel or not held:
            self._override(where, "", "slices", "no effect", INPUT_IS_SPLIT if held else NOT_WHOLE, None)
            return
        for layer in held:
            before = painter.fates.get(layer - 1)
            if before is not None:
                sliced = before.slice_output()
            else:
                sliced = not painter.around
                painter.around = painter.around or (PlanRow("embedding", OUTPUT, "slice"),)
            if not sliced:
                self._override(where, "", "slices", "swap", INPUT_IS_SWAPPED, layer)

    def _again(self, fates: LayerFates, path: str, where: str, layer: int) -> None:
        if not fates.communicating_again_pays(path):
            self._override(where, path, "recompute communication", "keep", RESULT_IS_SMALLER, layer)
        elif fates.communicate_again(path):
            self._override(where, path, "swap", "re-gather", RECOMPUTE_BEATS_SWAP, layer)

    def _named(
        self, pattern: str, layers: Iterable[int], where: str, request: str
    ) -> Iterable[tuple[int, list[str]]]:
        """Note what the reference would log, and yield (layer, targets) where the model communicates."""
        for layer, matches in self._painter.matches(pattern, layers, where):
            if request == "select_comm" or not self._swap:
                names = [match.bare_name for match in matches if not match.is_module]
                getattr(self._painter.requests[layer], request).extend(names)
            if self._communicates:
                yield layer, [target for match in matches for target in match.targets]

    def _override(
        self, where: str, op_path: str, asked: str, got: str, reason: str, layer: int | None
    ) -> None:
        self._painter.override(where, op_path, asked, got, reason, layer)
