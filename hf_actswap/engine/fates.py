"""The plan as the hooks ask it: what to do with what an op produces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..plan.actions import MemoryPlan, Scope, Windows
from ..plan.outline import OUTPUT, Outline

Kind = Literal["keep", "swap", "recompute_inside", "recompute_function"]


@dataclass(frozen=True)
class Action:
    """What to do with a saved tensor.

    Args:
        kind: ``recompute_inside`` while a region of a module runs; ``recompute_function`` for an op that is
            a region of its own.
        windows: of a swap; ``None``: to be chosen by measurement (`auto_windows`).
        op_path: of the plan row that says so.
    """

    kind: Kind = "keep"
    windows: Windows | None = None
    op_path: str = ""


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
        self._modules = [
            frozenset({"", *(op.path for op in layer.ops if op.kind != "function")})
            for layer in outline.layers
        ]
        rows = [row for row in plan.rows if row.fate == "recompute" and isinstance(row.scope, int)]
        self._roots = {(row.scope, row.op_path) for row in rows if self._is_module(row.scope, row.op_path)}
        inside = {row.scope for row in plan.rows if row.op_path not in ("", OUTPUT)}
        self.checkpointed_layers = {
            scope for scope, path in self._roots if path == "" and scope not in inside
        }
        """Layers that are recomputed whole, with nothing inside decided otherwise."""
        self.named_layers = {
            scope for scope in inside if isinstance(scope, int) and scope not in self.checkpointed_layers
        }
        """Layers in which ops must be named."""
        recomputing = {row.scope for row in plan.rows if row.fate == "recompute"}
        scopes: set[Scope] = {*range(len(outline.layers)), "embedding", "final_norm", "head"}
        self.scopes_without_recomputation = frozenset(scopes - recomputing)

    def __getitem__(self, key: tuple[Scope, str, int | None]) -> Action:
        """The action for (scope, op path, ordinal)."""
        action = self._known.get(key)
        if action is None:
            action = self._known[key] = self._look_up(*key)
        return action

    def is_region(self, scope: Scope, path: str) -> bool:
        """Whether a module is recomputed as one."""
        return (scope, path) in self._roots

    def _look_up(self, scope: Scope, path: str, ordinal: int | None) -> Action:
        row = self._plan.row(scope, path, ordinal)
        if row is None or row.fate == "keep":
            return KEEP
        if row.fate == "swap":
            return Action("swap", row.windows, row.op_path)
        return Action("recompute_inside" if self._is_module(scope, row.op_path) else "recompute_function")

    def _is_module(self, scope: Scope, path: str) -> bool:
        return not isinstance(scope, int) or path in self._modules[scope]
