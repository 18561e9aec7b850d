"""A CUDA device without a GPU, on which tests and users' scripts run.

PyTorch's CUDA build finds a stand-in for the CUDA runtime: its allocator, streams, events and pinned memory
work as on a GPU; kernels do nothing, or the CPU computes their values (``native``). Nothing else of the
library imports this package but its command, and it imports nothing of the engine.
"""

from .build import Built, build
from .devices import DEVICES, DeviceFacts, device_facts
from .errors import RehearsalError
from .launch import Options, environment, replace_process
from .running import RehearsedDevice

__all__ = [
    "DEVICES",
    "Built",
    "DeviceFacts",
    "Options",
    "RehearsalError",
    "RehearsedDevice",
    "build",
    "device_facts",
    "environment",
    "replace_process",
]
