"""Measures jobs one after another; results are written at once, and no failure of a job ends the session.

A `Session` goes through its jobs. A job whose result is recorded is not measured again; a job whose estimate
does not fit into the time that is left is left out; every result is in the file before the next job begins.
One of two objects measures:

* `Bench` measures in this process, for the CPU and for tests.
* `Worker` is a process of its own that has such a bench. A kernel that fails poisons the CUDA
  context of its whole process, and a hang in the driver cannot be interrupted from inside. So the process
  that measures must be one that can be ended from outside, and the process that keeps the results must never
  touch the device. One worker measures many rows, because its start (imports, context, model, link) takes 15
  to 20 s, as long as a row. A new one starts when a row failed and left memory behind, hung, or killed it.

Suites of tests run under pytest in processes of their own, and each test is a row of the results, recorded
when it ends (`tests/row_reports.py` reports it). So if a run is ended, only the tests that ran at that moment
are not recorded. A test that hangs or dies is recorded, and the others continue in a new process.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from benchmarks import REPORTS_VARIABLE, SETTLED_VARIABLE, TEST_LIMIT_VARIABLE
from benchmarks.measure import Bench, empty_result
from benchmarks.records import (
    KEY_FIELDS,
    REPOSITORY,
    Line,
    Record,
    Records,
    Result,
    Status,
    device_named,
    fill_ratios,
    key_of,
    origin,
)
from benchmarks.rows import EAGER, ROWS, Row
from benchmarks.trainings import TrainingJob
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

_SECONDS_TO_END = 3.0
"""Time that a process gets to end by itself or to write the stacks of its threads."""
_TOLD_BYTES = 20_000
TEST_LIMIT_S = 240.0

Request = Callable[[Bench], Any]
"""Measures on a bench and returns a record. It can be pickled."""
Ask = Callable[[Request, float | None], Any]
"""Function of a request and a limit in seconds that returns the request's answer.

Raises:
    MeasureError: it failed, or took too long, or its process died.
"""


class MeasureError(Exception):
    """A request that got no answer: ``timed out`` or ``failed``, and a traceback or its process's output."""

    def __init__(self, status: Status, reason: str, told: str) -> None:
        super().__init__(status, reason, told)
        self.status, self.reason, self.told = status, reason, told


@dataclass(frozen=True)
class FrontierJob:
    """One row of the frontier on one workload.

    ``shorter``: in a search for the longest sequence (``longest``; nothing is compared with eager then), the
    job at half the length, which must have fitted. ``compiling``: whether rows that compile are measured.
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
        line = (session.find(self.shorter) or {}) if self.shorter is not None else {}
        if self.shorter is not None and line.get("ms"):
            return float(line["ms"]) * step_flop(self.workload) / step_flop(self.shorter.workload)
        return self.workload.expected_ms * self.row.relative_time * session.slowness(self.workload)

    def request(self, records: Records) -> Request | str:
        """Return the request, which may depend on earlier records, or why the row cannot be measured."""
        if self.row.compiles and not self.compiling:
            return "compiling is slow on the CPU; ask for it with --compile"
        if self.shorter is not None and not any(
            line["status"] == "measured" and self.shorter._is_at(line) for line in records
        ):
            return f"{self.shorter.workload.tokens:,} tokens were too many, or were not measured"
        config = None
        if self.row.budget is not None:
            beside = [Result(**line) for line in records if self._is_at(line, method=line.get("method"))]
            config = self.row.budget.options(self.row.compiles, beside)
            if isinstance(config, str):
                return config
        return partial(
            Bench.measure,
            workload=self.workload,
            name=self.row.name,
            config=config,
            compared=not self.longest,
        )

    def is_same(self, line: Line) -> bool:
        """Whether a recorded line was measured with the settings that the job has now."""
        if self.row.budget is not None:
            return True
        as_recorded = json.loads(json.dumps(self.row.config_for(self.workload.layers)))
        return bool(as_recorded == line["config"])

    def _is_at(self, line: Line, **other: Any) -> bool:
        """Whether a line has the job's key, on whatever device, but for the fields ``other``."""
        return key_of(asdict(self.blank()) | {"device": line["device"], **other}) == key_of(line)


Job = FrontierJob | TrainingJob
"""One row to be measured."""


def frontier_jobs(
    workloads: Sequence[Workload], rows: Sequence[Row], compiling: bool = True
) -> list[FrontierJob]:
    return [FrontierJob(workload, row, compiling=compiling) for workload in workloads for row in rows]


def longest_jobs(
    workload: Workload, rows: Sequence[Row], limit_tokens: int, first_tokens: int | None = None
) -> list[FrontierJob]:
    """Return the jobs of a search for the longest sequence: all rows at one length, then at twice that.

    From ``first_tokens``, or the workload's, up to ``limit_tokens``. A single step is timed.
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


def again_asked(names: Sequence[str] | None) -> Callable[[str], bool]:
    """Return what ``--again`` asks for: whether a row is measured again; ``None``: none; empty: all."""
    return lambda name: names is not None and (not names or name in names)


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
        compiled: workloads and compile groups whose graphs are compiled.
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
        line = self.find(FrontierJob(workload, EAGER)) or {}
        return (line.get("ms") or workload.expected_ms) / workload.expected_ms

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

    def learn_origin(self, again: bool = False) -> Line:
        """Return the fields that are the same in every record; what measures is asked once, and ``again``."""
        self._origin_is_whole = self._origin_is_whole and not again
        if not self._origin_is_whole:
            self._origin |= self._ask(origin_of, _SECONDS_FOR_ORIGIN) | {"device": self.device}
            self._origin_is_whole = True
        return self._origin

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
            key = {name: value for name, value in vars(record).items() if name in KEY_FIELDS}
            record = replace(self._ask(request, limit_s), **key)
        except MeasureError as error:
            cut = error.status == "timed out" and limit_s < own_s
            record.status = "left out" if cut else error.status
            record.reason = "the time of the run was over" if cut else error.reason
            record.traceback = error.told
        record.wall_s = self.clock() - started
        if isinstance(job, FrontierJob) and job.row.compiles and record.status == "measured":
            self.compiled.add((job.workload, job.row.compile_group))
        return record


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


def origin_of(bench: Bench) -> Line:
    """Return the fields of a record that are the same in all that a bench measures."""
    return origin(bench.device)


def serve(requests: Connection, output: Path, device: str, rows: Sequence[Row] = ROWS) -> None:
    """Answer requests in a process of its own, until one leaves it in a state that cannot be trusted.

    The first answer is ``ready``; with the others goes whether it is the last one. What this process and its
    children print is appended to ``output``.
    """
    os.setpgid(0, 0)  # its compilers end with it
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    bench = Bench(device_named(device), rows)
    requests.send("ready")
    ends = False
    while not ends:
        try:
            request: Request = requests.recv()
        except EOFError:
            return
        try:
            answer = request(bench)
        except Exception as error:
            logger.exception("a request failed")
            answer = MeasureError("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        ends = getattr(answer, "status", "measured") != "measured" and not bench.is_sound()
        requests.send((answer, ends))


class Worker:
    """Measures in a process of its own, which is started at the first request and again after it ended.

    It runs ``target`` with ``environment`` beside the variables of this process.
    """

    def __init__(
        self,
        device: str,
        output: Path,
        environment: Mapping[str, str],
        target: Callable[[Connection, Path, str], None] = serve,
    ) -> None:
        self._device, self._output, self._environment, self._target = device, output, environment, target
        self._process: SpawnProcess | None = None

    def __call__(self, request: Request, limit_s: float | None = None) -> Any:
        """Measure a request, as `Ask` says; the limit does not include the start of the process."""
        if self._process is None:
            self._start()
            self._answer(_SECONDS_TO_START, "it did not start in")
        with suppress(OSError):  # if the process is gone, the answer shows it
            self._requests.send(request)
        answer, ends = self._answer(limit_s, "no answer after")
        if ends:
            self.stop()
        if isinstance(answer, MeasureError):
            raise answer
        return answer

    def _start(self) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._told_from = self._output.stat().st_size if self._output.exists() else 0
        os.environ.update(self._environment)  # which a new process inherits
        context = multiprocessing.get_context("spawn")
        self._requests, theirs = context.Pipe()
        self._process = context.Process(target=self._target, args=(theirs, self._output, self._device))
        self._process.start()
        theirs.close()

    def _answer(self, limit_s: float | None, what: str) -> Any:
        assert self._process is not None
        try:
            if not self._requests.poll(limit_s):
                os.kill(self._process.pid or 0, signal.SIGUSR1)  # says where its threads are
                raise MeasureError("timed out", f"{what} {limit_s:.0f} s", self.stop())
            return self._requests.recv()
        except (EOFError, OSError):
            self._process.join(_SECONDS_TO_END)
            status = self._process.exitcode
            raise MeasureError("failed", f"its process ended with status {status}", self.stop()) from None

    def stop(self) -> str:
        """End the process, if there is one, and its children; return the end of its output.

        A process that hangs in the driver and cannot be killed is left behind.
        """
        process, self._process = self._process, None
        if process is None:
            return ""
        self._requests.close()  # an idle process ends then
        process.join(_SECONDS_TO_END)
        end_group(process.pid or 0)
        process.join(10 * _SECONDS_TO_END)
        return told_since(self._output, self._told_from)


def end_group(pid: int) -> None:
    """Kill the processes of a group, if there are any."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def told_since(output: Path, start: int) -> str:
    return output.read_bytes()[start:][-_TOLD_BYTES:].decode("utf-8", "replace")


@dataclass(frozen=True)
class Suite:
    """Tests that one call of pytest runs.

    Args:
        name: name in the results.
        paths, without: files or ids of tests, less those that another suite runs.
        marker: pytest's marker expression that selects tests; ``""``: all.
        processes: the most processes; one if pytest-xdist is not installed.
    """

    name: str
    paths: tuple[str, ...]
    marker: str = ""
    without: tuple[str, ...] = ()
    processes: int = 1

    def command(self, processes: int) -> list[str]:
        """Return the command that runs the tests in at most so many processes."""
        # Without pyproject.toml's options: they need pytest-timeout, which may not be installed.
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib"]
        command += ["-p", "tests.row_reports", "-p", "no:cacheprovider", "--rootdir", str(REPOSITORY)]
        command += ["-m", self.marker] if self.marker else []
        command += [f"--deselect={test}" for test in self.without]
        if min(self.processes, processes) > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(self.processes, processes)), "--dist", "worksteal"]
        return [*command, *self.paths]


@dataclass(frozen=True)
class Place:
    """Where and how suites run: in ``processes`` at most, with these variables beside the present ones.

    What they print is appended to ``output``; ``say`` is called with a line for each test.
    """

    output: Path
    environment: Mapping[str, str]
    processes: int
    say: Callable[[str], None]


@dataclass
class TestRecord(Record):
    """The result of one test (``method``: its id), with the values that it recorded (``properties``)."""

    __test__ = False  # for pytest: this class is no test

    method: str
    properties: dict[str, Any] = field(default_factory=dict)


def run_suite(suite: Suite, session: Session, place: Place, deadline_s: float) -> list[Record]:
    """Run pytest until every test that is not settled is recorded, or the time is over."""
    done: list[Record] = []
    while session.clock() < deadline_s:
        settled = {
            line["method"]
            for line in session.records
            if (line["kind"], line["device"]) == ("test", session.device) and session.is_settled_line(line)
        }
        settled |= {getattr(record, "method", "") for record in done}  # what is skipped is tried once
        before, whole = len(done), False
        for event in _events_of(suite, place, sorted(settled), deadline_s - session.clock()):
            whole = event["status"] == "end"
            if not whole:
                done.append(_record_of(suite, event))
                session.record(done[-1])
                place.say(f"{suite.name} {event['id']}: {in_words(done[-1])}")
        if whole or len(done) == before:
            return done
    place.say(f"{suite.name}: the stage's time is over; call it again for what is left")
    return done


def _events_of(suite: Suite, place: Place, settled: Sequence[str], left_s: float) -> Iterator[Line]:
    """Run pytest once; yield each test that ends or dies, and last ``end``, if its process lives."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        left_out = Path(folder, "settled.json")
        left_out.write_text(json.dumps(settled), encoding="utf-8")
        told = {REPORTS_VARIABLE: str(writing), TEST_LIMIT_VARIABLE: str(TEST_LIMIT_S)}
        environment = {**os.environ, **place.environment, **told, SETTLED_VARIABLE: str(left_out)}
        place.output.parent.mkdir(parents=True, exist_ok=True)
        with place.output.open("ab") as output:
            start = output.seek(0, os.SEEK_END)
            child = subprocess.Popen(
                suite.command(place.processes),
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env=environment,
                pass_fds=(writing,),
                process_group=0,  # not a session of its own, so that it ends with the session of this process
            )
        os.close(writing)
        over = threading.Timer(left_s, end_group, (child.pid,))
        over.start()
        running: dict[str, float] = {}
        whole = False
        try:
            with os.fdopen(reading, encoding="utf-8") as lines:
                for event in map(json.loads, lines):
                    if event["status"] == "start":
                        running[event["id"]] = time.monotonic()
                        continue
                    began_s = running.pop(event["id"], None)
                    if event["status"] != "died":
                        whole = event["status"] == "end"
                        yield event
                    elif began_s is not None:
                        yield _dead(event["id"], began_s, told_since(place.output, start), event["text"])
            if not whole and over.is_alive():  # the process that knows of all tests died, or let itself die
                child.wait(_SECONDS_TO_END)
                ended = f"pytest's process ended with status {child.returncode}"
                for test, began_s in running.items():
                    yield _dead(test, began_s, told_since(place.output, start), ended)
        finally:
            over.cancel()
            end_group(child.pid)
            child.wait(10 * _SECONDS_TO_END)


def _dead(test: str, began_s: float, told: str, why: str) -> Line:
    """Return the event of a test whose process died: its own watchdog ends it when it takes too long."""
    seconds = time.monotonic() - began_s
    status = "timed out" if seconds >= 0.9 * TEST_LIMIT_S else "failed"
    return {"id": test, "status": status, "text": f"{told}\n{why}", "seconds": seconds, "properties": {}}


def _record_of(suite: Suite, event: Mapping[str, Any]) -> TestRecord:
    about = {"kind": "test", "workload": suite.name, "status": event["status"], "wall_s": event["seconds"]}
    record, told = TestRecord(event["id"], event["properties"], **about), event["text"]
    if record.status != "passed":
        record.reason = next((line for line in reversed(told.splitlines()) if line.strip()), "")[:300]
    if record.failed:
        record.traceback = told
    return record
