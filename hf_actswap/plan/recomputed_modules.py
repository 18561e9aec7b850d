"""An index of what a plan recomputes, and of what is inside the modules that it recomputes as a whole.

The engine, the count of saved bytes, the rules that settle a plan, and the planner use it. A *root* is a
module that is run again as one; of roots inside each other the outermost counts.

What a plan keeps or swaps inside a root is not run again (an excluded op, a communication whose result is
kept, a swapped op): when the module runs again, the op's result is handed out in its place
(`engine/kept_results.py`). MindSpore does the same: an op without the recompute flag is not duplicated, and
its result is held as long as a duplicate reads it. Where autograd does not save that result, it costs bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .actions import OUTPUT, MemoryPlan, OpCall, PlanRow, Scope
from .model_structure import is_below
from .op_facts import is_communication

RUN_AGAIN = ("recompute", "re-gather")
"""Fates of tensors that are dropped, and made again in backward."""


@dataclass(frozen=True, eq=False)
class RecomputedModules:
    """The index of one plan.

    Args:
        plan: the plan.
        modules: paths of the modules of each layer (``""`` is the layer itself).
    """

    plan: MemoryPlan
    modules: Mapping[Scope, frozenset[str]]
    _rows: dict[OpCall, PlanRow | None] = field(init=False, repr=False, default_factory=dict)
    _outermost: dict[tuple[Scope | None, str], str | None] = field(
        init=False, repr=False, default_factory=dict
    )
    _kept_modules: dict[tuple[Scope, str], bool] = field(init=False, repr=False, default_factory=dict)

    @cached_property
    def roots(self) -> Mapping[Scope, frozenset[str]]:
        """Paths of the modules of each layer that are run again as one."""
        found: dict[Scope, set[str]] = {}
        for row in self.plan.rows:
            if row.fate == "recompute" and row.ordinal is None and self._is_module(row):
                found.setdefault(row.scope, set()).add(row.op_path)
        return {scope: frozenset(paths) for scope, paths in found.items()}

    @cached_property
    def scopes_with_op_rows(self) -> frozenset[Scope]:
        """Scopes in which rows of the plan name single ops."""
        return frozenset(row.scope for row in self.plan.rows if row.op_path not in ("", OUTPUT))

    @cached_property
    def whole_layers(self) -> frozenset[Scope]:
        """Layers that are run again whole, and in which no row names single ops."""
        whole = frozenset(scope for scope, paths in self.roots.items() if "" in paths)
        return whole - self.scopes_with_op_rows

    @cached_property
    def selective_layers(self) -> frozenset[Scope]:
        """Layers in which something is recomputed, except `whole_layers`."""
        again = {row.scope for row in self.plan.rows if row.fate == "recompute"}
        return self.scopes_with_op_rows.intersection(again, self.modules)

    def row(self, call: OpCall) -> PlanRow | None:
        """Return the row that decides what ``call`` produces."""
        if call not in self._rows:
            scope, path, ordinal = call
            self._rows[call] = None if scope is None else self.plan.row(scope, path, ordinal)
        return self._rows[call]

    def is_root(self, scope: Scope | None, path: str) -> bool:
        """Whether a module is run again as one."""
        return scope is not None and path in self.roots.get(scope, ())

    def root(self, scope: Scope | None, path: str) -> str | None:
        """Return the outermost root that ``path`` is, or is inside."""
        key = scope, path
        if key not in self._outermost:
            roots = () if scope is None else self.roots.get(scope, ())
            around = [root for root in roots if is_below(path, root)]
            self._outermost[key] = min(around, key=len, default=None)
        return self._outermost[key]

    def rebuilt_by(self, call: OpCall) -> OpCall | None:
        """Return the call that is run again, from its inputs, to rebuild what ``call`` produces.

        Returns:
            The root around ``call`` (as a call with ordinal ``None``); ``call`` itself without a root, or if
            it is a communication that is done again; ``None`` if what it produces is kept or swapped.
        """
        scope, path, _ = call
        row = self.row(call)
        if row is None or row.fate not in RUN_AGAIN:
            return None
        root = self.root(scope, path)
        if root is None or (is_communication(path) and not self._is_module(row)):
            return call
        return scope, root, None

    def keeps_inside(self, scope: Scope, root: str) -> bool:
        """Whether something is kept or swapped inside a root."""
        inside = self._inside.get(scope, ())
        return any(kept and path != root and is_below(path, root) for path, kept in inside)

    def is_kept_module(self, scope: Scope, path: str) -> bool:
        """Whether ``path`` is a module inside a root, and nothing in this module is run again."""
        key = scope, path
        if key not in self._kept_modules:
            self._kept_modules[key] = self._find_kept_module(scope, path)
        return self._kept_modules[key]

    def is_held(self, call: OpCall) -> bool:
        """Whether the root around a call holds the call's result, if the root must rebuild what comes after.

        Args:
            call: call of a function, or of a module (ordinal ``None``).
        """
        scope, path, ordinal = call
        root = self.root(scope, path)
        if scope is None or root is None or root == path:
            return False
        above = path.rpartition(".")[0]
        while above and above != root:
            if self.is_kept_module(scope, above):
                return False  # the module's own output is held
            above = above.rpartition(".")[0]
        if ordinal is None:
            return self.is_kept_module(scope, path)
        row = self.row(call)
        return row is not None and row.fate not in RUN_AGAIN

    @cached_property
    def _inside(self) -> Mapping[Scope, list[tuple[str, bool]]]:
        """For each layer, the op paths of its rows, each with whether the op is not run again."""
        found: dict[Scope, list[tuple[str, bool]]] = {}
        for row in self.plan.rows:
            if row.scope in self.modules and row.op_path != OUTPUT:
                found.setdefault(row.scope, []).append((row.op_path, row.fate not in RUN_AGAIN))
        return found

    def _find_kept_module(self, scope: Scope, path: str) -> bool:
        if path not in self.modules.get(scope, ()) or self.root(scope, path) is None:
            return False
        row = self.row((scope, path, None))
        if row is None or row.fate in RUN_AGAIN:
            return False
        return all(kept for inside, kept in self._inside[scope] if is_below(inside, path))

    def _is_module(self, row: PlanRow) -> bool:
        return row.op_path in self.modules.get(row.scope, ())
