"""Which cases of a test run in `make test`, and which only in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(cases: Iterable[Any], count: int) -> list[Any]:
    """Return the cases of a test, of which those after the first ``count`` are slow."""
    found = list(cases)
    slow = (case if isinstance(case, tuple) else (case,) for case in found[count:])
    return [*found[:count], *(pytest.param(*values, marks=pytest.mark.slow) for values in slow)]
