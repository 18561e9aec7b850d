"""Runs suites of tests under pytest, in processes of their own; each test is a row of the results.

A test is recorded when it ends (`tests/row_reports.py` reports it). So if a run is ended, hangs or dies, only
the tests that ran at that moment are not recorded. Tests that are settled do not run again. A test that
exceeds its time limit is ended with its process, and the others continue in a new one. A test whose process
died runs once more, in case another test was the reason.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.child import ReportingProcess
from benchmarks.harness import Session, in_words
from benchmarks.records import REPOSITORY, Record, write_text

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
        folder: folder of the results, for files of tests and for the report of all tests.
        stderr: file to which the output of processes is appended.
        environment: environment variables of the processes, added to those of this one.
        processes: the most processes that run tests at once.
        say: called with a line for each test.
    """

    folder: Path
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
        try:
            while self._deadline_s > self._session.clock():
                before = len(self._done) + sum(self._attempts.values())
                if self._one_pass() or len(self._done) + sum(self._attempts.values()) == before:
                    break
        finally:
            self._write_junit()
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

    def _write_junit(self) -> None:
        """Write a JUnit report of all recorded tests, of this call and of earlier ones."""
        suite = ElementTree.Element("testsuite", name="gpu_day")
        lines = [line for line in self._session.records if line["kind"] == "test"]
        for line in lines:
            file, _, name = line["method"].partition("::")
            case = ElementTree.SubElement(
                suite, "testcase", classname=file, name=name, time=f"{line['wall_s'] or 0:.3f}"
            )
            properties = ElementTree.SubElement(case, "properties")
            for key, value in line["properties"].items():
                ElementTree.SubElement(properties, "property", name=key, value=_printable(str(value)))
            if line["status"] in ("failed", "timed out"):
                ElementTree.SubElement(case, "failure", message=_printable(line["reason"])).text = _printable(
                    line["traceback"]
                )
            elif line["status"] == "skipped":
                ElementTree.SubElement(case, "skipped", message=_printable(line["reason"]))
        for name, statuses in (("failures", ("failed", "timed out")), ("skipped", ("skipped",))):
            suite.set(name, str(sum(line["status"] in statuses for line in lines)))
        suite.set("tests", str(len(lines)))
        text = ElementTree.tostring(suite, encoding="unicode")
        write_text(self._place.folder / "gpu_day_tests.xml", text)


def _printable(text: str) -> str:
    """Return a text without characters that XML cannot hold."""
    return "".join(letter for letter in text if letter in "\n\t" or letter.isprintable())
