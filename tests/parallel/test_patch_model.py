"""Every family, divided among 2 and 4 ranks, against one process: losses, every gradient, their norm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.patch_worker import (
    CASES,
    CONTROLS,
    QUICK,
    Result,
    run_all_on_four,
    run_all_on_two,
    run_quick,
)
from tests.processes import launch, launched, result

LIMIT_S, LONG_LIMIT_S = 150, 280
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
"""Relative; float32."""

pytestmark = [pytest.mark.dist, pytest.mark.essential]


quick = launched(run_quick, 2, LIMIT_S)


@pytest.fixture(scope="module", params=[2, 4])
def everything(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    size: int = request.param
    worker = run_all_on_two if size == 2 else run_all_on_four
    return size, launch(worker, tmp_path_factory.mktemp(f"patch{size}"), size, LONG_LIMIT_S)


@pytest.mark.parametrize("name", [name for name in QUICK if name not in CONTROLS])
def test_as_in_one_process(name: str, quick: Path) -> None:
    for rank in range(2):
        assert_as_in_one_process(result(quick, name, rank))


@pytest.mark.parametrize("name", CONTROLS)
def test_without_the_sum_it_is_wrong(name: str, quick: Path) -> None:
    """Negative control: tagged gradients are parts before they are summed, and differ over the ranks."""
    found = result(quick, name, 0)
    assert found.worst[0] > 0.1
    tagged = "norm.weight" if CASES[name].sequence_parallel else "_norm.weight"
    wrong = {name for name, error in found.errors.items() if error > GRADIENT_TOLERANCE}
    assert wrong == set(found.drift) == {name for name in found.errors if name.endswith(tagged)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in CONTROLS])
def test_as_in_one_process_everything(name: str, everything: tuple[int, Path]) -> None:
    size, folder = everything
    for rank in range(size):
        assert_as_in_one_process(result(folder, name, rank))


def assert_as_in_one_process(found: Result) -> None:
    assert found.losses == pytest.approx(found.expected_losses, rel=LOSS_TOLERANCE)
    assert found.errors
    assert found.missing == set()
    assert found.worst[0] < GRADIENT_TOLERANCE, found.worst
    assert found.norms[0] == pytest.approx(found.norms[1], rel=GRADIENT_TOLERANCE)
    assert found.drift == []
