"""The plan as the hooks ask it: what to do with what an op produces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..plan.actions import SCOPES, MemoryPlan, Scope, Windows
from ..plan.kept_inside import KeptInside
from ..plan.outline import OUTPUT, Outline

Kind = Literal["keep", "swap", "recompute_inside", "recompute_function", "slice"]


@dataclass(frozen=True)
class Action:
    """What to do with a saved tensor.

    Args:
        kind: ``recompute_inside`` while a region of a module runs; ``recompute_function`` for an op that is
            a region of its own, also a communication that is done again; ``slice`` for an input of which each
            tensor-parallel rank keeps a part.
        windows: of a swap; ``None``: to be chosen by measurement (`auto_windows`).
        op_path: of the plan row that says so.
        scope: of the producer.
    """

    kind: Kind = "keep"
    windows: Windows | None = None
    op_path: str = ""
    scope: Scope | None = None


KEEP = Action()


class FateTable:
    """Looks fates up once and remembers them.

    Args:
        plan: rows.
        outline: tells modules from functions.
    """

    def __init__(self, plan: MemoryPlan, outline: Outline) -> None:
        self._plan = plan
        self._known: dict[tuple[Scope, str, int | None], Action] = {}
        self._kept_modules: dict[tuple[Scope, str], bool] = {}
        self._modules = outline.modules
        self._roots = self._recomputed_modules(plan)
        self._kept_inside = KeptInside(plan, self._modules)
        inside = {row.scope for row in plan.rows if row.op_path not in ("", OUTPUT)}
        compiled = {layer.index for layer in outline.all_layers if layer.compiled}
        self.checkpointed_layers = {
            scope for scope, path in self._roots if path == "" and scope not in inside
        }
        """Layers that are recomputed whole, with nothing inside decided otherwise."""
        self.named_layers = {
            scope
            for scope in inside - compiled
            if scope in self._modules and scope not in self.checkpointed_layers
        }
        """Layers in which ops must be named; in compiled ones the tracer names them (`compiled_regions`)."""
        recomputing = {row.scope for row in plan.rows if row.fate in ("recompute", "re-gather")}
        recomputing |= {_next(row.scope) for row in plan.rows if row.fate == "slice"}
        scopes = frozenset({*self._modules, *SCOPES})
        self.scopes_without_recomputation = scopes - (recomputing - compiled)
        self.recomputes = bool(recomputing)

    def __getitem__(self, key: tuple[Scope, str, int | None]) -> Action:
        """The action for (scope, op path, ordinal)."""
        action = self._known.get(key)
        if action is None:
            action = self._known[key] = self._look_up(*key)
        return action

    def follow(self, plan: MemoryPlan) -> MemoryPlan:
        """Look fates up in ``plan`` from now on, which recomputes fewer ops of the same layers; return it."""
        if plan is not self._plan:
            self._plan, self._roots = plan, self._recomputed_modules(plan)
            self._kept_inside = KeptInside(plan, self._modules)
            self._known.clear()
            self._kept_modules.clear()
        return plan

    def is_region(self, scope: Scope, path: str) -> bool:
        """Whether a module is recomputed as one."""
        return (scope, path) in self._roots

    def keeps_inside(self, scope: Scope, path: str) -> bool:
        """Whether ops inside a module that is recomputed as one are kept or swapped."""
        return self._kept_inside.anything(scope, path)

    def is_kept_module(self, scope: Scope, path: str) -> bool:
        """Whether it is a module inside a recomputed one, in which everything is kept or swapped."""
        key = scope, path
        if key not in self._kept_modules:
            self._kept_modules[key] = self._kept_inside.is_whole(scope, path)
        return self._kept_modules[key]

    def _look_up(self, scope: Scope, path: str, ordinal: int | None) -> Action:
        row = self._plan.row(scope, path, ordinal)
        if row is None or row.fate == "keep":
            return KEEP
        if row.fate == "swap":
            return Action("swap", row.windows, row.op_path, scope)
        if row.fate == "slice":
            return Action("slice")
        return Action("recompute_inside" if self._is_module(scope, row.op_path) else "recompute_function")

    def _recomputed_modules(self, plan: MemoryPlan) -> set[tuple[Scope, str]]:
        rows = [row for row in plan.rows if row.fate == "recompute" and row.scope in self._modules]
        return {(row.scope, row.op_path) for row in rows if self._is_module(row.scope, row.op_path)}

    def _is_module(self, scope: Scope, path: str) -> bool:
        return scope in SCOPES or path in self._modules[scope]


def _next(scope: Scope) -> Scope:
    """The layer that reads what ``scope`` hands on, in the decoder."""
    return scope + 1 if isinstance(scope, int) else 0
