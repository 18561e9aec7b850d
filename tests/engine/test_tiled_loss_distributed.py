"""Two processes: under DDP and FSDP2 each rank's losses and gradients are those without tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.tiled_loss_worker import KINDS, WORLD_SIZE, train_on_rank
from tests.processes import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each rank wrote; all in one launch."""
    return launch(train_on_rank, tmp_path_factory.mktemp("tiled"), WORLD_SIZE, 250)


@pytest.mark.dist
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_has_the_numbers_without_tiles(kind: str, smooth: bool, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        whole, tiled = (torch.load(results / f"{kind}.{smooth}.{on}.{rank}.pt") for on in (False, True))
        assert tiled[0] == pytest.approx(whole[0], rel=1e-6)
        assert tiled[1].keys() == whole[1].keys()
        for name, one in whole[1].items():
            assert float((tiled[1][name] - one).norm()) < 2e-6 * float(one.norm()), name
        assert tiled[2] == (kind == "fsdp2 head"), (
            "a head that is sharded by itself stays whole, and this is said"
        )
