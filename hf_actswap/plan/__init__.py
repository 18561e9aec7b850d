"""Plans: what happens to each op of a given model. Knows names, layers and ops; no streams, no hooks."""

from __future__ import annotations

from .actions import MemoryPlan, Override, PlanRow, Windows
from .outline import Outline, outline
from .resolve import resolve_plan

__all__ = ["MemoryPlan", "Outline", "Override", "PlanRow", "Windows", "outline", "resolve_plan"]
