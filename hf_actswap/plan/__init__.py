"""Plans: what happens to each op of a given model. Knows names, layers and ops; no streams, no hooks."""

from __future__ import annotations

from .actions import Adjustment, MemoryPlan, PlanRow, Windows
from .model_structure import ModelStructure, model_structure
from .plan_source import ConfigOrPlan, load_config_or_plan, load_plan
from .resolve import resolve_plan, with_problems_of_model

__all__ = [
    "Adjustment",
    "ConfigOrPlan",
    "MemoryPlan",
    "ModelStructure",
    "PlanRow",
    "Windows",
    "load_config_or_plan",
    "load_plan",
    "model_structure",
    "resolve_plan",
    "with_problems_of_model",
]
