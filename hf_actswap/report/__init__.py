"""What people read: plans as tables."""

from __future__ import annotations

from .plan_table import plan_table

__all__ = ["plan_table"]
