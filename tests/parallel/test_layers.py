"""The parallel layers on 2 and 4 processes: the cases of `layers_worker`, each asserted on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.parallel import column_input_cases, layer_cases, neox_cases
from tests.processes import launch, result, run_cases

Case = Callable[[dist.ProcessGroup | None], None]
MODULES: tuple[ModuleType, ...] = (layer_cases, column_input_cases, neox_cases)


def cases() -> dict[str, Case]:
    """All cases by name, in order."""
    return {
        name.removeprefix("case_"): partial(_seeded, value)
        for module in MODULES
        for name, value in vars(module).items()
        if name.startswith("case_")
    }


def _seeded(case: Case, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    case(group)


def run_on_two(rank: int, folder: str) -> None:
    run_cases(rank, folder, 2, cases(), {name: [[0, 1]] for name in cases()})


def run_on_four(rank: int, folder: str) -> None:
    run_cases(rank, folder, 4, cases(), {name: [[0, 1, 2, 3]] for name in cases()})


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
