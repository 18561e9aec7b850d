"""Chooses, while a model trains, which saved tensors to keep, swap and recompute within a memory budget.

In: a model, its optimizer and the ``memory`` section (`PlannedTraining`, `start_planner`). Out: a `Planner`,
which puts a `MemoryPlan` on the model and improves it; a `Prediction` of peak and time.

`devices` has what devices can do; `record` records a step, or computes one from shapes, as a `Profile`
(`profile`); `cost` predicts a step under a plan; `search` solves for the fastest plan (`planning` asks it, on
one rank for all). `states` keeps optimizer states on the host; `oom_guard` lets a step survive when the
device runs out of memory. `start` makes a `Planner`, which `phases` lead from the step on paper (`on_paper`)
or the warm-up to the stable phase.

This package knows profiles, costs and plans, but neither YAML nor transformers.
"""

from __future__ import annotations

from .budget import BudgetError
from .cost.simulate import Simulator, predict
from .devices import device_rates
from .meter import AllocatorMeter, CountingMeter, Meter
from .oom_guard import OomGuard, op_hook
from .phases.planner import Planner
from .profile import FrontierPoint, Limits, OpEvent, Prediction, Profile, profile_from_json, profile_to_json
from .record.recorder import DeviceClock, StepRecorder
from .record.shapes import profile_from_shapes
from .run import PlannedTraining
from .search.find_plan import find_plan
from .start import start_planner
from .states.in_backward import OptimizerInBackward, OptimizerInBackwardError
from .states.optimizer_states import OptimizerStates

__all__ = [
    "AllocatorMeter",
    "BudgetError",
    "CountingMeter",
    "DeviceClock",
    "FrontierPoint",
    "Limits",
    "Meter",
    "OomGuard",
    "OpEvent",
    "OptimizerInBackward",
    "OptimizerInBackwardError",
    "OptimizerStates",
    "PlannedTraining",
    "Planner",
    "Prediction",
    "Profile",
    "Simulator",
    "StepRecorder",
    "device_rates",
    "find_plan",
    "op_hook",
    "predict",
    "profile_from_json",
    "profile_from_shapes",
    "profile_to_json",
    "start_planner",
]
