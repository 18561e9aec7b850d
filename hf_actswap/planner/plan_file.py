"""Reads and writes ``plan_file``: the plan that was found, what was measured, and the run it was found for.

The document is that of `MemoryPlan.to_json`, so `apply` takes it and a person may edit it, with the sections
``made_for`` and ``measured`` added, and the plan's ``fingerprint``. A run that agrees with ``made_for`` uses
the plan and searches nothing; so does a run whose file lacks that section, as ``hf-actswap plan --save``
writes it, if its model is that of the fingerprint. The planner overwrites only files that it wrote for the
same model on the same devices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from ..config.documents import Bytes, Count, JsonDocument, Ms, read_text, write_whole
from ..config.hub import MAX_PLAN_BYTES
from ..errors import PlanError, Problem
from ..plan.actions import MemoryPlan, fingerprint_of
from ..version import __version__
from .profile import Prediction


@dataclass(frozen=True)
class MeasuredStep:
    """What was measured of one step, on one rank or as the worst of all ranks.

    Args:
        step_ms: time from the first forward to the end of the step.
        reserved_peak_bytes: the most that the allocator held.
        evicted_bytes: bytes that the guard moved because memory ran out.
        offloaded_bytes: bytes that the plan swapped.
        missing_bytes: the most that was missing at one time: what was wanted, and what had been moved.
        work_ms: the step's time without that for which compute waited for copies.
        micro_batches: forwards of the step.
    """

    step_ms: float
    peak_bytes: int
    reserved_peak_bytes: int
    evicted_bytes: int
    offloaded_bytes: int
    missing_bytes: int = 0
    work_ms: float = 0.0
    micro_batches: int = 1

    @staticmethod
    def worst(steps: Sequence[MeasuredStep]) -> MeasuredStep:
        """Return the largest value of each field over the steps of all ranks."""
        return MeasuredStep(*(max(values) for values in zip(*map(astuple, steps), strict=True)))


@dataclass
class Trial:
    """A plan that is tried on the machine; its first step also prepares: kernels, page-locked memory."""

    plan: MemoryPlan
    prediction: Prediction
    steps: list[MeasuredStep]

    @property
    def step_ms(self) -> float:
        """The time of the fastest step."""
        return min((step.step_ms for step in self.steps), default=float("inf"))

    @property
    def reserved_peak_bytes(self) -> int:
        return max((step.reserved_peak_bytes for step in self.steps), default=0)

    def fits(self, budget_bytes: int) -> bool:
        """Return whether every step kept within the budget, and nothing had to be evicted."""
        return all(step.reserved_peak_bytes <= budget_bytes and not step.evicted_bytes for step in self.steps)


@dataclass(frozen=True)
class Outcome:
    """What a step takes with the plan that was found, and without any.

    Args:
        peak_bytes, step_ms: device memory in use at the peak and time of a step, with the plan.
        without_peak_bytes, without_step_ms: the same if everything is kept.
        source, time_source: where the peak and the time without a plan come from, in words.
    """

    peak_bytes: int
    step_ms: float
    without_peak_bytes: int
    without_step_ms: float
    source: str
    time_source: str = "predicted"


def best_trial(trials: Sequence[Trial], budget_bytes: int) -> Trial | None:
    """Return the fastest trial that fits, else the one that used least memory; ``None``: none has run.

    Ties go to the earlier trial.
    """
    tried = [trial for trial in trials if trial.steps]
    fitting = [trial for trial in tried if trial.fits(budget_bytes)]
    if fitting:
        return min(fitting, key=lambda trial: trial.step_ms)
    return min(
        tried, key=lambda trial: (trial.steps[-1].evicted_bytes, trial.reserved_peak_bytes), default=None
    )


@dataclass(frozen=True)
class MadeFor:
    """The run that a plan was found for. Another run must agree in all but the versions and the shape.

    Args:
        model: ``model_type``, layers and parameters.
        batch_shape: shape of the input ids of one micro-batch. The plan serves smaller batches too; when a
            larger one comes, the planner plans anew.
        dtype: type of the parameters.
        requested: the ``memory`` section without the file's name, and the fates written by hand.
    """

    model: str
    batch_shape: tuple[Count, ...]
    dtype: str
    device: str
    world_size: Count
    requested: str
    versions: str = f"torch {torch.__version__}, hf_actswap {__version__}"

    def differences(self, other: MadeFor) -> dict[str, str]:
        """Return a description of each field that must agree and does not, by the field's name."""
        return {
            item.name: f"{item.name} {getattr(self, item.name)!r} and not {getattr(other, item.name)!r}"
            for item in fields(self)
            if item.name not in ("versions", "batch_shape")
            and getattr(self, item.name) != getattr(other, item.name)
        }


class PlanNumbers(TypedDict, total=False):
    """Measured or predicted numbers of a plan: those of the file that are read back.

    With ``states_resident_bytes`` the optimizer's states wait on the host (`OptimizerStates.resident_bytes`).
    """

    budget_bytes: Bytes | None
    peak_bytes: Bytes
    step_ms: Ms
    without_plan_peak_bytes: Bytes
    without_plan_step_ms: Ms
    states_resident_bytes: Bytes | None


@dataclass(frozen=True)
class FilePlan:
    """What a plan file holds.

    Args:
        made_for: the run that it was found for; ``None`` where the file does not say.
        measured: numbers that the planner measured.
        predicted: numbers that ``hf-actswap plan`` predicted.
        path: the file that it was read from, for display.
    """

    plan: MemoryPlan
    made_for: MadeFor | None = None
    measured: PlanNumbers | None = None
    predicted: PlanNumbers | None = None
    path: str = ""

    @property
    def numbers(self) -> PlanNumbers:
        """The measured numbers, else the predicted ones; may be empty."""
        return self.measured or self.predicted or {}

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the ids that the plan was made for; empty where the file does not say."""
        if self.made_for is not None:
            return self.made_for.batch_shape
        return () if self.plan.fingerprint is None else self.plan.fingerprint.batch_shape

    @property
    def budget_bytes(self) -> int | None:
        """The budget that the plan was found for; ``None`` where the file does not say."""
        return self.numbers.get("budget_bytes") or None

    @property
    def outcome(self) -> Outcome | None:
        """Time and peak with and without the plan, from the file; ``None``: the file lacks some of them."""
        found, said = self.numbers, "as the plan file says"
        try:
            with_plan = found["peak_bytes"], found["step_ms"]
            without = found["without_plan_peak_bytes"], found["without_plan_step_ms"]
        except KeyError:
            return None
        return Outcome(*with_plan, *without, said, said)


def write_plan(
    path: str | os.PathLike[str],
    plan: MemoryPlan,
    model: nn.Module,
    made_for: MadeFor,
    measured: Mapping[str, Any],
) -> None:
    """Write a plan, whole or not at all; missing folders are made. `OSError`: the file cannot be written.

    Args:
        model: the model, without wrappers.
        measured: numbers about the plan: those of `PlanNumbers`, and others for people to read.
    """
    whole = replace(plan, fingerprint=fingerprint_of(model, made_for.batch_shape))
    document: dict[str, Any] = json.loads(whole.to_json())
    document["made_for"] = asdict(made_for)
    document["measured"] = dict(measured)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(document, indent=1) + "\n")


def read_plan(path: str | os.PathLike[str]) -> FilePlan:
    """Read a plan back.

    Raises:
        PlanError: the file cannot be read, holds no plan, or a malformed one.
    """
    name = os.fsdecode(path)
    try:
        text = read_text(name, MAX_PLAN_BYTES, PlanError)
    except OSError as error:
        raise PlanError([Problem("memory.plan_file", "a file", f"'{name}': {error.strerror}")]) from None
    document = JsonDocument(text, "plan", PlanError, name)
    sections = document.fields(FilePlan, without=["plan", "path"])
    return FilePlan(MemoryPlan.from_document(document), **sections, path=name)
