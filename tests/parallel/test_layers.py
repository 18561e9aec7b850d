"""The parallel layers on 2 and 4 processes: the cases of `layers_worker`, each asserted on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.layers_worker import OK, cases, run_on_rank
from tests.processes import finish

LIMIT_S = 200

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each rank found; all cases of a number of processes run in one launch."""
    world_size: int = request.param
    folder = tmp_path_factory.mktemp(f"layers{world_size}")
    context = torch.multiprocessing.spawn(
        run_on_rank, (world_size, str(folder)), nprocs=world_size, join=False
    )
    finish(context, LIMIT_S)
    return folder


@pytest.mark.parametrize("name", list(cases()))
def test_case(name: str, results: Path) -> None:
    found = {path.name: path.read_text() for path in sorted(results.glob(f"{name}.[0-9].txt"))}
    assert found
    failures = [f"{rank}:\n{text}" for rank, text in found.items() if text != OK]
    assert not failures, "\n".join(failures)
