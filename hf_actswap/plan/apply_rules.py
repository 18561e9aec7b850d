"""Applies what the user wrote to the layers of a model, and records which requests are dropped, and why.

Each method of `RuleApplier` applies one key of the configuration: it sets fates, and notes what
MindFormers would log. `resolve` calls the methods in MindFormers' order.

**Communication** inside layers is a function of a layer like any other (``input_layernorm.all_gather``), but
the keys name the op beside it (``attention_norm.norm``). For a model without parallel layers the names are
checked and logged, and `resolve.policies_without_effect` adds the adjustments.

**Log lines.** Those that MindFormers ("the reference") writes for a configuration, to compare both logs.
The ``Set ...`` lines report what was asked, not what takes effect: that is how the reference prints them.
White space is collapsed and a pattern shows a single backslash, as in its documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import ActSwapConfig, Layers, split_op_path
from ..config.schema import LayerSwapRule, OpSwapRule, OpTileRule, Prefetch
from ..errors import Problem
from .actions import Adjustment, PlanRow, Scope, Tile, Windows
from .layout import format_formative
from .model_structure import OUTPUT, ModelStructure, is_below
from .opnames import FUSED
from .rules import (
    CHECKPOINT_KEEPS_INPUT,
    EXCLUDE_BEATS_ALL,
    FULL_BEATS_SELECTIVE,
    FULL_NEEDS_NO_BUDGET,
    NO_COUNTERPART,
    NOT_RECOMPUTED_SELECTIVELY,
    NOT_RECOMPUTED_WHOLE,
    NOT_THE_SAME_TWICE,
    OF_FUSED_LAYER,
    ONE_REGION,
    ONLY_MODULES,
    OUTPUT_FEEDS_RECOMPUTE,
    RECOMPUTE_BEATS_SWAP,
    TILE_SAVES_ITS_INPUT,
    LayerFates,
    Match,
    names_by_layer,
)

_FAKES = "If an operator there has no fake implementation, give it one (torch.library.register_fake)."
ALL_SWAP_LOST = "All layers and ops that are enabled swap do not work! Because recompute = True."


@dataclass
class LayerRequests:
    """What the configuration asks of one layer, under the names that the reference logs."""

    full: bool = False
    select: list[str] = field(default_factory=list)
    select_comm: list[str] = field(default_factory=list)
    select_exclude: list[str] = field(default_factory=list)
    comm_exclude: list[str] = field(default_factory=list)
    layer_swap: Prefetch | None = None
    op_swap: list[tuple[str, Prefetch]] = field(default_factory=list)
    compile_budget: float | None = None

    def lines(self, layer: int, swap: bool, recompute_everywhere: bool) -> list[str]:
        at, on = f"at layer {layer}", "" if swap else " on"
        lines = [f"Set full recompute {at}"] if self.full and not (swap and recompute_everywhere) else []
        for what, ops in (
            (f"select recompute{on}", self.select),
            (f"select comm recompute{on}", self.select_comm),
            ("select recompute exclude", self.select_exclude),
            ("select comm recompute exclude", self.comm_exclude),
        ):
            if ops:
                lines.append(f"Set {what} {at}: {', '.join(ops)}")
        if self.layer_swap is not None:
            lines.append(f"Set layer swap {at} and value is: {prefetch_text(self.layer_swap)}")
        if self.op_swap:
            items = (f"{name}, value={prefetch_text(prefetch)}" for name, prefetch in self.op_swap)
            lines.append(f"Set op_swap {at}: {', '.join(items)}")
        if self.compile_budget is not None:
            lines.append(f"Set compile budget {at} and value is: {self.compile_budget:g}")
        return lines


def prefetch_text(prefetch: Prefetch) -> str:
    return "Auto" if prefetch == "auto" else str(prefetch)


def formative_lines(
    recompute: Any,
    selections: Mapping[str, Mapping[str, Any]],
    layer_swap: Sequence[LayerSwapRule] | None,
    op_swap: Sequence[OpSwapRule] | None,
    swap: bool,
) -> list[str]:
    """Return the ``Formative ...`` lines: the normalised tables, and with ``swap`` the swap rules."""
    lines = [f"Formative layer_recompute: {format_formative(recompute)}"]
    for key, table in selections.items():
        if table or not key.endswith("_exclude"):
            lines.append(f"Formative {key}: {format_formative(table)}")
    if swap:
        lines.append(f"Formative layer swap: [{', '.join(map(_entry, layer_swap or ()))}]")
        by_name: dict[str, list[str]] = {}
        for rule in op_swap or ():
            by_name.setdefault(rule.op_name, []).append(_entry(rule))
        entries = (f"'{name}': [{', '.join(items)}]" for name, items in by_name.items())
        lines.append(f"Formative op swap: {{{', '.join(entries)}}}")
    return lines


def _entry(rule: LayerSwapRule | OpSwapRule) -> str:
    layers = rule.layers if isinstance(rule.layers, bool) else list(rule.layers)
    prefetch = "'Auto'" if rule.backward_prefetch == "auto" else str(rule.backward_prefetch)
    return f"{{'backward_prefetch': {prefetch}, 'layers': {layers}}}"


def conflict_warnings(
    config: ActSwapConfig,
    full_layers: Sequence[int],
    layer_swap: Mapping[int, Prefetch],
    op_swap: Mapping[str, Sequence[int]],
    swaps: bool,
) -> list[str]:
    """Return the warnings that the reference prints at start when swap meets recomputation.

    They follow its rules to the letter: a selective pattern is compared with ``op_swap`` names as text,
    bool and list forms are not compared, overlap of patterns is not seen. What takes effect is in the
    plan's adjustments.

    Args:
        full_layers: layers recomputed whole.
        layer_swap: layer -> prefetch, for the layers that ``layer_swap`` names.
        op_swap: op name as written -> the layers that it names.
        swaps: whether the plan swaps anything (our key ``recompute_input`` swaps what the reference cannot).
    """
    recompute = config.recompute_config.recompute
    if recompute is True:
        return [ALL_SWAP_LOST] if (layer_swap or op_swap) and not swaps else []
    warnings = [_lost("All", f"layer {layer}") for layer in full_layers if layer in layer_swap]
    for name, layers in op_swap.items():
        warnings += [_lost(name, f"layer {layer}") for layer in full_layers if layer in layers]
    select = config.recompute_config.select_recompute
    for pattern, value in select.items() if isinstance(select, dict) else ():
        if value is True:
            warnings.append(_lost(pattern, "all layers"))
        elif value:
            swapped = {*layer_swap, *op_swap.get(pattern, ())}
            chosen = (layer for layer in value if type(layer) is int and layer in swapped)
            warnings += [_lost(pattern, f"layer {layer}") for layer in chosen]
    return warnings


def _lost(name: str, where: str) -> str:
    return f"{name} operator in {where} that is enabled swap do not work! Because it is enabled recompute."


RESULT_IS_SMALLER = (
    "what it reduces would have to be kept, and is at least as large as its result, unless that is "
    "recomputed too"
)
FINAL_NORM = "final_norm"
"""Op name in ``tile_config.tile``, and scope, of the norm after the last layer, which is in no layer."""
INPUT_IS_SPLIT = "with sequence parallelism each rank holds its own part of the input already"
NOT_WHOLE = "no layer is recomputed whole"

_FIRST_ENTRY_WINS = "the first entry that names {} wins"

Selection = dict[str, tuple[object, tuple[int, ...]]]
"""Op path as written -> (normal form, global layers that it concerns)."""


class RuleApplier:
    """Applies the keys of a configuration to the layers that a model, or a pipeline stage of it, holds.

    Args:
        local: index of each layer in the model given, by its global index.
        num_layers: number of layers of the whole model.

    Attributes:
        fates, requests: what was decided for each layer and what was asked, by global layer index.
        outside_rows: rows outside the layers: the embedding's, whose output is the first layer's input.
        problems: paths that name no op, layers that do not exist.
    """

    def __init__(
        self, structure: ModelStructure, local: Mapping[int, int], num_layers: int, swap: bool
    ) -> None:
        self._structure, self._local, self._num_layers, self._swap = structure, local, num_layers, swap
        self._names = names_by_layer(structure)
        self._adjustments: dict[tuple[str, str, str, str, str], list[int]] = {}
        self.problems: list[Problem] = []
        self.outside_rows: tuple[PlanRow, ...] = ()
        self.fates = {layer: LayerFates(structure.layers[own]) for layer, own in local.items()}
        self.requests = {layer: LayerRequests() for layer in local}
        self._communicates = any(fates.layer.communications for fates in self.fates.values())

    def apply_layer_swap(self, rules: Iterable[LayerSwapRule]) -> dict[int, Prefetch]:
        chosen = self._first_of("layer_swap", "", enumerate(rules))
        for layer, prefetch in chosen.items():
            if layer in self.fates:
                self.fates[layer].swap("", _windows(prefetch))
                self.requests[layer].layer_swap = prefetch
        return chosen

    def _first_of(
        self, key: str, op_path: str, rules: Iterable[tuple[int, LayerSwapRule | OpSwapRule]]
    ) -> dict[int, Prefetch]:
        """Return the prefetch of the layers that rules name: of the first entry that names a layer."""
        reason = "the first entry that names a layer wins (MindFormers, LayerSetting)"
        chosen: dict[int, Prefetch] = {}
        for index, rule in rules:
            where, asked = f"swap_config.{key}[{index}]", rule.backward_prefetch
            for layer in self._layers(rule.layers, f"{where}.layers"):
                first = chosen.setdefault(layer, asked)
                if first != asked:
                    self.adjustment(where, op_path, f"backward_prefetch {asked}", str(first), reason, layer)
        return chosen

    def apply_op_swap(self, rules: Iterable[OpSwapRule]) -> dict[str, list[int]]:
        """Apply op rules name by name, in order of first appearance; the first entry naming a layer wins."""
        groups: dict[str, list[tuple[int, OpSwapRule]]] = {}
        for index, rule in enumerate(rules):
            groups.setdefault(rule.op_name, []).append((index, rule))
        named: dict[str, list[int]] = {}
        for op_name, group in groups.items():
            chosen = self._first_of("op_swap", op_name, group)
            named[op_name] = sorted(chosen)
            where = f"swap_config.op_swap[{group[0][0]}].op_name"
            for layer, matches in self.matches(op_name, chosen, where):
                for match in matches:
                    for target in match.targets:
                        self.fates[layer].swap(target, _windows(chosen[layer]))
                    if match.logged:
                        self.requests[layer].op_swap.append((match.name, chosen[layer]))
        return named

    def apply_select(self, table: Selection, full: tuple[int, ...]) -> None:
        where = "recompute_config.select_recompute"
        asked, got = "selective recompute", "full recompute"
        for pattern, (_, layers) in table.items():
            for layer in layers:
                if layer in full:
                    self.adjustment(where, pattern, asked, got, FULL_BEATS_SELECTIVE, layer)
            wanted = [layer for layer in layers if layer not in full]
            for layer, matches in self.matches(pattern, wanted, where):
                for match in matches:
                    if match.logged:
                        self.requests[layer].select.append(match.bare_name)
                    for target in match.targets:
                        if not self.fates[layer].can_run_again(target):
                            self.adjustment(where, target, "recompute", "keep", NOT_THE_SAME_TWICE, layer)
                            continue
                        for lost in self.fates[layer].recompute(target):
                            self.adjustment(where, lost, "swap", "recompute", RECOMPUTE_BEATS_SWAP, layer)

    def apply_full(self, full: tuple[int, ...]) -> None:
        where = "recompute_config.recompute"
        for layer in full:
            if layer not in self.fates:
                continue
            self.requests[layer].full = True
            lost = self.fates[layer].recompute("")
            if lost:
                self.adjustment(where, ", ".join(lost), "swap", "recompute", RECOMPUTE_BEATS_SWAP, layer)

    def set_budgets(self, budgets: Mapping[int, float], full: tuple[int, ...]) -> None:
        for layer, budget in budgets.items():
            if layer not in self.fates:
                continue
            self.requests[layer].compile_budget = budget
            if layer in full:
                where = "recompute_config.compile_budget"
                self.adjustment(where, "", f"{budget:g}", "no effect", FULL_NEEDS_NO_BUDGET, layer)
            else:
                self.fates[layer].compile_budget = budget

    def apply_exclude(self, table: Selection, used: set[str]) -> None:
        where = "recompute_config.select_recompute_exclude"
        for pattern, (_, layers) in table.items():
            effective = pattern in used
            for layer, matches in self.matches(pattern, layers, where):
                for match in matches:
                    if match.logged and not self._swap:
                        self.requests[layer].select_exclude.append(match.bare_name)
                    for target in match.targets:
                        if self.fates[layer].exclude(target):
                            effective = True
                            self.adjustment(where, pattern, "recompute", "keep", EXCLUDE_BEATS_ALL, layer)
            if not effective:
                self.adjustment(where, pattern, "exclude", "no effect", "nothing that it names is recomputed")

    def apply_tiles(self, rules: Iterable[OpTileRule]) -> tuple[Tile, ...]:
        """Return the tiles that the entries ask for; the first entry that names a module wins."""
        found: dict[tuple[Scope, str], Tile] = {}
        for index, rule in enumerate(rules):
            where = f"tile_config.tile[{index}]"
            tokens = None if rule.tokens == "auto" else rule.tokens
            if rule.op_name == FINAL_NORM:
                self._tile_final_norm(found, Tile(FINAL_NORM, "", tokens), where)
                continue
            layers = self._layers(rule.layers, f"{where}.layers")
            for layer, matches in self.matches(rule.op_name, layers, f"{where}.op_name"):
                for path in dict.fromkeys(target for match in matches for target in match.targets):
                    tile = Tile(self._local[layer], path, tokens)
                    other = next((key for key in found if key[0] == layer and _overlap(key[1], path)), None)
                    if other is not None and (other[1] != path or found[other] != tile):
                        reason = f"{_FIRST_ENTRY_WINS.format(other[1])}, and what is inside is a part of it"
                        self.adjustment(where, path, str(tile), str(found[other]), reason, layer)
                    elif other is None and self._can_be_tiled(path, layer, where):
                        found[layer, path] = tile
                        for lost, fate in self.fates[layer].tile(path):
                            self.adjustment(where, lost, fate, "tile", TILE_SAVES_ITS_INPUT, layer)
        return tuple(found.values())

    def _tile_final_norm(self, found: dict[tuple[Scope, str], Tile], tile: Tile, where: str) -> None:
        if self._structure.final_norm is None or self._structure.compiled:
            expected = "a model with a norm after its last layer, not compiled as a whole"
            self.problems.append(Problem(f"{where}.op_name", expected, FINAL_NORM))
            return
        first = found.setdefault((FINAL_NORM, ""), tile)
        if first != tile:
            reason = _FIRST_ENTRY_WINS.format(FINAL_NORM)
            self.adjustment(where, FINAL_NORM, str(tile), str(first), reason)

    def _can_be_tiled(self, path: str, layer: int, where: str) -> bool:
        structure, reason = self.fates[layer].layer, ""
        if path not in structure.module_paths:
            reason = "a module: a function has no weights of its own to sum gradients of"
        elif structure.compiled or self._structure.compiled:
            reason = "a module outside of compiled code (compile the module itself, not what is around it)"
        problem = Problem(f"{where}.op_name", reason, path)
        if reason and problem not in self.problems:  # once for all layers
            self.problems.append(problem)
        return not reason

    def inputs_to_swap(self, wanted: Layers, full: Iterable[int]) -> frozenset[int]:
        """Return the layers whose input ``recompute_input`` swaps: those that are recomputed whole."""
        where, asked = "swap_config.recompute_input", "input swapped"
        named = self._layers(wanted, where)
        if named and self._structure.compiled:
            self.adjustment(where, "", asked, "no effect", ONE_REGION)
            return frozenset()
        checkpointed = [layer for layer, fates in self.fates.items() if fates.layer.checkpointed]
        found = frozenset(named).intersection((*full, *checkpointed))
        self._say_without_effect(where, asked, wanted, found, NOT_WHOLE, NOT_RECOMPUTED_WHOLE)
        return found

    def _say_without_effect(
        self, where: str, asked: str, wanted: Layers, found: frozenset[int], none: str, reason: str
    ) -> None:
        """Note where a key has no effect: in a layer because of ``reason``, in all because of ``none``."""
        if wanted is True and not found:
            self.adjustment(where, "", asked, "no effect", none)
        for layer in self.layers_named(wanted) if wanted is not True else ():
            if layer not in found and layer in self.fates:
                self.adjustment(where, "", asked, "no effect", reason, layer)

    def swap_inputs(self, layers: Iterable[int], prefetch: Prefetch) -> None:
        """Swap the input of ``layers``, and of checkpointed layers whose ops were to be swapped."""
        windows = {layer: _windows(prefetch) for layer in layers if layer in self.fates}
        for layer, fates in self.fates.items():
            if not fates.layer.checkpointed or self._structure.compiled:
                continue
            lost, own = fates.drop_swaps()
            if lost:
                windows[layer] = own
                what = ", ".join(lost)
                self.adjustment("swap_config", what, "swap", "input swapped", CHECKPOINT_KEEPS_INPUT, layer)
        for layer, chosen in windows.items():
            before = self.fates.get(layer - 1)
            if before is not None:
                before.swap_output(chosen)
            else:
                self.outside_rows = (PlanRow("embedding", OUTPUT, "swap", windows=chosen),)

    def ops_read_to_swap(self, wanted: Layers) -> frozenset[int]:
        """Return the layers in which inputs of recomputed ops may be swapped (``select_recompute_input``)."""
        where, asked = "swap_config.select_recompute_input", "swapped as written"
        named = self._layers(wanted, where)
        found = frozenset(layer for layer in named if layer in self.fates and self.fates[layer].selects)
        none = "no op is recomputed selectively"
        self._say_without_effect(where, asked, wanted, found, none, NOT_RECOMPUTED_SELECTIVELY)
        return found

    def keep_inputs(self, lifted: frozenset[int], read: frozenset[int]) -> None:
        """Keep the inputs of recomputed ops on the device (MindFormers, coupling rule 2).

        Not those of ``lifted`` layers (`inputs_to_swap`), nor of ops in the layers ``read``
        (`ops_read_to_swap`).
        """
        where = "swap_config"
        for layer, fates in self.fates.items():
            if layer in read:
                continue
            kept, reads_input = fates.keep_inputs_of_recompute()
            for path, _ in kept:
                self.adjustment(where, path, "swap", "keep", OUTPUT_FEEDS_RECOMPUTE, layer)
            before = self.fates.get(layer - 1)
            if reads_input and layer not in lifted and before is not None and before.keep_output():
                self.adjustment(where, "output", "swap", "keep", OUTPUT_FEEDS_RECOMPUTE, layer - 1)

    def matches(self, op_path: str, layers: Iterable[int], where: str) -> list[tuple[int, list[Match]]]:
        """Return (layer, ops that a path names in it) for layers held here; no op at all is a problem."""
        found = []
        held = [layer for layer in sorted(layers) if layer in self.fates]
        for layer in held:
            matches = self._names[self._local[layer]].match(op_path)
            if matches:
                found.append((layer, matches))
                if not any(match.targets for match in matches):
                    known, why_not = self._structure.functions_known, self._structure.why_not
                    reason = NO_COUNTERPART if known else f"{ONLY_MODULES} ({why_not})"
                    fused = [name for name in FUSED if all(is_below(one.bare_name, name) for one in matches)]
                    if fused and not self._names[self._local[layer]].reference[fused[0]]:
                        reason = OF_FUSED_LAYER
                    self.adjustment(where, op_path, "a fate", "no effect", reason, layer)
        # With no layer to look in, a typo shows only if the model holds every layer.
        looked_in = held or (list(self.fates) if len(self.fates) == self._num_layers else [])
        names = [self._names[self._local[layer]] for layer in looked_in]
        if names and not found and not any(one.match(op_path) for one in names):
            self.problems.append(self._unknown(op_path, self._local[looked_in[0]], where))
        return found

    def targets(self, op_path: str, layers: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Return the op paths of this model that ``op_path`` names, each with its global layers."""
        found: dict[str, dict[int, None]] = {}
        for layer in layers:
            for match in self._names[self._local[layer]].match(op_path):
                for target in match.targets:
                    found.setdefault(target, {})[layer] = None
        return {target: tuple(where) for target, where in found.items()}

    def layers_named(self, layers: Layers) -> tuple[int, ...]:
        """Return the global layer indices that an entry names, without those beyond the last layer."""
        if isinstance(layers, bool):
            return tuple(range(self._num_layers)) if layers else ()
        return tuple(layer for layer in layers if layer < self._num_layers)

    def _unknown(self, op_path: str, own_layer: int, where: str) -> Problem:
        hint = self._names[own_layer].hint(op_path)
        if not self._structure.functions_known:
            hint += f" {ONLY_MODULES.capitalize()} ({self._structure.why_not}). {_FAKES}"
        expected = f"a path that names an op of {self._structure.layers[own_layer].class_name}"
        return Problem(where, expected, f"{op_path!r}", hint)

    def _layers(self, layers: bool | tuple[int, ...], where: str) -> list[int]:
        last = self._num_layers - 1
        outside = [layer for layer in layers if layer > last] if not isinstance(layers, bool) else []
        if outside:
            found = ", ".join(map(str, outside))
            self.problems.append(Problem(where, f"layers from 0 to {last}", found))
        return list(self.layers_named(layers))

    def adjustment(
        self, where: str, op_path: str, asked: str, got: str, reason: str, layer: int | None = None
    ) -> None:
        layers = self._adjustments.setdefault((where, op_path, asked, got, reason), [])
        if layer is not None and layer not in layers:
            layers.append(layer)

    def collected_adjustments(self) -> list[Adjustment]:
        return [
            Adjustment(where, tuple(sorted(layers)), op_path, asked, got, reason)
            for (where, op_path, asked, got, reason), layers in self._adjustments.items()
        ]

    def communicate_again(self, table: Selection, full: tuple[int, ...]) -> None:
        """``select_comm_recompute``: communicate again in backward, beside the named ops.

        Layers that are recomputed whole follow ``mp_comm_recompute`` instead (MindFormers, LayerSetting:
        selection is not applied to a layer that is recomputed whole).
        """
        where, asked = "recompute_config.select_comm_recompute", "recompute communication"
        for pattern, (_, layers) in table.items():
            wanted = [layer for layer in layers if layer not in full]
            for layer, paths in self._communications(pattern, wanted, where, "select_comm"):
                fates = self.fates[layer]
                if not paths:
                    reason = "no communication stands beside what it names"
                    self.adjustment(where, pattern, asked, "no effect", reason, layer)
                for path in paths:
                    if not fates.communicating_again_pays(path):
                        self.adjustment(where, path, asked, "keep", RESULT_IS_SMALLER, layer)
                    elif fates.communicate_again(path):
                        self.adjustment(where, path, "swap", "re-gather", RECOMPUTE_BEATS_SWAP, layer)

    def keep_communications(self, table: Selection, used: set[str]) -> None:
        """``select_comm_recompute_exclude``: keep the results of communications beside the named ops."""
        where = "recompute_config.select_comm_recompute_exclude"
        for pattern, (_, layers) in table.items():
            effective = pattern in used
            for layer, paths in self._communications(pattern, layers, where, "comm_exclude"):
                for path in self.fates[layer].keep_communications(paths):
                    effective = True
                    self.adjustment(where, path, "recompute communication", "keep", EXCLUDE_BEATS_ALL, layer)
            if not effective and self._communicates:
                reason = "nothing that it names is communicated again"
                self.adjustment(where, pattern, "keep communication", "no effect", reason)

    def keep_all_communications(self) -> None:
        """``mp_comm_recompute: false``: keep the results of all communications inside what is recomputed.

        (MindSpore's ``Cell.recompute``: the communication beside an op is excluded from recomputation.)
        """
        kept = [
            path
            for fates in self.fates.values()
            for path in fates.keep_communications(fates.layer.communications, recomputed_only=True)
        ]
        if self._communicates and not kept:
            where, reason = "recompute_config.mp_comm_recompute", "no recomputed layer communicates"
            self.adjustment(where, "", "false", "no effect", reason)

    def slice_inputs(self, full: Iterable[int], sequence_parallel: bool) -> None:
        """``recompute_slice_activation``: each rank keeps 1/tp of the input of a layer recomputed whole."""
        where = "recompute_config.recompute_slice_activation"
        held = [layer for layer in full if layer in self.fates]
        if sequence_parallel or not held:
            self.adjustment(where, "", "slices", "no effect", INPUT_IS_SPLIT if held else NOT_WHOLE)
            return
        for layer in held:
            before = self.fates.get(layer - 1)
            if before is not None:
                sliced = before.slice_output()
            else:
                sliced = not self.outside_rows
                self.outside_rows = self.outside_rows or (PlanRow("embedding", OUTPUT, "slice"),)
            if not sliced:
                self.adjustment(where, "", "slices", "swap", "its input is swapped", layer)

    def _communications(
        self, pattern: str, layers: Iterable[int], where: str, request: str
    ) -> Iterable[tuple[int, list[str]]]:
        """Note what the reference would log; yield (layer, communications beside what a pattern names)."""
        for layer, matches in self.matches(pattern, layers, where):
            if request == "select_comm" or not self._swap:
                names = [match.bare_name for match in matches if not match.is_module]
                getattr(self.requests[layer], request).extend(names)
            if self._communicates:
                beside = self.fates[layer].layer.communications_beside
                yield (
                    layer,
                    [path for match in matches for target in match.targets for path in beside(target)],
                )


def _overlap(path: str, other: str) -> bool:
    return is_below(path, other) or is_below(other, path)


def _windows(prefetch: Prefetch) -> Windows | None:
    return None if prefetch == "auto" else Windows.of_prefetch(prefetch)


def same_ops(pattern: str, other: str) -> bool:
    """Whether two op paths match level by level, in either direction (MindFormers, LayerSetting)."""
    one, two = split_op_path(pattern), split_op_path(other)
    return len(one) == len(two) and all(
        re.fullmatch(a, b) or re.fullmatch(b, a) for a, b in zip(one, two, strict=True)
    )
