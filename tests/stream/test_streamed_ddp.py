"""Two processes under DDP: each rank's numbers are those of whole sequences, reduced once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import launch
from tests.stream.streamed_ddp_worker import KINDS, WORLD_SIZE, train_on_rank


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each rank wrote; all in one launch."""
    return launch(train_on_rank, tmp_path_factory.mktemp("streamed"), WORLD_SIZE, 250)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_has_the_numbers_of_whole_sequences(kind: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        whole, streamed = (torch.load(results / f"{kind}.{on}.{rank}.pt") for on in (False, True))
        assert streamed[0] == pytest.approx(whole[0], rel=1e-6)
        assert streamed[1].keys() == whole[1].keys()
        for name, one in whole[1].items():
            assert float((streamed[1][name] - one).norm()) <= 1e-6 * float(one.norm()), name
        assert streamed[2] == whole[2] == 2, "one reduction a step, for all chunks"


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_choose_together_what_is_kept_whatever_their_lengths(results: Path) -> None:
    assert [torch.load(results / f"chosen.{rank}.pt") for rank in range(WORLD_SIZE)] == [[3, 0], [3, 0]]
