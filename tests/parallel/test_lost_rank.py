"""A rank that dies in mid-training: the other raises a named error at once, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_actswap.parallel.rank_agreement import ANSWER_LIMIT_S, lost_rank_error
from tests.parallel.lost_rank_worker import DYING_RANK, LAST_STEP, PLACES, WORLD_SIZE, run_on_rank
from tests.processes import launch

LIMIT_S = 120

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each survivor wrote."""
    folder = tmp_path_factory.mktemp("lost")
    for place in PLACES:
        (folder / place).mkdir()
    return launch(run_on_rank, folder, WORLD_SIZE, LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_the_survivor_says_who_is_gone(place: str, results: Path) -> None:
    found = torch.load(results / place / f"{place}.pt", weights_only=False)
    assert found["kind"] == "LostRankError", found
    assert found["step"] == LAST_STEP
    assert "a collective of ranks [0, 1] failed, because a rank has ended" in found["text"]
    assert f"No sign within {ANSWER_LIMIT_S:g} s of: rank {DYING_RANK}." in found["text"]
    assert "The backend says: " in found["text"]
    assert found["took_s"] < ANSWER_LIMIT_S + 5


def test_other_errors_are_left_alone() -> None:
    assert (
        lost_rank_error(RuntimeError("The size of tensor a (2) must match the size of tensor b"), None)
        is None
    )
