"""A recorded run in numbers: what the report says in tables, and ``--json`` in full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ..errors import Problem
from ..planner.cost.simulate import predict
from ..planner.profile import Prediction
from .run_files import PLAN, PROFILE, LoggedStep, RecordedRun, RecordedTrial, ReportError
from .saving import Saving


@dataclass(frozen=True)
class Compared:
    """One quantity of a step.

    Args:
        name: for people.
        unit: ``ms`` or ``bytes``.
        predicted, measured: ``None``: not known.
    """

    name: str
    unit: str
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
    """One stage of a pipeline.

    Args:
        layers: that it holds.
        in_flight: micro-batches whose forward it has run and whose backward it has not, at most.
        weight_bytes, peak_bytes, step_ms, offloaded_bytes, stall_ms: as of a run, on the rank that was
            recorded; ``None``: not measured.
        waiting_share: of the step that was watched, in which it waited for other stages.
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
    """The numbers of a recorded run that the report shows.

    Args:
        steps: that were logged last.
        step_ms: median of the logged ones in the last stage; ``None``: none was logged.
        peak_bytes: of device memory in use, measured; ``None``: not measured.
        offloaded_bytes: of a step.
        stall_ms: of a step.
        host_bytes: most host memory in use.
        rejected: what was to be swapped and stayed: reason -> bytes of a step.
        compared: predicted beside measured; empty without a planner.
        trials: of the planner.
        budget_bytes: of the planner.
        saving: memory with and without the plan; ``None``: not known.
        stages: of a pipeline; empty without one.
    """

    steps: int
    step_ms: float | None
    peak_bytes: int | None
    offloaded_bytes: int
    stall_ms: float
    host_bytes: int
    rejected: Mapping[str, float]
    compared: Sequence[Compared]
    trials: Sequence[RecordedTrial]
    budget_bytes: int | None
    saving: Saving | None
    stages: Sequence[StageFacts] = ()

    def document(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "compared": [{**asdict(item), "ratio": item.ratio} for item in self.compared]}


def prediction_of(run: RecordedRun) -> Prediction | None:
    """Return the step that was predicted for the plan that was on; ``None``: the planner recorded none.

    Raises:
        ReportError: plan and profile are of different models.
    """
    if run.profile is None or run.plan is None or run.about.get("stages") is not None:
        return None  # of a stage, a profile is of one micro-batch
    if run.plan.num_layers != run.profile.num_layers:
        expected = f"{run.profile.num_layers}, as in {PROFILE}"
        raise ReportError([Problem(f"{PLAN}: num_layers", expected, str(run.plan.num_layers))])
    return predict(run.profile, run.plan)


def run_facts(run: RecordedRun, prediction: Prediction | None) -> RunFacts:
    """Put the numbers of a run together."""
    phase = run.steps[-1].get("phase", "") if run.steps else ""
    last = [line for line in run.steps if line.get("phase", "") == phase]
    settled = last[1:] or last  # a stage begins with what it has to prepare
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
    """Of a step; under ``zero_bubble`` the gradients of weights, made apart, cannot be told from waiting."""
    timeline = stage.timeline
    if timeline is None or not timeline.step_ms or schedule == "zero_bubble":
        return None
    return timeline.waiting_ms / timeline.step_ms


def _of_step(line: LoggedStep) -> dict[str, Any]:
    """The totals since the line before, of one step."""
    count = max(int(line.get("steps", 1)), 1)
    stats = line["stats"]
    return {
        "offloaded_bytes": stats["offloaded_bytes"] / count,
        "stall_ms": stats["stall_ms"] / count,
        "rejected": {reason: size / count for reason, size in stats["rejected"].items()},
    }


def _compared(facts: RunFacts, prediction: Prediction) -> list[Compared]:
    chosen = next((trial["steps"] for trial in facts.trials if trial["chosen"] and trial["steps"]), None)
    peak = facts.peak_bytes if facts.peak_bytes is not None else chosen[-1]["peak_bytes"] if chosen else None
    stall_ms = prediction.forward_stall_ms + prediction.backward_stall_ms
    return [
        Compared("step", "ms", prediction.step_ms, facts.step_ms),
        Compared("peak memory", "bytes", prediction.peak_bytes, peak),
        Compared("swapped", "bytes", prediction.swapped_bytes, facts.offloaded_bytes),
        Compared("waits for copies", "ms", stall_ms, facts.stall_ms),
        Compared("host memory", "bytes", prediction.host_bytes, facts.host_bytes),
        Compared("run again", "ms", prediction.recompute_ms, None),
        Compared("kept", "bytes", prediction.kept_bytes, None),
    ]
