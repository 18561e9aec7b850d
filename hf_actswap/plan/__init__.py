"""Plans: what happens to each op of a given model. Knows names, layers and ops; no streams, no hooks."""

from __future__ import annotations

from .actions import MemoryPlan, Override, PlanRow, Windows
from .outline import Outline, outline
from .published import load_plan
from .resolve import resolve_plan

__all__ = ["MemoryPlan", "Outline", "Override", "PlanRow", "Windows", "load_plan", "outline", "resolve_plan"]
