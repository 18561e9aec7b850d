"""Measures jobs one after another; results are written at once, and no failure of a job ends the session.

A `Session` goes through its jobs. A job whose result is recorded is not measured again; a job whose estimate
does not fit into the time that is left is left out; every result is in the file before the next job begins.
One of two objects measures:

* `InProcessMeasurer` measures in this process, for the CPU and for tests.
* `Worker` is a process of its own that answers the same requests. A kernel that fails poisons the CUDA
  context of its whole process, and a hang in the driver cannot be interrupted from inside. So the process
  that measures must be one that can be ended from outside, and the process that keeps the results must never
  touch the device. One worker measures many rows, because its start (imports, context, model, link) takes 15
  to 20 s, as long as a row. A new one starts when a row failed and left memory behind, hung, or killed it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.child import ReportingProcess, reports_to
from benchmarks.measure import Bench, empty_result
from benchmarks.methods import options_of
from benchmarks.records import (
    KEY_FIELDS,
    Line,
    Record,
    Records,
    Result,
    device_named,
    fill_ratios,
    key_of,
    origin,
)
from benchmarks.rows import EAGER, ROWS, Row
from benchmarks.trainings import OPTIMIZER_STATES, OUT_OF_MEMORY, training_answer
from benchmarks.workloads import Workload, layer_saved_bytes, step_flop

logger = logging.getLogger(__name__)

COMPILE_S = 25.0
"""Seconds to compile one layer, forward and backward, with empty caches."""
COMPILE_AGAIN_S = 6.0
"""Seconds to trace it again, with the kernels in the cache."""
PIN_S_PER_GIB = 0.8
PLANNING_S = 10.0
"""Seconds of the planner's searches, one for each plan that it tries."""
PLANNING_STEPS = 11
"""Steps of the planner's warm-up and search."""
PLANNED_COMPILATIONS = 4
"""Compilations by a planner of compiled layers: each plan that it tries compiles its own layers. It tries up
to 8 plans, 4 if all fit the budget."""
PLANNED_COMPILE_S = 20.0

LEAST_LIMIT_S = 60.0
"""Added to three times a row's estimate as its time limit: a machine's first compilation takes longer."""
_LIMIT_OVER_ESTIMATE = 3.0
_SECONDS_TO_START = 90.0
"""Time in which a worker must start, which is imports only."""
_SECONDS_FOR_ORIGIN = 90.0
"""Time limit of a worker's first request, which makes the device's context and measures the link."""

Request = dict[str, Any]
Ask = Callable[[Request, float | None], Line]
"""Function of a request and a limit in seconds that measures and returns the fields of a record.

Raises:
    MeasureError: it took too long, or its process died.
"""


class MeasureError(Exception):
    """A request that got no answer.

    Args:
        status: ``timed out`` or ``failed``.
        reason: the reason in words.
        told: the end of the process's output.
    """

    def __init__(self, status: str, reason: str, told: str) -> None:
        super().__init__(reason)
        self.status, self.reason, self.told = status, reason, told


class Job(Protocol):
    """One row to be measured."""

    @property
    def title(self) -> str:
        """Workload and row, for the log."""

    def blank(self) -> Record:
        """Return the job's record with nothing measured yet."""

    def estimate_s(self, session: Session) -> float:
        """Return about how many seconds it takes."""

    def request(self, records: Records) -> Request | str:
        """Return the request, which may depend on earlier records, or why the job cannot be measured."""

    def is_same(self, line: Line) -> bool:
        """Whether a recorded line was measured with the settings that the job has now."""


@dataclass(frozen=True)
class FrontierJob:
    """One row of the frontier on one workload.

    Args:
        workload, row: the workload, and the method that is put on it.
        shorter: in a search for the longest sequence, the job at half the length, which must have fitted;
            ``None``: this is the first length.
        longest: whether this is such a search; then nothing is compared with eager.
        compiling: whether rows that compile are measured.
    """

    workload: Workload
    row: Row
    shorter: FrontierJob | None = None
    longest: bool = False
    compiling: bool = True

    @property
    def title(self) -> str:
        length = f" at {self.workload.tokens:,} tokens" if self.longest else ""
        return f"{self.workload.name} {self.row.name}{length}"

    def blank(self) -> Result:
        result = empty_result(self.row, self.workload)
        result.longest = self.longest
        return result

    def estimate_s(self, session: Session) -> float:
        """Return the estimated seconds of steps, compilations, pinning and planning on this machine."""
        workload, row = self.workload, self.row
        # The step that compares gradients runs slower kernels, and eager runs it twice.
        steps = workload.warmup_steps + workload.steps + (1.0 if self.longest else 1.5)
        if row.budget is not None:
            steps += PLANNING_STEPS
        seconds = steps * self._step_ms(session) / 1e3
        if row.compiles:
            opened = (workload, row.compile_group) in session.compiled
            seconds += COMPILE_AGAIN_S if opened else COMPILE_S
        if row.budget is not None:
            seconds += PLANNING_S + PLANNED_COMPILATIONS * PLANNED_COMPILE_S * row.compiles
        saved_gib = workload.layers * layer_saved_bytes(workload) / 2**30
        return seconds + PIN_S_PER_GIB * row.pinned_share * saved_gib

    def _step_ms(self, session: Session) -> float:
        shorter = None if self.shorter is None else session.find(self.shorter)
        if self.shorter is not None and shorter is not None and shorter["ms"] is not None:
            return float(shorter["ms"]) * step_flop(self.workload) / step_flop(self.shorter.workload)
        return self.workload.expected_ms * self.row.relative_time * session.slowness(self.workload)

    def request(self, records: Records) -> Request | str:
        if self.row.compiles and not self.compiling:
            return "compiling is slow on the CPU; ask for it with --compile"
        if self.shorter is not None and not _fitted(self.shorter, records):
            return f"{self.shorter.workload.tokens:,} tokens were too many, or were not measured"
        config = None
        if self.row.budget is not None:
            beside = [Result(**line) for line in records if line["kind"] == "frontier" and self._beside(line)]
            config = options_of(self.row.budget, self.row.compiles, beside)
            if isinstance(config, str):
                return config
        return {
            "kind": "frontier",
            "workload": asdict(self.workload),
            "row": self.row.name,
            "config": config,
            "compared": not self.longest,
        }

    def is_same(self, line: Line) -> bool:
        if self.row.budget is not None:
            return True
        as_recorded = json.loads(json.dumps(self.row.config_for(self.workload.layers)))
        return bool(as_recorded == line["config"])

    def _beside(self, line: Line) -> bool:
        blank = asdict(self.blank()) | {"method": line["method"], "device": line["device"]}
        return key_of(blank) == key_of(line)


def _fitted(job: FrontierJob, records: Records) -> bool:
    return any(
        line["status"] == "measured"
        for line in records
        if key_of(line) == key_of(asdict(job.blank()) | {"device": line["device"]})
    )


def frontier_jobs(
    workloads: Sequence[Workload], rows: Sequence[Row], compiling: bool = True
) -> list[FrontierJob]:
    """Return the jobs of rows on workloads, a workload at a time, the rows in the order given."""
    return [FrontierJob(workload, row, compiling=compiling) for workload in workloads for row in rows]


def longest_jobs(
    workload: Workload, rows: Sequence[Row], limit_tokens: int, first_tokens: int | None = None
) -> list[FrontierJob]:
    """Return the jobs of a search for the longest sequence: all rows at one length, then at twice that.

    Args:
        workload: the workload; a single step is timed.
        rows: the methods whose longest sequence is searched.
        limit_tokens: the largest length.
        first_tokens: the first length; ``None``: the workload's.
    """
    jobs: list[FrontierJob] = []
    shorter: dict[str, FrontierJob] = {}
    tokens = first_tokens or workload.tokens
    while not jobs or tokens <= limit_tokens:
        # ``auto`` needs three steps to measure windows for the next ones, which would take minutes here.
        at_length = replace(workload, tokens=tokens, warmup_steps=3 if tokens <= 2**16 else 1, steps=1)
        expected_ms = workload.expected_ms * step_flop(at_length) / step_flop(workload)
        at_length = replace(at_length, expected_ms=expected_ms)
        for row in rows:
            shorter[row.name] = FrontierJob(at_length, row, shorter.get(row.name), longest=True)
            jobs.append(shorter[row.name])
        tokens *= 2
    return jobs


class Session:
    """Measures jobs one after another and records the results.

    Args:
        records: the results, which are read and added to.
        ask: measures a request.
        about: fields of `origin` that are known before the first request: at least the device's name and the
            commit (``None``: unknown).
        again: takes a row's name, and says whether to measure it again if it is recorded.
        clock: returns increasing seconds.

    Attributes:
        compiled: workloads and compile groups whose graphs this session has compiled.
    """

    def __init__(
        self,
        records: Records,
        ask: Ask,
        about: Mapping[str, Any],
        again: Callable[[str], bool] = lambda _name: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.records, self.device, self._commit = records, str(about["device"]), about["commit"]
        self._ask, self._again, self.clock = ask, again, clock
        self.run_name = f"{datetime.now():%Y-%m-%dT%H:%M:%S.%f}"
        self.compiled: set[tuple[Workload, str]] = set()
        self._origin = dict(about)
        self._origin_is_whole = False

    def slowness(self, workload: Workload) -> float:
        """Return the measured time of an eager step on this device over the expected time; 1 if unknown."""
        eager = FrontierJob(workload, EAGER)
        line = self.find(eager)
        known = line is not None and line["ms"] is not None
        return float(line["ms"]) / workload.expected_ms if line is not None and known else 1.0

    def find(self, job: Job) -> Line | None:
        """Return the recorded line of a job on this device, or ``None``."""
        return self.records.find(key_of(asdict(job.blank()) | {"device": self.device}))

    def is_settled(self, job: Job) -> bool:
        """Whether a job need not be measured: it was, with the same settings, or failed at the same commit.

        A row that another commit measured stays: device time is scarce, and the line has its commit. A row
        that failed at another commit, or at an unknown one, is tried again.
        """
        line = self.find(job)
        return line is not None and job.is_same(line) and self.is_settled_line(line)

    def is_settled_line(self, line: Line) -> bool:
        """Whether the thing that a recorded line is about need not be measured again."""
        if self._again(line["method"]) and line["run"] != self.run_name:
            return False
        if line["status"] in ("failed", "timed out"):
            return self._commit is not None and line["commit"] == self._commit
        return line["status"] not in ("left out", "skipped")

    def run(
        self,
        jobs: Sequence[Job],
        say: Callable[[str], None],
        deadline_s: float | None = None,
        slack_s: float = 0.0,
    ) -> list[Record]:
        """Measure all jobs that are not settled, in order; return their records.

        Args:
            jobs: the jobs; one may depend on those before it.
            say: called with a line for each job.
            deadline_s: end of the time, on the session's clock; a job whose estimate exceeds it is left out.
            slack_s: seconds after the deadline at which a job that still runs is ended.
        """
        done = []
        for job in jobs:
            if self.is_settled(job):
                say(f"{job.title}: is in the results")
                continue
            left_s = None if deadline_s is None else deadline_s - self.clock()
            record = self._measured(job, left_s, slack_s)
            self.record(record)
            room = "" if left_s is None else f"; {left_s:.0f} s were left before it"
            say(f"{job.title}: {in_words(record)}{room}")
            done.append(record)
        return done

    def record(self, record: Record) -> None:
        """Add a record, with the device, versions and run that measured it."""
        now = f"{datetime.now():%Y-%m-%dT%H:%M:%S}"
        for name, value in (*self._origin.items(), ("run", self.run_name), ("measured_at", now)):
            setattr(record, name, value)
        if isinstance(record, Result):
            blank = asdict(record) | {"method": EAGER.name}
            eager = self.records.find(key_of(blank)) if record.method != EAGER.name else asdict(record)
            fill_ratios(record, None if eager is None else Result(**eager))
        self.records.put(record)

    def learn_origin(self) -> Line:
        """Return the fields that are the same in every record; the first time, what measures is asked.

        Raises:
            MeasureError: it gave no answer, or failed.
        """
        if not self._origin_is_whole:
            answer = self._ask({"kind": "origin"}, _SECONDS_FOR_ORIGIN)
            if answer.get("status") == "failed":
                raise MeasureError("failed", answer["reason"], answer["traceback"])
            self._origin |= answer | {"device": self.device}
            self._origin_is_whole = True
        return self._origin

    def forget_origin(self) -> None:
        """Let `learn_origin` ask again, after a setting of the device has changed."""
        self._origin_is_whole = False

    def _measured(self, job: Job, left_s: float | None, slack_s: float) -> Record:
        record, estimate_s = job.blank(), job.estimate_s(self)
        request = job.request(self.records)
        if isinstance(request, str):
            record.status, record.reason = "skipped", request
            return record
        if left_s is not None and estimate_s > left_s:
            record.status = "left out"
            record.reason = f"takes about {estimate_s:.0f} s, and {max(left_s, 0):.0f} s were left"
            return record
        own_s = LEAST_LIMIT_S + _LIMIT_OVER_ESTIMATE * estimate_s
        limit_s = own_s if left_s is None else min(own_s, left_s + slack_s)
        started = self.clock()
        try:
            self.learn_origin()
            answer = self._ask(request, limit_s)
            record = type(record)(**_known_fields(record, answer))
        except MeasureError as error:
            cut = error.status == "timed out" and limit_s < own_s
            record.status = "left out" if cut else error.status  # type: ignore[assignment]
            record.reason = "the time of the run was over" if cut else error.reason
            record.traceback = error.told
        record.wall_s = self.clock() - started
        if isinstance(job, FrontierJob) and job.row.compiles and record.status == "measured":
            self.compiled.add((job.workload, job.row.compile_group))
        return record


def _known_fields(record: Record, answer: Line) -> Line:
    """Return a record's fields, updated by those of an answer; the fields of its key stay as they are."""
    names = {item.name for item in fields(record)} - set(KEY_FIELDS)
    return asdict(record) | {name: value for name, value in answer.items() if name in names}


def in_words(record: Record) -> str:
    """Return a row's status and main numbers on one line."""
    parts: list[str] = [record.status]
    if isinstance(record, Result) and record.ms is not None:
        parts.append(f"{record.ms:.1f} ms")
        if record.activation_bytes is not None:
            parts.append(f"{record.activation_bytes / 2**30:.2f} GiB of activations")
        if record.exact is not None:
            parts.append("exact" if record.exact else "NOT EXACT")
    if record.reason:
        parts.append(record.reason)
    if record.wall_s is not None:
        parts.append(f"{record.wall_s:.1f} s")
    return ", ".join(parts)


class InProcessMeasurer:
    """Measures in this process.

    Args:
        device: the device to measure on.
        rows: rows of the frontier, which requests name.
    """

    def __init__(self, device: torch.device, rows: Sequence[Row] = ROWS) -> None:
        self._device, self.bench = device, Bench(device, rows)
        self._kinds: dict[str, Callable[[Request], Line]] = {
            "origin": lambda _request: origin(self._device),
            "frontier": self._frontier,
            OUT_OF_MEMORY: self._training,
            OPTIMIZER_STATES: self._training,
        }

    def __call__(self, request: Request, _limit_s: float | None = None) -> Line:
        """Measure a request, as `Ask` says; the limit is ignored, as nothing could enforce it."""
        return self._kinds[request["kind"]](request)

    def _frontier(self, request: Request) -> Line:
        workload = Workload(**request["workload"])
        result = self.bench.measure(workload, request["row"], request["config"], request["compared"])
        return asdict(result)

    def _training(self, request: Request) -> Line:
        self.bench.clear()
        return training_answer(request, self._device)


def serve(device: str, rows: Sequence[Row] = ROWS) -> None:
    """Answer requests, one line of JSON each, from the standard input to the pipe of a `ReportingProcess`.

    The first line is ``ready``. If this process cannot be trusted after a failure, its last answer has
    ``ends`` set.
    """
    reports = reports_to()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    answers = InProcessMeasurer(device_named(device), rows)
    reports("ready")
    for line in sys.stdin:
        try:
            answer = answers(json.loads(line))
        except Exception as error:
            logger.exception("a request failed")
            answer = {
                "status": "failed",
                "reason": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
        ends = answer.get("status", "measured") != "measured" and not answers.bench.is_sound()
        reports(json.dumps({**answer, "ends": ends}))
        if ends:
            break


class Worker:
    """Measures in a process of its own, which is started at the first request and again after it ended.

    Args:
        command: command that runs `serve`.
        stderr: file to which its output is appended.
        environment: environment variables, added to those of this process.
    """

    def __init__(self, command: Sequence[str], stderr: Path, environment: Mapping[str, str]) -> None:
        self._starts = lambda: ReportingProcess(command, stderr, environment)
        self._child: ReportingProcess | None = None

    def __call__(self, request: Request, limit_s: float | None = None) -> Line:
        """Measure a request, as `Ask` says; the limit does not include the start of the process."""
        if self._child is None:
            self._child = self._starts()
            self._next_line(_SECONDS_TO_START, "it did not start in")
        self._child.send(json.dumps(request))
        answer: Line = json.loads(self._next_line(limit_s, "no answer after"))
        if answer.pop("ends"):
            self.stop()
        return answer

    def stop(self, says: bool = False) -> tuple[int | None, str]:
        """End the process, if there is one; return its exit status and the end of its output."""
        child, self._child = self._child, None
        return (None, "") if child is None else child.stop(says)

    def _next_line(self, limit_s: float | None, what: str) -> str:
        assert self._child is not None
        try:
            line = self._child.next_line(limit_s)
        except queue.Empty:
            _, told = self.stop(says=True)
            raise MeasureError("timed out", f"{what} {limit_s:.0f} s", told) from None
        if line is None:
            status, told = self.stop()
            raise MeasureError("failed", f"its process ended with status {status}", told)
        return line
