"""Plans: what happens to each op of a given model. Knows names, layers and ops; no streams, no hooks."""

from __future__ import annotations

from .actions import MemoryPlan, Override, PlanRow, Windows
from .outline import Outline, outline
from .plan_source import ConfigOrPlan, load_config_or_plan, load_plan
from .resolve import resolve_plan, with_problems_of_model

__all__ = [
    "ConfigOrPlan",
    "MemoryPlan",
    "Outline",
    "Override",
    "PlanRow",
    "Windows",
    "load_config_or_plan",
    "load_plan",
    "outline",
    "resolve_plan",
    "with_problems_of_model",
]
