"""Writes what people read: plans as tables, progress bars, and the report of a run as a page.

In: plans, predictions, and the files that a training leaves in its folder (`run_files`).
Out: text, bars, one HTML page and pictures (`write_report`).
"""

from __future__ import annotations

from .bars import BytesBar, PinningBar, PlannerBar
from .plan_table import plan_table

__all__ = ["BytesBar", "PinningBar", "PlannerBar", "plan_table"]
