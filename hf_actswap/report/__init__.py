"""What people read: plans as tables, bars while something takes its time, the report of a run."""

from __future__ import annotations

from .bars import BytesBar, PinningBar, PlannerBar
from .plan_table import plan_table

__all__ = ["BytesBar", "PinningBar", "PlannerBar", "plan_table"]
