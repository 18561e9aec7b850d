"""Computes the numbers of a recorded run, for the tables of the report and for ``--json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from rich.filesize import pick_unit_and_suffix

from ..errors import Problem
from ..planner.cost.simulate import predict
from ..planner.profile import Prediction
from .run_files import PLAN, PROFILE, LoggedStep, RecordedRun, RecordedTrial, ReportError, Saving


@dataclass(frozen=True)
class ComparedQuantity:
    """One quantity of a step, predicted and measured; ``None``: not known."""

    name: str
    unit: Literal["ms", "bytes"]
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        if self.predicted is None or self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True)
class StageFacts:
    """The numbers of one stage of a pipeline, on the rank of it that was recorded; ``None``: not measured.

    Args:
        in_flight: the most micro-batches whose forward has run and whose backward has not.
        waiting_share: fraction of the measured step in which it waited for other stages.
    """

    layers: tuple[int, ...]
    in_flight: float
    weight_bytes: int | None = None
    peak_bytes: int | None = None
    step_ms: float | None = None
    offloaded_bytes: int | None = None
    stall_ms: float | None = None
    waiting_share: float | None = None


@dataclass(frozen=True)
class RunFacts:
    """The numbers of a recorded run that the report shows; ``None``: not known.

    Args:
        steps: number of the last step that was logged.
        step_ms: median of the logged steps in the planner's last phase.
        peak_bytes: measured peak of device memory in use.
        offloaded_bytes: bytes copied to the host in a step.
        stall_ms: time in a step in which compute waits for copies.
        host_bytes: the most host memory in use.
        rejected: bytes of a step that should have been swapped but stayed on the device, by reason.
        compared: quantities predicted and measured; empty without a prediction.
        stages: stages of the pipeline; empty without one.
    """

    steps: int
    step_ms: float | None
    peak_bytes: int | None
    offloaded_bytes: int
    stall_ms: float
    host_bytes: int
    rejected: Mapping[str, float]
    compared: Sequence[ComparedQuantity]
    trials: Sequence[RecordedTrial]
    budget_bytes: int | None
    saving: Saving | None
    stages: Sequence[StageFacts] = ()

    @property
    def without_steps(self) -> str:
        """A sentence that says that no step was logged; empty if one was."""
        if self.steps:
            return ""
        return (
            "No step is recorded: the training ended before it logged anything (logging_steps), so there is "
            "nothing to show but the plan."
        )

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "compared": [{**asdict(item), "ratio": item.ratio} for item in self.compared]}


def prediction_of(run: RecordedRun) -> Prediction | None:
    """Predict a step under the run's plan from its profile; ``None``: a file is missing, or it is a pipeline.

    Raises:
        ReportError: plan and profile are of different models.
    """
    if run.profile is None or run.plan is None or run.about.get("stages") is not None:
        return None  # on a pipeline stage the profile is of one micro-batch
    if run.plan.num_layers != run.profile.num_layers:
        expected = f"{run.profile.num_layers}, as in {PROFILE}"
        raise ReportError([Problem(f"{PLAN}: num_layers", expected, str(run.plan.num_layers))])
    return predict(run.profile, run.plan)


def run_facts(run: RecordedRun, prediction: Prediction | None) -> RunFacts:
    """Return the numbers of a run, compared with the step that was predicted."""
    phase = run.steps[-1].get("phase", "") if run.steps else ""
    last = [line for line in run.steps if line.get("phase", "") == phase]
    settled = last[1:] or last  # the first line of a phase includes its preparations
    times = [float(line["step_ms"]) for line in settled]
    of_step = [_of_step(line) for line in settled]
    stats = of_step[-1] if of_step else {}
    planner = run.planner
    peaks = [int(line["peak_bytes"]) for line in run.steps if "peak_bytes" in line]
    if run.memory is not None and run.memory.samples:
        peaks = peaks or [max(sample.total_bytes for sample in run.memory.samples)]
    peak_bytes = max(peaks, default=None) if planner is None else peaks[-1] if peaks else None
    step_ms = median(times) if times else None
    stall_ms = median([item["stall_ms"] for item in of_step]) if of_step else 0.0
    facts = RunFacts(
        steps=int(run.steps[-1]["step"]) if run.steps else 0,
        step_ms=step_ms,
        peak_bytes=peak_bytes,
        offloaded_bytes=int(stats.get("offloaded_bytes", 0)),
        stall_ms=stall_ms,
        host_bytes=max((int(line["stats"]["host_peak_bytes"]) for line in run.steps), default=0),
        rejected=stats.get("rejected", {}),
        compared=(),
        trials=() if planner is None else planner["trials"],
        budget_bytes=None if planner is None else planner["budget_bytes"],
        saving=run.saving,
    )
    facts = replace(facts, stages=tuple(_stages(run, facts)))
    return facts if prediction is None else replace(facts, compared=tuple(_compared(facts, prediction)))


def _stages(run: RecordedRun, first: RunFacts) -> Iterator[StageFacts]:
    if (found := run.about.get("stages")) is None:
        return
    for number, (layers, in_flight) in enumerate(zip(found["layers"], found["in_flight"], strict=True)):
        stage = run.stages.get(number) if number else run
        if stage is None:
            yield StageFacts(tuple(layers), in_flight)
            continue
        own = run_facts(stage, None) if number else first
        yield StageFacts(
            tuple(layers),
            in_flight,
            stage.about.get("weight_bytes"),
            own.peak_bytes,
            own.step_ms,
            own.offloaded_bytes,
            own.stall_ms,
            _waiting_share(stage, found["schedule"]),
        )


def _waiting_share(stage: RecordedRun, schedule: str) -> float | None:
    timeline = stage.timeline
    # Under zero_bubble gradients of weights are computed separately, and look like waiting.
    if timeline is None or not timeline.step_ms or schedule == "zero_bubble":
        return None
    return timeline.waiting_ms / timeline.step_ms


def _of_step(line: LoggedStep) -> dict[str, Any]:
    """Return the totals in a line, which are those since the line before, divided by its number of steps."""
    count = max(int(line.get("steps", 1)), 1)
    stats = line["stats"]
    return {
        "offloaded_bytes": stats["offloaded_bytes"] / count,
        "stall_ms": stats["stall_ms"] / count,
        "rejected": {reason: size / count for reason, size in stats["rejected"].items()},
    }


def _compared(facts: RunFacts, prediction: Prediction) -> list[ComparedQuantity]:
    chosen = next((trial["steps"] for trial in facts.trials if trial["chosen"] and trial["steps"]), None)
    peak = facts.peak_bytes if facts.peak_bytes is not None else chosen[-1]["peak_bytes"] if chosen else None
    stall_ms = prediction.forward_stall_ms + prediction.backward_stall_ms
    return [
        ComparedQuantity("step", "ms", prediction.step_ms, facts.step_ms),
        ComparedQuantity("peak memory", "bytes", prediction.peak_bytes, peak),
        ComparedQuantity("swapped", "bytes", prediction.swapped_bytes, facts.offloaded_bytes),
        ComparedQuantity("waits for copies", "ms", stall_ms, facts.stall_ms),
        ComparedQuantity("host memory", "bytes", prediction.host_bytes, facts.host_bytes),
        ComparedQuantity("run again", "ms", prediction.recompute_ms, None),
        ComparedQuantity("kept", "bytes", prediction.kept_bytes, None),
    ]


def byte_unit(most_bytes: float) -> tuple[int, str]:
    """Return the bytes of the unit for values up to ``most_bytes``, and its name."""
    return pick_unit_and_suffix(int(most_bytes), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)


def bytes_text(size_bytes: float) -> str:
    """Return bytes as text with three digits, in the largest unit in which the number is at least 1."""
    unit_bytes, unit = byte_unit(abs(size_bytes))
    return f"{size_bytes:.0f} B" if unit == "B" else f"{_rounded(size_bytes / unit_bytes)} {unit}"


def ms_text(milliseconds: float) -> str:
    """Return a time as text: in ms, from 10 seconds on in s."""
    if abs(milliseconds) >= 10_000:
        return f"{milliseconds / 1e3:,.1f} s"
    return f"{_rounded(milliseconds)} ms" if milliseconds else "0 ms"


def _rounded(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
