"""The planner: finds, while a model trains, what to keep, swap and recompute within a budget."""

from __future__ import annotations

from .budget import BudgetError
from .meter import AllocatorMeter, CountingMeter, Meter
from .phases import Planner
from .profile import Limits, Prediction, Profile
from .rescue.op_hook import op_hook
from .start import start_planner

__all__ = [
    "AllocatorMeter",
    "BudgetError",
    "CountingMeter",
    "Limits",
    "Meter",
    "Planner",
    "Prediction",
    "Profile",
    "op_hook",
    "start_planner",
]
