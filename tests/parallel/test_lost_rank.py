"""A rank that dies in mid-training: the other raises a named error at once, wherever it stands."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.distributed as dist

from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients, clip_grad_norm
from hf_actswap.parallel.patch_model import patch_model
from hf_actswap.parallel.rank_agreement import ANSWER_LIMIT_S, lost_rank_error
from tests.parallel.patch_worker import config
from tests.parallel.patched_models import tiny_model
from tests.processes import join_group, launch

WORLD_SIZE, LAST_STEP, DYING_RANK = 2, 2, 1
PLACES = ("forward", "backward", "sum", "norm")


def run_on_rank(rank: int, folder: str) -> None:
    """Run each place in a process of its own: forked, for the imports take longer than all else."""
    for place in PLACES:
        child = os.fork()
        if child == 0:
            try:
                _train(rank, str(Path(folder, place)), place)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def _train(rank: int, folder: str, place: str) -> None:
    """Train; at the last step one rank ends at ``place``. The other writes its error and for how long."""
    join_group(rank, folder, WORLD_SIZE)
    group = dist.group.WORLD
    model = tiny_model("llama")
    patch_model(model, config(group, True), group)
    ids = torch.arange(3, 19).view(1, 16)
    begin = monotonic()

    def dies(step: int, here: str) -> None:
        nonlocal begin
        if step == LAST_STEP and here == place:
            if rank == DYING_RANK:
                os._exit(1)
            begin = monotonic()

    try:
        for step in range(LAST_STEP + 1):
            dies(step, "forward")
            loss = model(input_ids=ids, labels=ids).loss
            dies(step, "backward")
            loss.backward()
            dies(step, "sum")
            allreduce_sequence_parallel_gradients(model, group)
            dies(step, "norm")
            clip_grad_norm(model.parameters(), 1.0, process_group=group)
            model.zero_grad()
    except Exception as error:  # told to the test
        found = {
            "kind": type(error).__name__,
            "text": str(error),
            "step": step,
            "took_s": monotonic() - begin,
        }
        torch.save(found, Path(folder, f"{place}.pt"))


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
