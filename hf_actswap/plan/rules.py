"""Fates of the ops of one layer, and the rules that decide between conflicting requested policies.

`LayerFates` is a tree of op paths. A requested policy applies to a subtree, and later policies overwrite
earlier ones. The coupling rules are called last; the reason of each rule quotes its source.

**Matching.** An op path is a list of regular expressions, one per level, each matched in full against the
names one level down (MindFormers ``LayerSetting``; `split_op_path` splits the path). It is tried in three
vocabularies, and the first in which it names an op of this layer decides: MindFormers' layer names, the
Hugging Face names of this layer, the names of MindFormers' Megatron-core layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..config import split_op_path
from ..errors import nearest
from .actions import COMPILE_BUDGET, OUTPUT, Fate, PlanRow, Scope, Windows, parent_path
from .model_structure import LayerStructure, ModelStructure, is_below
from .op_facts import GATHER, is_repeatable
from .opnames import NameTable, megatron_names, reference_names
from .record import LAYER_INPUT, OpKey
from .saved_bytes import RUN_AGAIN

RECOMPUTE_BEATS_SWAP = (
    "recomputation takes effect and swap does not where both are enabled (MindFormers, coupling rule 1)"
)
OUTPUT_FEEDS_RECOMPUTE = (
    "its output is used by an op with recomputation enabled, so it stays on the device "
    "(MindFormers, coupling rule 2)"
)
FULL_BEATS_SELECTIVE = (
    "full recomputation takes effect where both are configured (MindFormers, Memory Optimization)"
)
CHECKPOINT_KEEPS_INPUT = (
    "gradient checkpointing recomputes the layer, and all that is saved of it until backward is its input"
)
ONE_REGION = "the model is compiled as a whole: what its region saves is not known by layer"
NOT_RECOMPUTED_WHOLE = "the layer is not recomputed whole; its input has the fate of what produces it"
NOT_RECOMPUTED_SELECTIVELY = "none of its ops is recomputed selectively"
FULL_NEEDS_NO_BUDGET = "the layer is recomputed whole, so that its region saves nothing but its input anyway"
TILE_SAVES_ITS_INPUT = "a tile saves its input alone, and runs again tile by tile in backward"
NOT_THE_SAME_TWICE = (
    "run twice this function does not give the same: it reads memory as it is found, or adds in the order "
    "in which threads come; a module around it can be recomputed"
)
EXCLUDE_BEATS_ALL = "exclude keys have the highest priority (MindFormers 1.5, LayerSetting)"
ONLY_MODULES = "only module paths are known of this model"
OF_FUSED_LAYER = "an op of a fused layer that this model does not have"
NO_COUNTERPART = "the reference has this op and these layers have no counterpart, no effect"


@dataclass(frozen=True)
class Assigned:
    """The fate of a node of the tree, its windows, and for a recompute the path that is run again as one."""

    fate: Fate = "keep"
    windows: Windows | None = None
    root: str | None = None


KEEP = Assigned()


class LayerFates:
    """The fates of one layer's ops, which change while a plan is being resolved."""

    def __init__(self, layer: LayerStructure) -> None:
        self.layer = layer
        self.recompute_roots: list[str] = []
        self.compile_budget: float | None = None
        self._nodes: dict[str, Assigned] = {"": KEEP}
        self._nodes.update({op.path: KEEP for op in layer.ops})
        self._nodes[OUTPUT] = KEEP
        self._exact: dict[OpKey, Assigned] = {}
        self._kinds = {op.path: op.kind for op in layer.ops}

    @property
    def selects(self) -> bool:
        return bool(self.recompute_roots) and "" not in self.recompute_roots

    def swap(self, path: str, windows: Windows | None) -> None:
        self._assign(path, Assigned("swap", windows))

    def recompute(self, path: str) -> list[str]:
        """Recompute ``path`` as one; return the topmost op paths below it whose swap is dropped (rule 1).

        For a module without weights (an activation), its functions are recomputed one by one: as one, the
        module would keep its output, and nothing would be saved. So are the modules of a list.
        """
        if self._kinds.get(path) in ("activation", "container"):
            parts = [node for node in self._nodes if node.rpartition(".")[0] == path]
            if parts:
                return [lost for part in parts for lost in self.recompute(part)]
        if any(is_below(path, root) for root in self.recompute_roots):
            return []  # already inside a recomputed module
        lost = [
            node
            for node, assigned in self._nodes.items()
            if assigned.fate == "swap" and node != OUTPUT and self._is_below(node, path)
        ]
        self._assign(path, Assigned("recompute", root=path))
        self._nodes[OUTPUT] = KEEP if self._is_below(OUTPUT, path) else self._nodes[OUTPUT]
        self.recompute_roots = [root for root in self.recompute_roots if not is_below(root, path)] + [path]
        return _topmost(lost)

    def can_run_again(self, path: str) -> bool:
        return self._kinds.get(path) != "function" or is_repeatable(path)

    def exclude(self, path: str) -> bool:
        """Take ``path`` out of recomputation; return whether anything was recomputed there."""
        hit = False
        for node, assigned in list(self._nodes.items()):
            if self._is_below(node, path) and assigned.fate == "recompute":
                self._nodes[node] = KEEP
                hit = True
        self.recompute_roots = [root for root in self.recompute_roots if not is_below(root, path)]
        return hit

    def keep_call(self, path: str, ordinal: int | None) -> None:
        if ordinal is None:
            self.exclude(path)
        else:
            self._exact[path, ordinal] = KEEP

    def tile(self, path: str) -> list[tuple[str, Fate]]:
        """Run ``path`` over tiles of the tokens: nothing in it is saved, each tile runs again.

        Its output keeps its fate. Inside a larger module that is recomputed, it is a part of that module.
        Returns the topmost op paths, at or below ``path``, whose own fate is dropped, with that fate.
        """
        own, around = self._nodes[path], self._nodes[parent_path(path)]
        returned = KEEP if own.fate in RUN_AGAIN and own != around else own
        inside = [node for node in self._nodes if node not in (OUTPUT, path) and is_below(node, path)]
        lost = [node for node in (path, *inside) if self._nodes[node] not in (KEEP, around, returned)]
        found = [(node, self._nodes[node].fate) for node in _topmost(lost)]
        self._nodes.update(dict.fromkeys((path, *inside), returned))
        self.recompute_roots = [root for root in self.recompute_roots if not is_below(root, path)]
        self._exact = {key: assigned for key, assigned in self._exact.items() if not is_below(key[0], path)}
        return found

    def keep_inputs_of_recompute(self) -> tuple[list[OpKey], bool]:
        """Keep the inputs of recomputed ops on the device (coupling rule 2).

        Returns the ops of this layer whose swap is dropped, and whether the layer's input is read.
        """
        kept: list[OpKey] = []
        reads_input = False
        if self.layer.compiled and "" not in self.recompute_roots:
            return kept, reads_input  # it is one op: all that it saved is back before its backward begins
        for root in self.recompute_roots:
            for key in self.layer.inputs_of(root):
                if key == LAYER_INPUT:
                    reads_input = True
                elif self._nodes.get(key[0], KEEP).fate == "swap" and key not in self._exact:
                    self._exact[key] = KEEP
                    kept.append(key)
        for path in {path for path, _ in kept if self._kinds.get(path) == "function"}:
            calls = [call.key for call in self.layer.calls if call.key[0] == path]
            if all(key in self._exact for key in calls):  # every call: then the op itself is kept
                self._nodes[path] = KEEP
                for key in calls:
                    del self._exact[key]
        return kept, reads_input

    def keep_output(self) -> bool:
        """Keep the output, from which the next layer is recomputed (rule 2); return if it was swapped."""
        swapped = self._nodes[OUTPUT].fate == "swap"
        if swapped:
            self._nodes[OUTPUT] = KEEP
        return swapped

    def swap_output(self, windows: Windows | None) -> None:
        """Swap the layer's output; if it is swapped already, its windows do not change."""
        if self._nodes[OUTPUT].fate != "swap":
            self._nodes[OUTPUT] = Assigned("swap", windows)

    def drop_swaps(self) -> tuple[list[str], Windows | None]:
        """Drop every swap in the layer, because nothing inside it is saved.

        Returns the topmost op paths that were swapped, and of their windows those with the longest prefetch
        (``None``: all were to be measured).
        """
        swapped = [node for node, assigned in self._nodes.items() if assigned.fate == "swap"]
        written = [windows for node in swapped if (windows := self._nodes[node].windows) is not None]
        self._nodes.update(dict.fromkeys(swapped, KEEP))
        return _topmost(swapped), max(written, key=lambda windows: windows.prefetch_ops, default=None)

    def communicating_again_pays(self, path: str) -> bool:
        """Whether repeating a communication saves bytes, since it needs its input in place of its result.

        It does if the input is smaller than the result (a gather), or if the input is recomputed too.
        """
        inputs = [key[0] for call in self.layer.calls if call.key[0] == path for key in call.inputs]
        rebuilt = bool(inputs) and all(self._nodes.get(key, KEEP).root == key for key in inputs)
        return path.rpartition(".")[2] == GATHER or rebuilt

    def communicate_again(self, path: str) -> bool:
        """Communicate again in backward; return whether a swap is dropped (rule 1).

        Inside a recomputed module that happens anyway, unless the result leaves the module.
        """
        before = self._nodes[path]
        if before.root not in (None, path) and not self._leaves(path, before.root):
            return False
        self._nodes[path] = Assigned("re-gather")
        return before.fate == "swap"

    def keep_communications(self, paths: Iterable[str], recomputed_only: bool = False) -> list[str]:
        """Keep the results of communications; return the paths of those that would have been repeated."""
        fates = ("recompute",) if recomputed_only else RUN_AGAIN
        kept = [path for path in paths if self._nodes[path].fate in fates]
        self._nodes.update(dict.fromkeys(kept, KEEP))
        return kept

    def slice_output(self) -> bool:
        """Keep a slice of the layer's output on each rank; return ``False`` if the output is swapped."""
        if self._nodes[OUTPUT].fate == "swap":
            return False
        self._nodes[OUTPUT] = Assigned("slice")
        return True

    def _leaves(self, path: str, module: str) -> bool:
        """Whether an op outside ``module`` reads what the op inside it produces."""
        produced = self.layer.output_of is not None and self.layer.output_of[0] == path
        return produced or any(
            key[0] == path and not is_below(call.key[0], module)
            for call in self.layer.calls
            for key in call.inputs
        )

    def rows(self, scope: Scope) -> list[PlanRow]:
        """Return the fewest rows with these fates: one for each node that differs from the row above it."""
        rows = []
        effective: dict[str, Assigned] = {}
        for path in sorted(self._nodes, key=lambda node: (bool(node), node.count("."))):
            assigned = self._nodes[path]
            above = effective[parent_path(path)] if path else KEEP
            effective[path] = assigned
            own = {} if path or self.compile_budget is None else {COMPILE_BUDGET: self.compile_budget}
            if assigned != above or own:
                rows.append(PlanRow(scope, path, assigned.fate, windows=assigned.windows, parameters=own))
        exact = self._exact.items()
        return rows + [PlanRow(scope, path, assigned.fate, ordinal) for (path, ordinal), assigned in exact]

    def _assign(self, path: str, new: Assigned) -> None:
        for node in self._nodes:
            if self._is_below(node, path):
                self._nodes[node] = new

    def _is_below(self, node: str, path: str) -> bool:
        """Whether a node is at or below ``path``; the layer's output is part of the op that produces it."""
        if node == OUTPUT and path and self.layer.output_of:
            return is_below(self.layer.output_of[0], path)
        return is_below(node, path)


def _topmost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(is_below(path, top) for top in paths if top != path)]


_SYNONYMS = {"linear": ("matmul",)}
"""Function name -> other names for it, under which MindFormers knows it in any module."""


@dataclass(frozen=True)
class Match:
    """One op that a path names.

    Args:
        name: as the reference logs it: the path that matched, in the vocabulary that matched. The path of a
            one-segment pattern keeps a leading dot, which is an accident of the reference's string slicing.
        targets: op paths of this layer; empty if the op has no counterpart here.
        is_module: whether the name is a module (a "cell") rather than a single op.
        logged: whether MindFormers logs it: only the last of several siblings that match.
    """

    name: str
    targets: tuple[str, ...]
    is_module: bool
    logged: bool

    @property
    def bare_name(self) -> str:
        return self.name.removeprefix(".")


Vocabulary = Mapping[str, tuple[tuple[str, ...], bool]]
"""Path in one vocabulary -> op paths of the layer, and whether the name is a module."""


class LayerNames:
    """The three vocabularies of one layer."""

    def __init__(self, layer: LayerStructure) -> None:
        modules = [op.path for op in layer.ops if op.kind in ("module", "activation")]
        functions = [op.path for op in layer.ops if op.kind == "function"]
        self.reference = reference_names(modules, functions, layer.attention_paths)
        """MindFormers' layer names."""
        megatron = megatron_names(self.reference)
        self._vocabularies = _of_table(self.reference), _of_ops(layer), _of_table(megatron)

    def match(self, op_path: str) -> list[Match]:
        patterns = [_compiled(segment) for segment in split_op_path(op_path)]
        found = [list(_matches(names, patterns)) for names in self._vocabularies]
        with_targets = (matches for matches in found if any(match.targets for match in matches))
        return next(with_targets, None) or next((matches for matches in found if matches), [])

    def hint(self, op_path: str) -> str:
        """Return a hint for a path that names no op: a deeper op of that name, else a similar name."""
        reference, own, megatron = (
            [name for name, (targets, _) in names.items() if targets] for names in self._vocabularies
        )
        names = list(dict.fromkeys((*own, *reference, *megatron)))
        plain = op_path.replace("\\.", ".")
        deeper = next((name for name in (*reference, *names) if name.endswith(f".{plain}")), None)
        hint = f"Did you mean {deeper!r}?" if deeper else nearest(plain, names)
        return hint if hint.startswith("Did") else f"Some that exist: {', '.join(names[:12])}."


def names_by_layer(structure: ModelStructure) -> list[LayerNames]:
    """Return the vocabularies of the decoder layers; layers with equal ops share one."""
    shared: dict[object, LayerNames] = {}
    for layer in structure.layers:
        if layer.ops not in shared:
            shared[layer.ops] = LayerNames(layer)
    return [shared[layer.ops] for layer in structure.layers]


@lru_cache(maxsize=256)
def _compiled(segment: str) -> re.Pattern[str]:
    return re.compile(segment)


def _matches(names: Vocabulary, patterns: Sequence[re.Pattern[str]]) -> Iterator[Match]:
    """Yield the matches; functions before modules among siblings, as the reference does."""
    found: dict[str, list[str]] = {}
    for path in names:
        parts = path.split(".")
        if len(parts) == len(patterns) and all(map(re.Pattern.fullmatch, patterns, parts)):
            found.setdefault(path.rpartition(".")[0], []).append(path)
    for siblings in found.values():
        *_, last = ordered = sorted(siblings, key=lambda path: names[path][1])
        for path in ordered:
            targets, is_module = names[path]
            yield Match(path if len(patterns) > 1 else f".{path}", targets, is_module, path == last)


def _of_table(table: NameTable) -> Vocabulary:
    around = {path[:at] for path in table for at, letter in enumerate(path) if letter == "."}
    return _as_tree({path: (targets, path in around) for path, targets in table.items()})


def _of_ops(layer: LayerStructure) -> Vocabulary:
    names: dict[str, tuple[tuple[str, ...], bool]] = {}
    for op in layer.ops:
        names[op.path] = (op.path,), op.kind in ("module", "container")
        parent, _, name = op.path.rpartition(".")
        for synonym in _SYNONYMS.get(name, ()) if op.kind == "function" else ():
            path = f"{parent}.{synonym}" if parent else synonym
            names[path] = (op.path,), names.get(path, ((), False))[1]
    return _as_tree(names)


def _as_tree(names: Vocabulary) -> Vocabulary:
    """Return the names in the order of their tree: each before those below it, siblings as they came."""
    first: dict[str, int] = {}

    def place(path: str) -> list[int]:
        parts = path.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return [first.setdefault(name, len(first)) for name in above]

    places = {path: place(path) for path in names}
    return {path: names[path] for path in sorted(names, key=places.__getitem__)}
