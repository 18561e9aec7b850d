"""What ``hf-actswap run`` and the processes that it starts tell each other, through the environment.

They learn which plan is asked for, and it learns of their trainings: a file for each rank. It imports the
standard library alone, so that a program starts at once.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HF_ACTSWAP"
"""Holds what ``actswap`` of the training arguments would: ``auto``, a file, a Hub id, YAML or JSON."""

OFF = "off"
"""The value of `VARIABLE` for no plan; an empty one and the other words for off mean the same."""

FOLDER = "HF_ACTSWAP_TRAININGS"
"""Variable of the environment with the folder of the files; only ``hf-actswap run`` sets it."""


@dataclass(frozen=True)
class EndedTraining:
    """A training that ended normally, with a plan on its model, as one rank saw it.

    Args:
        output_dir: the Trainer's; of a loop with Accelerate its project's folder, or else the program.
        rank: of this process.
        processes: how many trained.
        steps: optimizer steps.
        acts: whether the plan does anything; one that keeps everything does not.
        moved_bytes: what the last step moved to host memory.
        again_bytes: what it computed again.
    """

    output_dir: str
    rank: int
    processes: int
    steps: int
    acts: bool
    moved_bytes: int
    again_bytes: int

    @classmethod
    def of(
        cls, applied: Any, step: Any, output_dir: str, rank: int, processes: int, steps: int
    ) -> EndedTraining:
        """Return it, given what was on the model and the statistics of its last step."""
        final = getattr(applied, "final_plan", applied)  # of a planner, which changes plans
        dropped_bytes = 0 if final is None else final.dropped_bytes or 0
        again_bytes, acts = dropped_bytes * step.forwards, applied.plan.does_anything
        return cls(output_dir, rank, processes, steps, acts, step.offloaded_bytes, again_bytes)


def tell_run(training: EndedTraining) -> None:
    """Write the training into the folder of ``hf-actswap run``, if that started this process."""
    if folder := os.environ.get(FOLDER):
        descriptor, _ = tempfile.mkstemp(".json", f"{training.rank}-", folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(training), file)


def ended_trainings(folder: Path) -> list[EndedTraining]:
    """Return the trainings of all ranks of a folder, in the order in which they ended."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    return [EndedTraining(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
