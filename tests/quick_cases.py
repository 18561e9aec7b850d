"""Which cases of a test run in `make test`, and which only in `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
