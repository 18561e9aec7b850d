"""A plugin of pytest that reports each test as it begins and ends, to `benchmarks.runner.run_suite`.

    python -m pytest -p tests.row_reports ...

Left out are the tests whose ids stand, as a JSON list, in the file that ``HF_ACTSWAP_SETTLED`` names. A test
that takes longer than ``HF_ACTSWAP_TEST_LIMIT_S`` seconds ends its process, which says where it hangs. A
process in which a test failed and whose device does not answer any more ends: each further test in it would
fail, too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import pytest

from benchmarks import REPORTS_VARIABLE, SETTLED_VARIABLE, TEST_LIMIT_VARIABLE

_DEVICE_LOST = 70
"""Exit status."""
_STDERR = pytest.StashKey[TextIO]()


class Reports:
    """The hooks of the one process that knows of all tests; it reports to a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8")
        self._parts: dict[str, list[pytest.TestReport]] = {}

    def _say(self, test: str, status: str, **values: Any) -> None:
        self._stream.write(json.dumps({"id": test, "status": status, **values}) + "\n")
        self._stream.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure."""
        if report.failed:
            self._say(report.nodeid, "failed", text=report.longreprtext, seconds=0.0, properties={})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._say(nodeid, "start")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call or tear-down has ended; or its process, of which pytest-xdist says ``???``."""
        if report.when == "???":
            self._say(report.nodeid, "died", text=report.longreprtext)
        else:
            self._parts.setdefault(report.nodeid, []).append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        parts = self._parts.pop(nodeid, [])
        outcomes = ["passed" if hasattr(part, "wasxfail") else part.outcome for part in parts]
        status = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
        told = [part for part, outcome in zip(parts, outcomes, strict=True) if outcome != "passed"]
        self._say(
            nodeid,
            status,
            text="\n".join(map(_text_of, told)),
            seconds=sum(part.duration for part in parts),
            properties={name: value for part in parts for name, value in part.user_properties},
        )

    def pytest_sessionfinish(self) -> None:
        """All have ended."""
        self._say("", "end")


def _text_of(report: pytest.TestReport) -> str:
    """Of a test that was skipped it is a place and a reason."""
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext


def pytest_configure(config: pytest.Config) -> None:
    """Let the process that knows of all tests report."""
    # A copy: while a test runs, its standard error is captured.
    config.stash[_STDERR] = os.fdopen(os.dup(2), "w")
    if not hasattr(config, "workerinput"):  # which pytest-xdist's processes have
        config.pluginmanager.register(Reports(int(os.environ[REPORTS_VARIABLE])))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is settled."""
    settled = json.loads(Path(os.environ[SETTLED_VARIABLE]).read_text(encoding="utf-8"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in settled])
    items[:] = [item for item in items if item.nodeid not in settled]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a process that hangs, and one whose device is lost."""
    before = item.session.testsfailed
    limit_s = float(os.environ[TEST_LIMIT_VARIABLE])
    faulthandler.dump_traceback_later(limit_s, file=item.config.stash[_STDERR], exit=True)
    try:
        result = yield
    finally:
        faulthandler.cancel_dump_traceback_later()
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
