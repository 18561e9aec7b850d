"""A plugin of pytest that reports each test as it begins and ends, to `benchmarks.runner.ReportingProcess`.

    python -m pytest -p tests.row_reports ...

So what is known of a run that is ended, hangs or dies is all but the tests that ran just then. Left out are
the tests whose ids stand, as a JSON list, in the file that ``HF_ACTSWAP_SETTLED`` names. A process in which a
test failed and whose device does not answer any more ends: each further test in it would fail, too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TextIO

import pytest

from benchmarks.runner import reports_to

SETTLED_VARIABLE = "HF_ACTSWAP_SETTLED"
_DEVICE_LOST = 70
"""Exit status."""
_STDERR = pytest.StashKey[TextIO]()


class Reports:
    """The hooks of the one process that knows of all tests.

    Args:
        report: takes a line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def _say(self, event: str, test: str, **values: Any) -> None:
        self._report(json.dumps({"event": event, "id": test, **values}))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        if report.failed:
            self._say("report", report.nodeid, outcome="failed", text=report.longreprtext)
            self._say("finish", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._say("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call or tear-down has ended; or its process, of which pytest-xdist says ``???``."""
        self._say(
            "crash" if report.when == "???" else "report",
            report.nodeid,
            outcome="passed" if hasattr(report, "wasxfail") else report.outcome,
            text=_text_of(report),
            seconds=report.duration,
            properties=dict(report.user_properties),
        )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self._say("finish", nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """All have."""
        self._say("end", "", status=int(exitstatus))


def _text_of(report: pytest.TestReport) -> str:
    """Of a test that was skipped it is a place and a reason."""
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext


def pytest_configure(config: pytest.Config) -> None:
    """Let every process tell where it hangs, and the one that knows of all tests report."""
    # A copy: while a test runs, its standard error is captured.
    config.stash[_STDERR] = stderr = os.fdopen(os.dup(2), "w")
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=True)
    if not hasattr(config, "workerinput"):  # which pytest-xdist's processes have
        config.pluginmanager.register(Reports(reports_to()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is settled."""
    path = os.environ.get(SETTLED_VARIABLE)
    settled = set(json.loads(Path(path).read_text(encoding="utf-8"))) if path else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in settled])
    items[:] = [item for item in items if item.nodeid not in settled]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a process whose device is lost."""
    before = item.session.testsfailed
    result = yield
    if item.session.testsfailed > before and _device_is_lost():
        os._exit(_DEVICE_LOST)
    return result


def _device_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return False
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        return True
    return False
