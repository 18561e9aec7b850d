"""Finds, while a model trains, what to keep, swap and recompute within a budget of memory.

In: a model, its optimizer and the ``memory`` section (`PlannedTraining`, `start_planner`).
Out: a `Planner`, which puts a `MemoryPlan` on the model and improves it; a `Prediction` of peak and time.

`record` observes a step, or computes one from shapes, as a `Profile`; `cost` predicts a step under a plan;
`search` solves for the fastest plan; `rescue` survives a device that runs out of memory; `states` keeps
optimizer states on the host. `phases` leads from warm-up to search to the stable stage.

It knows profiles, costs and plans; no YAML, no transformers.
"""

from __future__ import annotations

from .budget import BudgetError
from .meter import AllocatorMeter, CountingMeter, Meter
from .phases import Planner
from .profile import Limits, Prediction, Profile
from .rescue.op_hook import op_hook
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
