"""What people read: plans as tables, bars while something takes its time, the report of a run."""

from __future__ import annotations

from .bytes_bar import BytesBar
from .pinning_bar import PinningBar
from .plan_table import plan_table
from .planner_bar import PlannerBar

__all__ = ["BytesBar", "PinningBar", "PlannerBar", "plan_table"]
