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

Suites of tests run under pytest in processes of their own, and each test is a row of the results, recorded
when it ends (`tests/row_reports.py` reports it). So if a run is ended, hangs or dies, only the tests that ran
at that moment are not recorded. A test that exceeds its time limit is ended with its process, and the others
continue in a new one. A test whose process died runs once more, in case another test was the reason.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.measure import Bench, empty_result
from benchmarks.methods import options_of
from benchmarks.records import (
    KEY_FIELDS,
    REPOSITORY,
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
from benchmarks.trainings import CASES, training_answer
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
            **dict.fromkeys((case.kind for case in CASES), self._training),
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


REPORTS_VARIABLE = "HF_ACTSWAP_REPORTS"
"""Environment variable with the file descriptor of the pipe to which a child's process reports."""
_TOLD_BYTES = 20_000
"""The most bytes that `ReportingProcess.stop` returns of a process's output: the end of it."""
_SECONDS_TO_END = 3.0
"""Time that a process gets to end by itself or to write the stacks of its threads."""


class ReportingProcess:
    """A process that reports line by line to a pipe, whose number it reads from ``REPORTS_VARIABLE``.

    Args:
        command: program and arguments of the process.
        stderr: file to which its standard output and error are appended.
        environment: environment variables, added to those of this process.
        folder: its working folder; ``None``: that of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        stderr: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        self._stderr = stderr
        stderr.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        with stderr.open("ab") as output:
            self._told_from = output.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, **environment, REPORTS_VARIABLE: str(writing)},
                text=True,
                pass_fds=(writing,),
                process_group=0,  # not a session of its own, so that it ends with the session of this process
            )
        os.close(writing)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._pass_on, args=(reading,), daemon=True).start()

    def _pass_on(self, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8") as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, line: str) -> None:
        """Write a line to its standard input; if the process is gone, only `next_line` shows it."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def next_line(self, limit_s: float | None) -> str | None:
        """Return the next line that the process reports, or ``None`` if it has ended.

        Raises:
            queue.Empty: no line came within ``limit_s`` seconds.
        """
        return self._lines.get(timeout=limit_s)

    def stop(self, says: bool = False) -> tuple[int | None, str]:
        """End the process and its children; return its exit status and the end of its output.

        A process that hangs in the driver and cannot be killed is left behind.

        Args:
            says: whether to let it first write the stacks of its threads.
        """
        process = self._process
        if says and process.poll() is None:
            os.killpg(process.pid, signal.SIGUSR1)
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()  # an idle worker ends then
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10 * _SECONDS_TO_END)
        with self._stderr.open("rb") as written:
            written.seek(self._told_from)
            told = written.read()[-_TOLD_BYTES:].decode("utf-8", "replace")
        return process.returncode, told


def reports_to() -> Callable[[str], None]:
    """Return the function by which the process of a `ReportingProcess` reports a line."""
    stream = os.fdopen(int(os.environ[REPORTS_VARIABLE]), "w", encoding="utf-8")

    def report(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return report


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


TEST_LIMIT_S = 240.0
_MOST_ATTEMPTS = 2
"""How often a test whose process dies is run: the first time another test may have been the reason."""


@dataclass(frozen=True)
class Suite:
    """Tests that one call of pytest runs.

    Args:
        name: name in the results.
        paths: files, or ids of tests.
        marker: pytest's marker expression that selects tests; ``""``: all.
        without: ids of tests that are left out, because another suite runs them.
        processes: the most processes; one if pytest-xdist is not installed.
    """

    name: str
    paths: tuple[str, ...]
    marker: str = ""
    without: tuple[str, ...] = ()
    processes: int = 1


@dataclass(frozen=True)
class Place:
    """Where and how suites run.

    Args:
        stderr: file to which the output of processes is appended.
        environment: environment variables of the processes, added to those of this one.
        processes: the most processes that run tests at once.
        say: called with a line for each test.
    """

    stderr: Path
    environment: Mapping[str, str]
    processes: int
    say: Callable[[str], None]


@dataclass
class TestRecord(Record):
    """The result of one test.

    Args:
        method: id of the test.
        properties: values that the test recorded, by name.
    """

    __test__ = False  # for pytest: this class is no test

    method: str
    properties: dict[str, Any] = field(default_factory=dict)


class SuiteRun:
    """Runs one suite and records each test.

    Args:
        suite: the tests.
        session: records the results.
        place: where and how the tests run.
        deadline_s: end of the time, on the session's clock.
    """

    def __init__(self, suite: Suite, session: Session, place: Place, deadline_s: float) -> None:
        self._suite, self._session, self._place, self._deadline_s = suite, session, place, deadline_s
        self._attempts: Counter[str] = Counter()
        self._done: list[Record] = []
        self._parts: dict[str, list[dict[str, Any]]] = {}
        self._running: dict[str, float] = {}

    def run(self) -> list[Record]:
        """Run pytest until every test that is not settled is recorded, or the time is over."""
        while self._deadline_s > self._session.clock():
            before = len(self._done) + sum(self._attempts.values())
            if self._one_pass() or len(self._done) + sum(self._attempts.values()) == before:
                break
        return self._done

    def _one_pass(self) -> bool:
        """Run pytest once; return whether nothing is left to do."""
        self._parts, self._running = {}, {}
        with tempfile.TemporaryDirectory() as folder:
            settled = Path(folder, "settled.json")
            settled.write_text(json.dumps(self._settled()), encoding="utf-8")
            environment = {**self._place.environment, "HF_ACTSWAP_SETTLED": str(settled)}
            child = ReportingProcess(self._command(), self._place.stderr, environment, REPOSITORY)
            crashes = sum(self._attempts.values())
            try:
                ended = self._follow(child)
            finally:
                child.stop()
        return ended and sum(self._attempts.values()) == crashes

    def _command(self) -> list[str]:
        # Without pyproject.toml's options: they need pytest-timeout, which may not be installed.
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib"]
        command += ["-p", "tests.row_reports", "-p", "no:cacheprovider", "--rootdir", str(REPOSITORY)]
        command += [] if not self._suite.marker else ["-m", self._suite.marker]
        for test in self._suite.without:
            command += ["--deselect", test]
        processes = min(self._suite.processes, self._place.processes)
        if processes > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(processes), "--dist", "worksteal"]
        return [*command, *self._suite.paths]

    def _settled(self) -> list[str]:
        """Return ids of tests that need not run; skipped tests are tried once in each call."""
        lines = [line for line in self._session.records if line["kind"] == "test"]
        mine = [line for line in lines if line["device"] == self._session.device]
        settled = {line["method"] for line in mine if self._session.is_settled_line(line)}
        return sorted(settled | {getattr(record, "method", "") for record in self._done})

    def _follow(self, child: ReportingProcess) -> bool:
        """Record the tests that the process reports; return whether it ended as it should."""
        while True:
            now_s = self._session.clock()
            hangs_at_s = min(
                (began_s + TEST_LIMIT_S for began_s in self._running.values()), default=now_s + 3600
            )
            try:
                line = child.next_line(max(min(self._deadline_s, hangs_at_s) - now_s, 0.0))
            except queue.Empty:
                return self._cut(child)
            if line is None:
                self._died(child)
                return False
            event = json.loads(line)
            if event["event"] == "end":
                return True
            self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        test = event["id"]
        if event["event"] == "start":
            self._running[test] = self._session.clock()
        elif event["event"] == "report":
            self._parts.setdefault(test, []).append(dict(event))
        elif event["event"] == "crash":
            if self._running.pop(test, None) is not None:
                self._crashed(test, event["text"])
        elif self._running.pop(test, None) is not None or test in self._parts:
            parts = self._parts.pop(test, [])
            outcomes = [part["outcome"] for part in parts]
            status = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
            texts = [part["text"] for part in parts if part["outcome"] != "passed"]
            properties = {name: value for part in parts for name, value in part.get("properties", {}).items()}
            seconds = sum(part.get("seconds", 0.0) for part in parts)
            self._record(test, status, "\n".join(texts), seconds, properties)

    def _crashed(self, test: str, told: str) -> None:
        """Note that a test's process died, perhaps because of another test; at the second time, record it."""
        self._attempts[test] += 1
        if self._attempts[test] >= _MOST_ATTEMPTS:
            self._record(test, "failed", told)

    def _died(self, child: ReportingProcess) -> None:
        status, told = child.stop()
        for test in list(self._running):
            self._crashed(test, f"pytest's process ended with status {status}\n{told}")
        self._running = {}

    def _cut(self, child: ReportingProcess) -> bool:
        """End the process, because the time is over or a test hangs; return whether the time is over."""
        _, told = child.stop(says=True)
        now_s = self._session.clock()
        for test, began_s in self._running.items():
            if now_s - began_s >= TEST_LIMIT_S:
                seconds = now_s - began_s
                self._record(test, "timed out", f"{told}\nno end after {seconds:.0f} s", seconds)
        self._running = {}
        if now_s < self._deadline_s:
            return False
        self._place.say(f"{self._suite.name}: the stage's time is over; call it again for what is left")
        return True

    def _record(
        self,
        test: str,
        status: Any,
        told: str = "",
        seconds: float | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        record = TestRecord(
            test, dict(properties or {}), kind="test", workload=self._suite.name, status=status
        )
        record.wall_s = seconds
        if status != "passed":
            record.reason = next((line for line in reversed(told.splitlines()) if line.strip()), "")[:300]
        if record.failed:
            record.traceback = told
        self._session.record(record)
        self._done.append(record)
        self._place.say(f"{self._suite.name} {test}: {in_words(record)}")
