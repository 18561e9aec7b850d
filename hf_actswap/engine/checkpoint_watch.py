"""Gradient checkpointing that is switched on after a plan has been applied: noticed at the next forward."""

from __future__ import annotations

from torch import nn

from ..errors import PlanError
from ..plan.actions import MemoryPlan
from ..plan.checkpointing_rules import problems_of_checkpointing
from ..plan.gradient_checkpointing import is_checkpointed
from ..plan.outline import Outline


class CheckpointWatch:
    """Asks the rules again that were asked when the plan was applied, if their answer may have changed.

    Args:
        model: inside its wrappers.
        plan: on it.
        outline: of the model as it was then.
    """

    def __init__(self, model: nn.Module, plan: MemoryPlan, outline: Outline) -> None:
        self._plan, self._compiled = plan, outline.compiled
        self._layers = outline.layer_modules(model)
        self._known = [layer.checkpointed for layer in outline.all_layers]

    def check(self) -> None:
        """A training forward starts.

        Raises:
            PlanError: gradient checkpointing has been switched on since, and the plan cannot act beside it.
        """
        now = [layer.training and is_checkpointed(layer) for layer in self._layers.values()]
        if not any(on and not known for on, known in zip(now, self._known, strict=True)):
            return
        if problems := problems_of_checkpointing(self._layers, self._plan, self._compiled):
            raise PlanError(problems)
        self._known = [on or known for on, known in zip(now, self._known, strict=True)]
