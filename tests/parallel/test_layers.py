"""The parallel layers on 2 and 4 processes: the cases of `layers_worker`, each asserted on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.layers_worker import cases, run_on_four, run_on_two
from tests.processes import launch, result

LIMIT_S = 200

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A number of processes, and the folder with what each rank found; its cases run in one launch."""
    size: int = request.param
    worker = run_on_two if size == 2 else run_on_four
    return size, launch(worker, tmp_path_factory.mktemp(f"layers{size}"), size, LIMIT_S)


@pytest.mark.parametrize("name", list(cases()))
def test_case(name: str, results: tuple[int, Path]) -> None:
    size, folder = results
    assert [result(folder, name, rank) for rank in range(size)] == [None] * size
