"""Whether the first step under a plan did what the plan says: where it did nothing, one warning says why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..plan.actions import MemoryPlan, PlanRow, Scope, folded
from ..plan.outline import Outline
from .stats import Counters

logger = logging.getLogger(__name__)

_AGAIN = ("recompute", "re-gather")
_PAYS_NOT = "each op that it names would hold more than it drops (see the overrides of the applied plan)"


class FirstStep:
    """Follows the steps under one plan until it has judged one: a forward and the backward through it.

    Args:
        plan: as it was applied.
        outline: of the model.
        root: the model inside its wrappers.
        counters: of the plan.

    Attributes:
        entered: scopes that the forward has come to; ``None``: a step has been judged.
    """

    def __init__(self, plan: MemoryPlan, outline: Outline, root: nn.Module, counters: Counters) -> None:
        self.entered: set[Scope] | None = set()
        self._plan, self._counters, self._layers = plan, counters, outline.layer_modules(root)
        self._compiled = {layer.index for layer in outline.all_layers if layer.compiled or outline.compiled}
        self._without_gradients = 0
        self._backward_ran = False

    def forward_without_gradients(self) -> None:
        """A forward has started of which autograd saves nothing."""
        self._without_gradients += 1

    def forward_starts(self, plan: MemoryPlan, measures: bool) -> None:
        """A training forward starts: judge the one before, if backward has run through it.

        Args:
            plan: as it is by now: what does not pay is kept in it.
            measures: whether windows that are not written are chosen by measurement, which says what it does.
        """
        if self.entered is not None and self._backward_ran:
            self._judge(plan, measures)

    def forward_ends(self, output: Any) -> None:
        """It has ended, and returned ``output``."""
        if self.entered is None or self._backward_ran:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(self._backward_runs)

    def removed(self, plan: MemoryPlan, measures: bool) -> None:
        """The plan is taken off."""
        if plan.rows and not self._counters.forwards and self._without_gradients:
            count = self._without_gradients
            logger.warning("The plan did nothing: all %d forwards under it ran without gradients.", count)
        elif self.entered is not None and self._backward_ran:
            self._judge(plan, measures)

    def _backward_runs(self, _gradients: object) -> None:
        self._backward_ran = True

    def _judge(self, plan: MemoryPlan, measures: bool) -> None:
        entered, self.entered = self.entered or set(), None
        swapping = [row for row in plan.rows if row.fate == "swap" and not (measures and row.windows is None)]
        if swapping and not self._counters.offloads:
            refused = "; ".join(f"{size:,} bytes {reason}" for reason, size in self._counters.refused.items())
            why = f"all that it names stays: {refused}" if refused else self._why(swapping, entered)
            logger.warning("The plan swaps nothing in a step: %s.", why)
        asked, left = _again(self._plan.rows), _again(plan.rows)
        whole = {row.scope for row in left if not row.op_path}
        seen = self._counters.recomputes or any(self._trains(scope) for scope in whole & entered)
        if asked and not seen and not any(row.scope in self._compiled for row in asked):
            logger.warning(
                "The plan recomputes nothing in a step: %s.", self._why(left, entered) if left else _PAYS_NOT
            )

    def _why(self, rows: Sequence[PlanRow], entered: set[Scope]) -> str:
        scopes = {row.scope for row in rows}
        if not scopes & entered:
            return f"the model does not call what it names ({folded(scopes)})"
        frozen = "" if any(map(self._trains, scopes)) else ", where no weight needs a gradient"
        return f"autograd saves nothing of what it names ({folded(scopes)}){frozen}"

    def _trains(self, scope: Scope) -> bool:
        """Whether a layer has weights with gradients; what is around the layers is not asked."""
        layer = self._layers.get(scope)
        return layer is None or any(weight.requires_grad for weight in layer.parameters())


def _again(rows: Iterable[PlanRow]) -> list[PlanRow]:
    return [row for row in rows if row.fate in _AGAIN]
