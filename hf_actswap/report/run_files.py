"""Writes and reads the files that a run leaves in ``<output_dir>/actswap/``.

============== =========================================================================================
run.json       what ran: versions, device, model, configuration
plan.json      the last plan that was on the model
steps.jsonl    one line for each logged step: loss, time, peak memory, statistics of the plan
planner.json   the planner's trials, and the budget
saving.json    peak memory, the memory saved by the plan, and the time of a step (`report.run_files.Saving`)
profile.json   what the planner recorded of a step without a plan
timeline.json  one step, measured: compute, copies, stalls (`engine.step_watch.StepTimeline`)
memory.json    the step after it: memory by fate (`engine.step_watch.StepMemory`)
============== =========================================================================================

All but ``run.json`` may be missing. Sizes are in bytes and times in ms, of rank 0. In a pipeline rank 0 holds
the first stage; folders ``stage_1``, ``stage_2`` .. hold the same files of the other stages.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from ..config.documents import Bytes, Count, JsonDocument, read_text, write_whole
from ..config.sizes import gib, gib_text
from ..engine import AppliedPlan
from ..engine.step_watch import ComputePart, MeasuredCopy, MemorySample, Stall, StepMemory, StepTimeline
from ..errors import ActSwapError, Problem
from ..plan import MemoryPlan
from ..planner import Planner
from ..planner.profile import Profile, profile_from_json, profile_to_json

logger = logging.getLogger(__name__)

COUNTED = "counted: what it swaps and recomputes"
COUNTED_SWAPS = "counted: what it swaps"
"""`Saving.source` if no step was measured without the plan. The counted bytes are then an upper bound: the
peak falls by less if the plan moves it to another moment of the step."""


@dataclass(frozen=True)
class Saving:
    """Memory that a plan saves in one step on one rank, and the time of the step; ``None``: not known.

    Args:
        saved_bytes: how much less device memory the step needs with the plan.
        source: how ``saved_bytes`` was obtained, or why it is not known.
        peak_bytes: the most device memory in use in a step with the plan.
        step_ms, without_step_ms: time of the step with the plan and without.
        time_source: how ``without_step_ms`` was obtained, in words.
        stall_ms: part of ``step_ms`` in which compute waits for copies.
    """

    saved_bytes: int | None
    source: str
    peak_bytes: int | None
    step_ms: float | None = None
    without_step_ms: float | None = None
    stall_ms: float = 0.0
    time_source: str = "predicted"

    @property
    def without_peak_bytes(self) -> int | None:
        """The peak of the same step without the plan; an upper bound if it was counted."""
        if self.peak_bytes is None or self.saved_bytes is None:
            return None
        return self.peak_bytes + self.saved_bytes

    @property
    def at_most(self) -> str:
        """Text to put before `without_peak_bytes`: "at most ", or nothing."""
        return "at most " if self.source.startswith("counted") else ""

    def as_log(self, prefix: str = "actswap_") -> dict[str, float]:
        """Return numbers for a training log, in GiB, by names that begin with ``prefix``."""
        numbers = {} if self.saved_bytes is None else {f"{prefix}saved_gib": gib(self.saved_bytes)}
        if self.peak_bytes is not None:
            numbers[f"{prefix}peak_gib"] = gib(self.peak_bytes)
        return numbers

    def in_words(self) -> str:
        """Return the saving and the time as one line of text."""
        return f"{self._memory_in_words()} {self._time_in_words()}".rstrip()

    def _memory_in_words(self) -> str:
        peak = "Peak not measured" if self.peak_bytes is None else f"Peak memory {gib_text(self.peak_bytes)}"
        if self.saved_bytes is None:
            return f"{peak} ({self.source})."
        saved = gib_text(self.saved_bytes)
        if self.without_peak_bytes is None:
            return f"{saved} less kept for backward than without a plan ({self.source}); peak not measured."
        if not self.saved_bytes:
            return f"{peak}, as without a plan ({self.source})."
        share = self.saved_bytes / self.without_peak_bytes
        without = f"{self.at_most}{gib_text(self.without_peak_bytes)} without a plan ({self.source})"
        return f"{peak} in place of {without}: {saved} less, {share:.0%}."

    def _time_in_words(self) -> str:
        if self.step_ms is None:
            return ""
        words = f"A step takes {self.step_ms:,.1f} ms"
        if self.stall_ms >= 0.05:
            words += f", {self.stall_ms:,.1f} ms of it waiting for copies"
        if self.without_step_ms is not None:
            words += f"; {self.without_step_ms:,.1f} ms without a plan ({self.time_source})"
        return f"{words}."


_TILED = "what it would be without tiles or chunks is not known"
_COMPILED = "what compiled layers recompute is not counted"


def saving_of(applied: AppliedPlan | Planner, peak_bytes: int | None = None, stall_ms: float = 0.0) -> Saving:
    """Return what is known of the memory that a plan saves in a step, on this rank.

    Args:
        peak_bytes: the measured peak of the steps with the plan; ``None``: not measured.
        stall_ms: time of a step in which compute waits for copies.
    """
    if isinstance(applied, Planner):
        if (found := applied.outcome) is not None:
            saved_bytes = max(found.without_peak_bytes - found.peak_bytes, 0)
            known = None if applied.trials else peak_bytes  # a plan file's is of another run
            outside_ms = applied.outside_ms
            both_ms = found.step_ms + outside_ms, found.without_step_ms + outside_ms
            times = *both_ms, stall_ms, found.time_source
            return Saving(saved_bytes, found.source, known or found.peak_bytes, *times)
        if applied.final_plan is None:
            left = f"the training ended in the planner's {applied.phase}, before a plan was found"
            return Saving(None, left, peak_bytes, stall_ms=stall_ms)
        applied = applied.final_plan
    plan, total = applied.plan, applied.stats()
    if plan.tiles or plan.streamed:
        return Saving(None, _TILED, peak_bytes, stall_ms=stall_ms)
    if not plan.rows:
        return Saving(0, "it keeps everything", peak_bytes)
    if not total.forwards:
        return Saving(None, "no step has run", peak_bytes)
    swapped_bytes = total.offloaded_bytes // total.forwards
    if applied.dropped_bytes is None:
        source = f"{COUNTED_SWAPS}; {_COMPILED}" if swapped_bytes else _COMPILED
        return Saving(swapped_bytes or None, source, peak_bytes, stall_ms=stall_ms)
    return Saving(applied.dropped_bytes + swapped_bytes, COUNTED, peak_bytes, stall_ms=stall_ms)


FOLDER = "actswap"
LOGS = "runs"
"""Where transformers' TensorBoard callback puts its logs, in the training's ``output_dir``."""

RUN, PLAN, STEPS, PLANNER = "run.json", "plan.json", "steps.jsonl", "planner.json"
PROFILE, TIMELINE, MEMORY = "profile.json", "timeline.json", "memory.json"
SAVING = "saving.json"

_MAX_BYTES = 256 * 2**20
"""The largest file that is read; it holds about a million lines of steps."""


class RecordedStages(TypedDict):
    """How a pipeline divides the model: for each stage its layers and the most micro-batches in flight."""

    schedule: str
    micro_batches: Count
    bubble_share: float
    layers: tuple[tuple[int, ...], ...]
    in_flight: tuple[float, ...]


class RunDescription(TypedDict, total=False):
    """The content of ``run.json``."""

    started: str
    versions: Mapping[str, str]
    device: str
    device_bytes: Bytes | None
    world_size: Count
    model: str
    family: str
    layers: Count
    parameters: Count
    weight_bytes: Bytes
    planner: str
    config: str | None
    stages: RecordedStages | None


class LoggedStats(TypedDict):
    """The statistics (`SwapStats`) since the line before, as far as they are read back."""

    offloaded_bytes: int
    stall_ms: float
    host_peak_bytes: int
    rejected: Mapping[str, int]


class _LoggedAlways(TypedDict):
    step: int
    step_ms: float
    stats: LoggedStats


class LoggedStep(_LoggedAlways, total=False):
    """A line of ``steps.jsonl``; it also holds all values that the training logged."""

    phase: str
    steps: Count
    peak_bytes: Bytes


class TrialStep(TypedDict):
    """A step of a trial."""

    step_ms: float
    peak_bytes: Bytes
    reserved_peak_bytes: Bytes
    evicted_bytes: Bytes


class RecordedTrial(TypedDict):
    """One of the planner's trials."""

    steps: tuple[TrialStep, ...]
    predicted_peak_bytes: Bytes | None
    predicted_step_ms: float | None
    chosen: bool


class RecordedPlanner(TypedDict):
    """The content of ``planner.json``."""

    budget_bytes: Bytes | None
    trials: tuple[RecordedTrial, ...]


_HOW_TO_RECORD = "A training whose configuration has `log: full`, or that reports to TensorBoard, leaves it."


class ReportError(ActSwapError):
    """A folder has no record of a run or a damaged one, or its report cannot be drawn."""

    subject = "record of the run"


@dataclass(frozen=True)
class RecordedRun:
    """A run as it was recorded: the contents of its files; ``None``: not written.

    Args:
        about: content of ``run.json``.
        planner: ``None``: there was no planner, or its trials did not end.
        stages: the records of a pipeline's stages after the first, by number.
    """

    folder: Path
    about: RunDescription
    plan: MemoryPlan | None
    steps: Sequence[LoggedStep]
    planner: RecordedPlanner | None
    saving: Saving | None
    profile: Profile | None
    timeline: StepTimeline | None
    memory: StepMemory | None
    stages: Mapping[int, RecordedRun] = field(default_factory=dict)


class RunFiles:
    """Writes the files of one run; each is written whole or not at all, except for ``steps.jsonl``.

    A record that cannot be written does not end the training: the first failure is logged as a warning, and
    nothing more is written.

    Args:
        output_dir: files of an earlier run in it are replaced; ``None``: nothing is written.
        stage: index of the pipeline stage whose run it is.
    """

    def __init__(self, output_dir: str | os.PathLike[str] | None, stage: int = 0) -> None:
        self.folder = _of_stage(Path(output_dir or "") / FOLDER, stage)
        self._writes = output_dir is not None
        self._attempt(self._begin)

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (RUN, PLAN, STEPS, PLANNER, PROFILE, TIMELINE, MEMORY, SAVING):
            (self.folder / name).unlink(missing_ok=True)

    def _attempt(self, write: Callable[[], object]) -> None:
        if not self._writes:
            return
        try:
            write()
        except OSError as error:
            self._writes = False
            logger.warning(
                "The record of the run in %s cannot be written (%s), and ends here. The training goes on.",
                self.folder,
                error.strerror,
            )

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a JSON document to the file ``name``."""
        self._write(name, json.dumps(document, indent=1, default=str))

    def write_plan(self, plan: MemoryPlan) -> None:
        """Write the plan that is on the model."""
        self._write(PLAN, plan.to_json())

    def write_profile(self, profile: Profile) -> None:
        """Write the profile that the planner recorded."""
        self._write(PROFILE, profile_to_json(profile))

    def write_measured(self, measured: StepTimeline | StepMemory) -> None:
        """Write a measured step, with each row of its tables on a line of the file."""
        name = TIMELINE if isinstance(measured, StepTimeline) else MEMORY
        lines = [f"{json.dumps(key)}: {_table(value)}" for key, value in asdict(measured).items()]
        self._write(name, "{\n" + ",\n".join(lines) + "\n}")

    def add_step(self, line: Mapping[str, Any]) -> None:
        """Append a line for a step to ``steps.jsonl``."""
        text = json.dumps(line, default=_number_or_text) + "\n"

        def write() -> None:
            with open(self.folder / STEPS, "a", encoding="utf-8") as file:
                file.write(text)

        self._attempt(write)

    def _write(self, name: str, text: str) -> None:
        self._attempt(lambda: write_whole(self.folder / name, text + "\n"))


def _number_or_text(value: Any) -> float | str:
    try:  # a logged tensor or NumPy number
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def read_run(run_dir: str | os.PathLike[str]) -> RecordedRun:
    """Read the record of a run.

    Args:
        run_dir: the ``output_dir`` of the training, or the folder ``actswap`` in it.

    Raises:
        ReportError: there is no record, or it is damaged.
        PlanError: the plan or the profile in it is damaged.
    """
    asked = Path(run_dir)
    places = [place for place in (asked, asked / FOLDER, asked / LOGS / FOLDER) if (place / RUN).is_file()]
    if not places:
        expected = f"{FOLDER}/{RUN}, which a training leaves there"
        raise ReportError([Problem(str(run_dir), expected, "none", _HOW_TO_RECORD)])
    folder = max(places, key=lambda place: (place / RUN).stat().st_mtime)
    plan, profile = folder / PLAN, folder / PROFILE
    about: RunDescription = _read(folder / RUN, RunDescription)
    stages = about.get("stages")
    others = range(1, 0 if stages is None else len(stages["layers"]))
    return RecordedRun(
        folder=folder,
        about=about,
        plan=MemoryPlan.from_json(_text(plan), str(plan)) if plan.is_file() else None,
        steps=_lines(folder / STEPS),
        planner=_read(folder / PLANNER, RecordedPlanner),
        saving=_read(folder / SAVING, Saving),
        profile=profile_from_json(_text(profile), str(profile)) if profile.is_file() else None,
        timeline=_read(folder / TIMELINE, StepTimeline),
        memory=_read(folder / MEMORY, StepMemory),
        stages={n: read_run(at) for n in others if ((at := _of_stage(folder, n)) / RUN).is_file()},
    )


def _of_stage(folder: Path, stage: int) -> Path:
    return folder / f"stage_{stage}" if stage else folder


def _read(path: Path, kind: Any) -> Any:
    """Read a JSON file as a dataclass (its tables as rows) or a ``TypedDict``; ``None``: there is no file."""
    if not path.is_file():
        return None
    document = JsonDocument(_text(path), path.stem, ReportError, str(path))
    found = document.read(kind, rows=(ComputePart, MeasuredCopy, Stall, MemorySample))
    document.finish()
    return found


def _lines(path: Path) -> Sequence[LoggedStep]:
    """Return the lines of a file; a last line without an end is left out, because the run was killed."""
    lines = _text(path).split("\n")[:-1] if path.is_file() else []
    # Read as one document with the same line numbers as the file, for errors.
    document = JsonDocument('{"steps": [' + ",\n".join(lines) + "]}", path.stem, ReportError, str(path))
    document.read(tuple[LoggedStep, ...], "steps")
    document.finish()
    found: list[LoggedStep] = document.content["steps"]
    return found


def _text(path: Path) -> str:
    try:
        return read_text(str(path), _MAX_BYTES, ReportError)
    except OSError as error:
        raise ReportError([Problem(str(path), "a file that can be read", str(error.strerror))]) from None


def _table(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return "[\n" + ",\n".join(json.dumps([*row.values()]) for row in value) + "\n]"
    return json.dumps(value)
