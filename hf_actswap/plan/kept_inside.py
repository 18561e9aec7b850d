"""What a plan keeps or swaps inside the modules that it recomputes: these ops are not run again.

An excluded op inside a recomputed module, a communication whose result is kept, a swapped op: when the module
runs again, the op's result is handed out in its place (`engine/kept_results.py`). MindSpore does the same: an
op without the recompute flag is not duplicated, and its result lives as long as a duplicate reads it. Where
autograd does not save that result, it costs its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from .actions import MemoryPlan, Scope
from .outline import OUTPUT, is_below

_KEPT = ("keep", "swap")


class KeptInside:
    """Of one plan.

    Args:
        plan: rows.
        modules: by layer, the paths of its modules (``""`` is the layer itself).
    """

    def __init__(self, plan: MemoryPlan, modules: Mapping[Scope, frozenset[str]]) -> None:
        self._plan, self._modules = plan, modules
        self._roots: dict[Scope, list[str]] = {}
        self._below: dict[Scope, list[tuple[str, bool]]] = {}
        for row in plan.rows:
            if row.scope not in modules or row.op_path == OUTPUT:
                continue
            if row.fate == "recompute" and row.op_path in modules[row.scope]:
                self._roots.setdefault(row.scope, []).append(row.op_path)
            self._below.setdefault(row.scope, []).append((row.op_path, row.fate in _KEPT))

    def root(self, scope: Scope, path: str) -> str | None:
        """The outermost recomputed module that ``path`` is, or is inside."""
        around = [root for root in self._roots.get(scope, ()) if is_below(path, root)]
        return min(around, key=len, default=None)

    def anything(self, scope: Scope, root: str) -> bool:
        """Whether something is kept or swapped inside a recomputed module."""
        return any(
            kept and path != root and is_below(path, root) for path, kept in self._below.get(scope, ())
        )

    def is_whole(self, scope: Scope, path: str) -> bool:
        """Whether ``path`` is a module inside a recomputed one, in which nothing is recomputed."""
        if path not in self._modules.get(scope, ()) or self.root(scope, path) is None:
            return False
        row = self._plan.row(scope, path)
        if row is None or row.fate not in _KEPT:
            return False
        return all(kept for inside, kept in self._below[scope] if is_below(inside, path))

    def is_held(self, scope: Scope, path: str, ordinal: int | None) -> bool:
        """Whether the result of a call is held, if the module around it must rebuild what comes after it.

        Args:
            scope, path: of a function or module.
            ordinal: which call of a function; ``None``: a module.
        """
        root = self.root(scope, path)
        if root is None or root == path:
            return False
        above = path.rpartition(".")[0]
        while above and above != root:
            if self.is_whole(scope, above):
                return False  # the module's own output is held
            above = above.rpartition(".")[0]
        if ordinal is None:
            return self.is_whole(scope, path)
        row = self._plan.row(scope, path, ordinal)
        return row is not None and row.fate in _KEPT
