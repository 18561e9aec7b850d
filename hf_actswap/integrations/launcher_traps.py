"""Launches that start without an error, and train something else than was asked."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

from ..errors import Problem
from ..parallel.mesh import MeshError, launch_command, started_processes


def started_together() -> bool:
    """Whether this process is one of several, so far as the launcher says or a process group shows."""
    in_group = dist.is_available() and dist.is_initialized()
    return (dist.get_world_size() if in_group else started_processes(os.environ)) > 1


def refuse_lonely_processes(num_processes: int, environment: Mapping[str, str] | None = None) -> None:
    """Stop if the launcher started several processes and each believes to be alone.

    Accelerate does so without a word on a machine without accelerator, when its configuration says MULTI_GPU
    and the script is not told to use the CPU: independent trainings would write to the same folder.

    Args:
        num_processes: how many processes this one knows of, itself included.
        environment: what the launcher set; ``None``: `os.environ`.

    Raises:
        MeshError: ``WORLD_SIZE`` is above 1 and ``num_processes`` is 1; with the command to start with.
    """
    started = started_processes(os.environ if environment is None else environment)
    if started > 1 and num_processes == 1:
        raise MeshError(
            [
                Problem(
                    "launcher",
                    f"one training in {started} processes (WORLD_SIZE={started})",
                    f"{started} independent trainings, each of which believes to be alone",
                    f"Start with: {launch_command(started)} (or set ACCELERATE_USE_CPU=true on a CPU).",
                )
            ]
        )
