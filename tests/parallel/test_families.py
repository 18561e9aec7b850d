"""Families of transformers, divided and with plans, against one process; and the page that says so."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import transformers

from docs.make_families import PAGE, cells_of
from tests.parallel.family_worker import (
    RIGHT,
    WRONG,
    Findings,
    everything,
    findings,
    page,
    run_families,
)
from tests.parallel.patched_models import FAMILIES, MOST_USED, QUICK, QUICK_BOTH_WAYS
from tests.processes import launch
from tests.quick_cases import quick_first, runs_slow_cases

LIMIT_S, LONG_LIMIT_S = 200, 1500

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def most_used(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """What was found of the families that are used most, in one launch."""
    slow_too = runs_slow_cases(request)
    asked = (MOST_USED, MOST_USED) if slow_too else (QUICK, QUICK_BOTH_WAYS)
    return findings(launch(partial(run_families, *asked), tmp_path_factory.mktemp("families"), 2, LIMIT_S))


@pytest.mark.parametrize("family", quick_first(MOST_USED, len(QUICK)))
def test_as_in_one_process(family: str, most_used: Findings) -> None:
    """Losses, each gradient, and the state dict, with sequence parallelism and without."""
    assert {way: finding for way, finding in most_used[family].items() if finding[0] != RIGHT} == {}
    assert "tp2 sp" in most_used[family]


def test_page_of_most_used(most_used: Findings) -> None:
    assert set(MOST_USED) <= set(FAMILIES)
    cells = cells_of(PAGE.read_text(encoding="utf-8"))
    for family, found in most_used.items():
        shown = {way: cells[family][way] for way in found}
        assert shown == {way: status for way, (status, _) in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(2 * LONG_LIMIT_S)
def test_page_of_everything(tmp_path: Path) -> None:
    """No family is wrong, and the page says of each what is found."""
    found = everything(tmp_path, LONG_LIMIT_S)
    assert {family: ways for family, ways in found.items() if WRONG in dict(ways.values())} == {}
    shown = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}." not in shown:
        pytest.skip("the page is of another version of transformers: run docs/make_families.py")
    assert page(found) == shown, "run: python docs/make_families.py"
