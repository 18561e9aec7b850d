"""A rank that dies in mid-training: the other raises a named error at once, wherever it stands."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_actswap.integrations.trainer_mixin import ActSwapTrainerMixin
from hf_actswap.parallel.collectives import ANSWER_LIMIT_S, LostRankError, lost_rank_error
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


class _Failing:
    def training_step(self) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


class _Trainer(ActSwapTrainerMixin, _Failing):
    def __init__(self, parallel: Any) -> None:
        self.parallel = parallel


def test_a_trainers_step_names_it_too(tmp_path: Path) -> None:
    """Also where a communication that is not ours notices (DDP's, over the data axis)."""
    in_parts = SimpleNamespace(training_step=lambda _trainer, stock: stock())
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(LostRankError, match="All of them noticed"):
            _Trainer(in_parts).training_step()
        with pytest.raises(RuntimeError, match=r"^Connection closed"):
            _Trainer(None).training_step()
    finally:
        dist.destroy_process_group()


def test_other_errors_are_left_alone() -> None:
    assert (
        lost_rank_error(RuntimeError("The size of tensor a (2) must match the size of tensor b"), None)
        is None
    )
