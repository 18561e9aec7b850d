"""Finds the ops of a layer that an op path of the configuration names.

A path is a list of regular expressions, one per level, each matched in full against the names one level
down (MindFormers ``LayerSetting``; `split_op_path` splits the path). It is tried in three vocabularies, and
the first in which it names an op of this layer decides: MindFormers' layer names, the Hugging Face names of
this layer, the names of MindFormers' Megatron-core layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from ..config import split_op_path
from ..errors import nearest
from .mindformers_names import NameTable, megatron_names, reference_names
from .model_structure import LayerStructure, ModelStructure

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
        """The name without the accidental leading dot."""
        return self.name.removeprefix(".")


@dataclass
class _Node:
    targets: tuple[str, ...] | None = None
    is_module: bool = False
    children: dict[str, _Node] = field(default_factory=dict)


class LayerNames:
    """The three vocabularies of one layer.

    Args:
        layer: structure of the layer.
    """

    def __init__(self, layer: LayerStructure) -> None:
        modules = [op.path for op in layer.ops if op.kind != "function"]
        functions = [op.path for op in layer.ops if op.kind == "function"]
        self.reference = reference_names(modules, functions, layer.attention_paths)
        """MindFormers' layer names."""
        self._trees = (
            _tree_of_table(self.reference),
            _tree_of_ops(layer),
            _tree_of_table(megatron_names(self.reference)),
        )

    def match(self, op_path: str) -> list[Match]:
        """Return the ops that ``op_path`` names, in the reference's order; empty if it names none."""
        segments = split_op_path(op_path)
        found = [list(_walk(tree, segments, "")) for tree in self._trees]
        with_targets = (matches for matches in found if any(match.targets for match in matches))
        return next(with_targets, None) or next((matches for matches in found if matches), [])

    def all_names(self) -> list[str]:
        """Return every path that names an op of this layer, for hints."""
        names: dict[str, None] = {}
        for tree in (self._trees[1], self._trees[0], self._trees[2]):
            names.update(dict.fromkeys(_paths(tree, "")))
        return list(names)

    def hint(self, op_path: str) -> str:
        """Return a hint for a path that names no op: a deeper op of that name, else a similar name."""
        plain, names = op_path.replace("\\.", "."), self.all_names()
        by_reference = [*_paths(self._trees[0], ""), *names]
        deeper = next((name for name in by_reference if name.endswith(f".{plain}")), None)
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


def _walk(node: _Node, segments: tuple[str, ...], path: str) -> Iterable[Match]:
    """Yield the matches below ``node``; functions before modules among siblings, as the reference does."""
    pattern, last = _compiled(segments[0]), len(segments) == 1
    hits = [(name, child) for name, child in node.children.items() if pattern.fullmatch(name)]
    if not last:
        for name, child in hits:
            yield from _walk(child, segments[1:], f"{path}.{name}")
        return
    chosen = [(name, child) for name, child in hits if child.targets is not None]
    chosen.sort(key=lambda hit: hit[1].is_module)
    for position, (name, child) in enumerate(chosen):
        full = f"{path}.{name}"
        yield Match(
            name=full if not path else full.removeprefix("."),
            targets=child.targets or (),
            is_module=child.is_module,
            logged=position == len(chosen) - 1,
        )


def _insert(root: _Node, path: str) -> _Node:
    node = root
    for name in path.split("."):
        node = node.children.setdefault(name, _Node())
    return node


def _tree_of_table(table: NameTable) -> _Node:
    root = _Node()
    for path, targets in table.items():
        _insert(root, path).targets = targets
    for path in table:
        node = _insert(root, path)
        node.is_module = bool(node.children)
    return root


def _tree_of_ops(layer: LayerStructure) -> _Node:
    root = _Node()
    for op in layer.ops:
        node = _insert(root, op.path)
        node.targets, node.is_module = (op.path,), op.kind == "module"
        parent, _, name = op.path.rpartition(".")
        for synonym in _SYNONYMS.get(name, ()) if op.kind == "function" else ():
            other = _insert(root, f"{parent}.{synonym}" if parent else synonym)
            other.targets = (op.path,)
    return root


def _paths(node: _Node, prefix: str) -> Iterable[str]:
    for name, child in node.children.items():
        path = f"{prefix}.{name}" if prefix else name
        if child.targets:
            yield path
        yield from _paths(child, path)
