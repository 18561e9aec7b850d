"""Writes what people read: plans as tables, progress bars, and the report of a run as a page.

In: plans, predictions, and the files that a training leaves in its folder (`run_files`).
Out: text, bars, one HTML page and pictures (`write_report`).
"""

from __future__ import annotations

from .console import BytesBar, PinningBar, PlannerBar, console_logging, plan_summary, plan_table
from .run_files import Saving, saving_of

__all__ = [
    "BytesBar",
    "PinningBar",
    "PlannerBar",
    "Saving",
    "console_logging",
    "plan_summary",
    "plan_table",
    "saving_of",
]
