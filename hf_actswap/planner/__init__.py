"""Chooses, while a model trains, which saved tensors to keep, swap and recompute within a memory budget.

In: a model, its optimizer and the ``memory`` section (`PlannedTraining`, `start_planner`).
Out: a `Planner`, which puts a `MemoryPlan` on the model and improves it; a `Prediction` of peak and time.

`record` records a step, or computes one from shapes, as a `Profile`; `cost` predicts a step under a plan;
`search` solves for the fastest plan; `rescue` lets a step survive when the device runs out of memory;
`states` keeps optimizer states on the host. `phases` leads from warm-up to search to the stable phase.

This package knows profiles, costs and plans, but neither YAML nor transformers.
"""

from __future__ import annotations

from .budget import BudgetError
from .meter import AllocatorMeter, CountingMeter, Meter
from .oom_guard import op_hook
from .phases import Planner
from .profile import Limits, Prediction, Profile
from .run import PlannedTraining
from .start import start_planner

__all__ = [
    "AllocatorMeter",
    "BudgetError",
    "CountingMeter",
    "Limits",
    "Meter",
    "PlannedTraining",
    "Planner",
    "Prediction",
    "Profile",
    "op_hook",
    "start_planner",
]
