"""Trainings of stages in which something is wrong or unusual: none waits for ever, errors name the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pipeline.faults_worker import ENDS, LIMIT_S, QUICK, lose_ranks, stream_trained
from tests.processes import launch_trainers, launched, result
from tests.quick_cases import slow_among

pytestmark = pytest.mark.dist

WORKER = "tests.pipeline.faults_worker"
LAUNCH_S = 60


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what three stages found."""
    return launch_trainers(f"{WORKER}:THREE", tmp_path_factory.mktemp("three"), 3, LAUNCH_S)


def test_groups_of_some_ranks_alone_stop_no_training(three: Path) -> None:
    """Before a training, within it (tied weights) and after it."""
    first = result(three, "groups", 0)
    assert len(first[0]) == 1
    assert first[0] == first[1]
    for rank in (1, 2):
        assert result(three, "groups", rank) == [*first, 3]


def test_an_error_that_no_lost_rank_causes_is_left_alone(three: Path) -> None:
    assert result(three, "none lost", 0) == "RuntimeError: DataLoader timed out after 3 seconds"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "training",
            "batches in an epoch: expected the same on all ranks, found 9 (18 samples) on ranks 0, 2; "
            "12 (24 samples) on rank 1.",
        ),
        (
            "stream",
            "micro-batches of this step: expected the same on all ranks, found 0 on ranks 0, 2; 3 on rank 1.",
        ),
        (
            "evaluation",
            "batches of the evaluation: expected the same on all ranks, found 3 (7 samples) on ranks 0, 2; "
            "3 (8 samples) on rank 1.",
        ),
        (
            "evaluation of a stream",
            "batches of the evaluation: expected the same on all ranks, found 2 on ranks 0, 2; 3 on rank 1.",
        ),
    ],
)
def test_ranks_with_datasets_of_other_lengths(name: str, said: str, three: Path) -> None:
    for rank in range(3):
        found = result(three, "lengths", rank)[name]
        assert found.startswith("RankAgreementError: ")
        assert said in found


def test_shared_gradients_are_summed_once_where_an_epoch_ends_in_mid_step(
    three: Path, tmp_path: Path
) -> None:
    expected = stream_trained(tmp_path, 1)
    assert len(expected) == 3
    for rank in range(3):
        for found, wanted in zip(result(three, "stream trained", rank), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)


def test_an_evaluation_of_a_stream_weighs_the_last_batch_by_its_samples(three: Path) -> None:
    for rank in range(3):
        sized, stream = result(three, "stream evaluated", rank)
        assert sized == stream


def test_a_model_that_is_cut_already_is_rejected(three: Path) -> None:
    for rank in range(3):
        said = result(three, "cut before", rank)
        assert "model: expected a whole model, found one that another training has cut into stages." in said


lost = launched(lose_ranks, 3, LAUNCH_S, told_of_slow=True)


@pytest.mark.parametrize("how", slow_among(ENDS, set(ENDS) - set(QUICK)))
def test_the_rank_that_has_ended_is_named_and_no_other(how: str, lost: Path) -> None:
    ended = ENDS[how]
    cause = {
        "raised": "Rank 1 has left the training: ValueError: of this rank alone. Look for",
        "interrupted": "Rank 1 has left the training: KeyboardInterrupt. Look for",
    }.get(how, f"answer. No sign within {LIMIT_S:g} s of: rank {ended}. Look for")
    for rank in {0, 1, 2} - {ended}:
        said, took_s = torch.load(lost / how / f"said.{rank}.pt", weights_only=False)
        assert said.startswith(f"LostRankError: rank {rank}: a collective of ranks [0, 1, 2] failed"), said
        assert cause in said, said
        assert took_s < 15
