"""What a run leaves behind in ``<output_dir>/actswap/``, and how it is read back.

============== =========================================================================================
run.json       what ran: versions, device, model, configuration
plan.json      the plan that was on last
steps.jsonl    one line for each logged step: loss, time, peak memory, statistics of the plan
planner.json   the planner's trials, and the budget
saving.json    the peak, by how much it is lower than without the plan, and the time (`report.saving.Saving`)
profile.json   what the planner recorded of a step without a plan
timeline.json  one step, measured: compute, copies, stalls (`engine.step_record.StepTimeline`)
memory.json    the step after it: memory by fate (`engine.step_record.StepMemory`)
============== =========================================================================================

All but ``run.json`` may be missing. Sizes in bytes and times in ms, of rank 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.step_record import (
    ComputePart,
    MeasuredCopy,
    MemorySample,
    Stall,
    StepMemory,
    StepTimeline,
)
from ..errors import ActSwapError, Problem
from ..plan import MemoryPlan
from ..planner.profile import Profile
from ..planner.record.profile_document import profile_from_json, profile_to_json
from .saving import Saving

FOLDER = "actswap"
RUN, PLAN, STEPS, PLANNER = "run.json", "plan.json", "steps.jsonl", "planner.json"
PROFILE, TIMELINE, MEMORY = "profile.json", "timeline.json", "memory.json"
SAVING = "saving.json"


class ReportError(ActSwapError):
    """A folder holds no record of a run, or a damaged one."""

    subject = "record of the run"


@dataclass(frozen=True)
class RecordedRun:
    """A run as it was recorded.

    Args:
        folder: with the files.
        about: ``run.json``.
        plan: that was on last; ``None``: not written.
        steps: the lines of ``steps.jsonl``.
        planner: ``planner.json``; ``None``: there was no planner, or it had not settled.
        saving: ``saving.json``; ``None``: it is not known.
        profile: see the module's text; so are the others.
    """

    folder: Path
    about: Mapping[str, Any]
    plan: MemoryPlan | None
    steps: Sequence[Mapping[str, Any]]
    planner: Mapping[str, Any] | None
    saving: Saving | None
    profile: Profile | None
    timeline: StepTimeline | None
    memory: StepMemory | None


class RunFiles:
    """Writes the files of one run; each whole or not at all, but for the lines.

    Args:
        output_dir: of the training. Files of an earlier run in it are replaced.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        self.folder = Path(output_dir) / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (RUN, PLAN, STEPS, PLANNER, PROFILE, TIMELINE, MEMORY, SAVING):
            (self.folder / name).unlink(missing_ok=True)

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document."""
        self._write(name, json.dumps(document, indent=1, default=str))

    def write_plan(self, plan: MemoryPlan) -> None:
        """Write the plan that is on."""
        self._write(PLAN, plan.to_json())

    def write_profile(self, profile: Profile) -> None:
        """Write what the planner recorded."""
        self._write(PROFILE, profile_to_json(profile))

    def write_measured(self, measured: StepTimeline | StepMemory) -> None:
        """Write a measured step, a row on each line."""
        name = TIMELINE if isinstance(measured, StepTimeline) else MEMORY
        document = {
            key: [list(row.values()) for row in value] if isinstance(value, list | tuple) else value
            for key, value in asdict(measured).items()
        }
        lines = [f"{json.dumps(key)}: {_table(value)}" for key, value in document.items()]
        self._write(name, "{\n" + ",\n".join(lines) + "\n}")

    def add_step(self, line: Mapping[str, Any]) -> None:
        """Add the line of a step."""
        with open(self.folder / STEPS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")

    def _write(self, name: str, text: str) -> None:
        draft = self.folder / f".{name}.{os.getpid()}"
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(self.folder / name)


def read_run(run_dir: str | os.PathLike[str]) -> RecordedRun:
    """Read the record of a run.

    Args:
        run_dir: the ``output_dir`` of the training, or the folder ``actswap`` in it.

    Raises:
        ReportError: there is none, or it is damaged.
    """
    folder = Path(run_dir)
    if not (folder / RUN).is_file():
        folder = folder / FOLDER
    if not (folder / RUN).is_file():
        raise ReportError([Problem(str(run_dir), f"{FOLDER}/{RUN}, which a training leaves there", "none")])
    plan, profile = _text(folder / PLAN), _text(folder / PROFILE)
    timeline, memory = _json(folder / TIMELINE), _json(folder / MEMORY)
    saving = _json(folder / SAVING)
    try:
        return RecordedRun(
            folder=folder,
            about=_json(folder / RUN) or {},
            plan=None if plan is None else MemoryPlan.from_json(plan),
            steps=_lines(folder / STEPS),
            planner=_json(folder / PLANNER),
            saving=None if saving is None else Saving(**saving),
            profile=None if profile is None else profile_from_json(profile),
            timeline=None if timeline is None else _timeline(timeline),
            memory=None if memory is None else _memory(memory),
        )
    except (TypeError, KeyError) as error:
        problem = Problem(str(folder), "files that this version has written", f"others: {error}")
        raise ReportError([problem]) from None


def _timeline(document: Mapping[str, Any]) -> StepTimeline:
    return StepTimeline(
        step_ms=document["step_ms"],
        compute=tuple(ComputePart(*row) for row in document["compute"]),
        copies=tuple(MeasuredCopy(*row) for row in document["copies"]),
        stalls=tuple(Stall(*row) for row in document["stalls"]),
        overlaps=document["overlaps"],
    )


def _memory(document: Mapping[str, Any]) -> StepMemory:
    return StepMemory(
        step_ms=document["step_ms"],
        start_bytes=document["start_bytes"],
        samples=tuple(MemorySample(*row) for row in document["samples"]),
        parts=tuple(ComputePart(*row) for row in document["parts"]),
    )


def _table(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
    return json.dumps(value)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _json(path: Path) -> Any:
    text = _text(path)
    return None if text is None else _parsed(path, text)


def _lines(path: Path) -> list[Any]:
    """The last line may be cut off where a run was killed."""
    lines = (_text(path) or "").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [_parsed(path, line) for line in lines]


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ReportError([Problem(str(path), "JSON", f"no JSON: {error}")]) from None
