"""Which cases of a test run in `make test`, and which only in `make test-all`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

each_value_once = pytest.mark.each_value_once
"""Of the product of a test's parametrizations those cases are quick that show each value once or more often.

The first case has the first value of each, the second the second of each, and so on; where one has fewer
values it starts again.
"""


def quick_first(cases: Iterable[Any], count: int) -> list[Any]:
    """Return the cases of a test, of which those after the first ``count`` are slow."""
    found = list(cases)
    slow = (case if isinstance(case, tuple) else (case,) for case in found[count:])
    return [*found[:count], *(pytest.param(*values, marks=pytest.mark.slow) for values in slow)]


def slow_among(names: Iterable[str], slow: Collection[str], prefix: str = "") -> list[Any]:
    """Return names as parameters of a test, slow where the case of ``prefix`` and the name is in ``slow``."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (prefix + name in slow)) for name in names]


def quick_named(cases: Mapping[str, Any], names: Collection[str]) -> list[Any]:
    """Return the cases of a test as parameters with their names as ids, slow but for those in ``names``.

    Raises:
        ValueError: one of the names is no case.
    """
    if unknown := set(names) - set(cases):
        raise ValueError(f"no such case: {unknown}")
    slow = {name: [] if name in names else [pytest.mark.slow] for name in cases}
    return [pytest.param(case, id=name, marks=slow[name]) for name, case in cases.items()]


def runs_slow_cases(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests of this module are selected too: a launch that serves them all then runs theirs."""
    own = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("slow") for item in own)


SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
"""Node ids of tests, and files, that are slow because they took more than `_MOST_S`, as `Measured` found."""
_MOST_S, _MOST_OF_LAUNCHES_S = 0.6, 25.0


class Measured:
    """A plugin that writes `SLOW_TESTS` anew, for the files that ran: of each what is `too_long`."""

    def __init__(self) -> None:
        self._took_s: dict[str, dict[str, float]] = defaultdict(dict)
        self._set_up_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.when == "setup":
            self._set_up_s[file] += report.duration
        elif report.when == "call" and not report.skipped:
            self._took_s[file][report.nodeid] = report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):  # of several processes the one that hears of all
            long = (
                name
                for file, took_s in self._took_s.items()
                for name in too_long(file, took_s, self._set_up_s[file])
            )
            known = SLOW_TESTS.read_text(encoding="utf-8").splitlines()
            of_others = (name for name in known if name.partition("::")[0] not in self._took_s)
            lines = (f"{name}\n" for name in sorted((*of_others, *long)))
            SLOW_TESTS.write_text("".join(lines), encoding="utf-8")


def too_long(file: str, took_s: Mapping[str, float], set_up_s: float) -> list[str]:
    """Return the tests of a file that take too long for `make test`, or the file if its launches do.

    Else its quickest is never one of them.
    """
    if set_up_s > _MOST_OF_LAUNCHES_S:
        return [file]
    quickest = min(took_s, key=lambda name: took_s[name])
    return [name for name, seconds in took_s.items() if seconds > _MOST_S and name != quickest]


def mark_slow_by_measure(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what `SLOW_TESTS` names, but for what is marked ``essential``."""
    slow = set(SLOW_TESTS.read_text(encoding="utf-8").splitlines())
    for item in items:
        named = not slow.isdisjoint((item.nodeid, item.nodeid.partition("::")[0]))
        if named and not item.get_closest_marker("essential"):
            item.add_marker(pytest.mark.slow)


def mark_slow_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what `each_value_once` leaves to `make test-all`."""
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(each_value_once.name):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in products.values():
        axes = zip(*(case.callspec._idlist for case in cases), strict=True)
        values = [list(dict.fromkeys(axis)) for axis in axes]
        longest = max(len(axis) for axis in values)
        quick = [[axis[number % len(axis)] for axis in values] for number in range(longest)]
        for case in cases:
            if list(case.callspec._idlist) not in quick:
                case.add_marker(pytest.mark.slow)
