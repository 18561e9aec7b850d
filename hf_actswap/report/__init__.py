"""What people read: plans as tables, and a bar while memory is made ready."""

from __future__ import annotations

from .pinning_bar import PinningBar
from .plan_table import plan_table

__all__ = ["PinningBar", "plan_table"]
