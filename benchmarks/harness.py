"""Measures jobs one after another: what is recorded stays, results are written at once, no failure ends it.

A `Session` goes through its jobs. What the records hold already is not measured again; what would not fit
into the time that is left, by its estimate, is left out; every result is in the file before the next job
begins. It asks somebody to measure:

* `Answers` measures in this process, for the CPU and for tests.
* `Worker` is a process of its own that answers the same requests. A kernel that fails poisons the CUDA
  context of its whole process, and a hang in the driver cannot be interrupted from inside. So what measures
  must be something that can be ended from outside, and what keeps the results must never touch the device.
  One process for many rows, because starting one (imports, context, model, link) takes 15 to 20 s, as long as
  a row; a new one as soon as a row failed and left something behind, hung, or took its process along.
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

from benchmarks.child import Child, reports_to
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
from benchmarks.workloads import Workload, layer_saved_bytes

logger = logging.getLogger(__name__)

COMPILE_S = 25.0
"""One layer, forward and backward, cold."""
COMPILE_AGAIN_S = 6.0
"""Traced again, the kernels found in the cache."""
PIN_S_PER_GIB = 0.8
PLANNING_S = 10.0
"""The planner's searches on paper, one for each plan that it tries."""
PLANNING_STEPS = 11
"""Warm-up and search."""
PLANNED_COMPILATIONS = 4
"""Of plans for compiled layers: each that is tried compiles layers of its own. Up to 8 are tried, 4 where all
fit the budget."""
PLANNED_COMPILE_S = 20.0

LEAST_LIMIT_S = 60.0
"""Of a row, beside three times its estimate: the first compilation on a machine takes longer than others."""
_LIMIT_OVER_ESTIMATE = 3.0
_SECONDS_TO_START = 90.0
"""Of a worker: imports, and nothing else yet."""
_SECONDS_FOR_ORIGIN = 90.0
"""The context, and the link."""

Request = dict[str, Any]
Ask = Callable[[Request, float | None], Line]
"""Measures what is asked for within so many seconds; returns the fields of a record.

Raises:
    Unanswered: it took too long, or took its process along.
"""


class Unanswered(Exception):
    """A request that got no answer.

    Args:
        status: ``timed out`` or ``failed``.
        reason: in words.
        told: the end of what the process wrote.
    """

    def __init__(self, status: str, reason: str, told: str) -> None:
        super().__init__(reason)
        self.status, self.reason, self.told = status, reason, told


class Job(Protocol):
    """One row to be measured."""

    @property
    def title(self) -> str:
        """For people: workload and row."""

    def blank(self) -> Record:
        """Return its record with nothing measured."""

    def estimate_s(self, session: Session) -> float:
        """Return about how long it takes."""

    def request(self, records: Records) -> Request | str:
        """Return what to ask for, given what was recorded; or why it cannot be asked."""

    def is_same(self, line: Line) -> bool:
        """Whether a recorded line is of what would be measured now."""


@dataclass(frozen=True)
class FrontierJob:
    """One row of the frontier on one workload.

    Args:
        workload, row: what is run.
        shorter: of a search for the longest sequence, the same at half the length, which must have fitted;
            ``None`` at its first length.
        longest: of such a search: nothing is compared with eager.
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
        """Of steps, compilations, pinning and planning, by the speed of the machine as far as it is known."""
        workload, row = self.workload, self.row
        # The step that compares gradients runs slower kernels, twice for eager's own bits.
        steps = workload.warmup_steps + workload.steps + 1.5
        if row.budget is not None:
            steps += PLANNING_STEPS
        seconds = steps * workload.expected_ms / 1e3 * row.relative_time * session.slowness(workload)
        if row.compiles:
            opened = (workload, row.compile_group) in session.compiled
            seconds += COMPILE_AGAIN_S if opened else COMPILE_S
        if row.budget is not None:
            seconds += PLANNING_S + PLANNED_COMPILATIONS * PLANNED_COMPILE_S * row.compiles
        saved_gib = workload.layers * layer_saved_bytes(workload) / 2**30
        return seconds + PIN_S_PER_GIB * row.pinned_share * saved_gib

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


def longest_jobs(workload: Workload, rows: Sequence[Row], limit_tokens: int) -> list[FrontierJob]:
    """Return the jobs of a search for the longest sequence: each row at lengths that double.

    Args:
        workload: its length is the first; a single step is timed.
        rows: what to search for.
        limit_tokens: the search ends there.
    """
    jobs: list[FrontierJob] = []
    for row in rows:
        shorter, tokens = None, workload.tokens
        while shorter is None or tokens <= limit_tokens:
            # ``auto`` measures in the first steps what it does in the next.
            at_length = replace(workload, tokens=tokens, warmup_steps=3, steps=1)
            growth = tokens / workload.tokens
            at_length = replace(at_length, expected_ms=workload.expected_ms * growth * (1 + growth) / 2)
            jobs.append(shorter := FrontierJob(at_length, row, shorter, longest=True))
            tokens *= 2
    return jobs


class Session:
    """Goes through jobs; see the module's text.

    Args:
        records: where rows are looked up and put.
        ask: measures.
        about: what `origin` says, as far as it is known before anybody measures: the device's name and the
            commit (``None``: nobody knows) at least.
        again: whether a row that is recorded is measured again, by its name.
        clock: seconds, increasing.

    Attributes:
        compiled: workloads and compile groups whose graphs were compiled on this machine, by this session.
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
        """How many times as long as expected an eager step took on this device; 1 where nobody knows."""
        eager = FrontierJob(workload, EAGER)
        line = self.find(eager)
        known = line is not None and line["ms"] is not None
        return float(line["ms"]) / workload.expected_ms if line is not None and known else 1.0

    def find(self, job: Job) -> Line | None:
        """Return the recorded line of a job on this device, or ``None``."""
        return self.records.find(key_of(asdict(job.blank()) | {"device": self.device}))

    def is_settled(self, job: Job) -> bool:
        """Whether a job need not be measured: it was, as it is now; or failed, and nothing has changed.

        A row that another commit measured stays: device time is scarce, and the line says which commit it
        was. What failed at another commit, or at one that nobody knows, is tried again.
        """
        line = self.find(job)
        return line is not None and job.is_same(line) and self.is_settled_line(line)

    def is_settled_line(self, line: Line) -> bool:
        """Whether what a recorded line is of need not be measured again."""
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
        """Measure all jobs that are not settled, in order; return what became of them.

        Args:
            jobs: may depend on those before them.
            say: is told a line for each.
            deadline_s: of the clock: what takes longer by its estimate is left out.
            slack_s: what runs that much after the deadline is ended.
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
        """Put a record, with where and by whom it was measured."""
        for name, value in (*self._origin.items(), ("run", self.run_name)):
            setattr(record, name, value)
        if isinstance(record, Result):
            blank = asdict(record) | {"method": EAGER.name}
            eager = self.records.find(key_of(blank)) if record.method != EAGER.name else asdict(record)
            fill_ratios(record, None if eager is None else Result(**eager))
        self.records.put(record)

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
            if not self._origin_is_whole:
                self._origin |= self._ask({"kind": "origin"}, _SECONDS_FOR_ORIGIN) | {"device": self.device}
                self._origin_is_whole = True
            answer = self._ask(request, limit_s)
            record = type(record)(**_known_fields(record, answer))
        except Unanswered as error:
            cut = error.status == "timed out" and limit_s < own_s
            record.status = "left out" if cut else error.status  # type: ignore[assignment]
            record.reason = "the time of the run was over" if cut else error.reason
            record.traceback = error.told
        record.wall_s = self.clock() - started
        if isinstance(job, FrontierJob) and job.row.compiles and record.status == "measured":
            self.compiled.add((job.workload, job.row.compile_group))
        return record


def _known_fields(record: Record, answer: Line) -> Line:
    """What was measured over what was known before: an answer need not say everything, nor of what it is."""
    names = {item.name for item in fields(record)} - set(KEY_FIELDS)
    return asdict(record) | {name: value for name, value in answer.items() if name in names}


def in_words(record: Record) -> str:
    """Return what became of a row, on one line."""
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


class Answers:
    """Measures in this process.

    Args:
        device: where.
        rows: of the frontier, to choose from.
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
        """See `Ask`; there is nobody who could end it."""
        return self._kinds[request["kind"]](request)

    def _frontier(self, request: Request) -> Line:
        workload = Workload(**request["workload"])
        result = self.bench.measure(workload, request["row"], request["config"], request["compared"])
        return asdict(result)

    def _training(self, request: Request) -> Line:
        self.bench.clear()
        return training_answer(request, self._device)


def serve(device: str, rows: Sequence[Row] = ROWS) -> None:
    """Answer requests, one line of JSON each, from the standard input to the pipe of a `Child`.

    The first line says that it is ready. The last answer of a process that cannot be trusted any more says so
    (``ends``).
    """
    reports = reports_to()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    answers = Answers(device_named(device), rows)
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
    """A process that measures: started when it is first asked, and anew after it ended.

    Args:
        command: runs `serve`.
        stderr: the file that what it writes is appended to.
        environment: of the process, beside ours.
    """

    def __init__(self, command: Sequence[str], stderr: Path, environment: Mapping[str, str]) -> None:
        self._starts = lambda: Child(command, stderr, environment)
        self._child: Child | None = None

    def __call__(self, request: Request, limit_s: float | None = None) -> Line:
        """See `Ask`; the limit is that of the request, the start of the process apart."""
        if self._child is None:
            self._child = self._starts()
            self._next_line(_SECONDS_TO_START, "it did not start in")
        self._child.send(json.dumps(request))
        answer: Line = json.loads(self._next_line(limit_s, "no answer after"))
        if answer.pop("ends"):
            self.stop()
        return answer

    def stop(self, says: bool = False) -> tuple[int | None, str]:
        """End the process, if there is one; see `Child.stop`."""
        child, self._child = self._child, None
        return (None, "") if child is None else child.stop(says)

    def _next_line(self, limit_s: float | None, what: str) -> str:
        assert self._child is not None
        try:
            line = self._child.next_line(limit_s)
        except queue.Empty:
            _, told = self.stop(says=True)
            raise Unanswered("timed out", f"{what} {limit_s:.0f} s", told) from None
        if line is None:
            status, told = self.stop()
            raise Unanswered("failed", f"its process ended with status {status}", told)
        return line
