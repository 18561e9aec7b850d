"""FSDP2 over the data axis with tensor parallelism inside: 2 x 2 processes train as one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.data_sharding_worker import CASES, DATA_PARALLEL, STEPS, WORLD_SIZE, run_on_rank
from tests.processes import launched, of_ranks, result

LIMIT_S = 240
TOLERANCE = 1e-5

pytestmark = [pytest.mark.dist, pytest.mark.slow]  # four processes

TRAINED = [name for name, case in CASES.items() if case.reduced]


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S)


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, results: Path) -> None:
    """Losses, norms, every gradient and every weight of one process; replicas bitwise the same."""
    for found in of_ranks(results, name):
        assert len(found.losses) == STEPS * CASES[name].accumulation
        for losses in (found.losses, found.norms):
            assert [one for one, _ in losses] == pytest.approx([of for _, of in losses], rel=TOLERANCE)
        assert {key: error for key, error in found.gradient_errors.items() if error > TOLERANCE} == {}
        assert {key: error for key, error in found.weight_errors.items() if error > TOLERANCE} == {}
        assert found.drift == []


@pytest.mark.parametrize("name", TRAINED)
def test_state(name: str, results: Path) -> None:
    """Every parameter is sharded; whole tensors load into another sharded model, bitwise."""
    for found in of_ranks(results, name):
        assert found.plain == []
        assert found.reloaded == []
        assert found.local_bytes < found.part_bytes / DATA_PARALLEL * 1.1


@pytest.mark.parametrize("name", TRAINED)
def test_tags(name: str, results: Path) -> None:
    """On the shards at once where ours shards, in the first forward where the user does."""
    for found in of_ranks(results, name):
        before, after = found.tagged
        assert (before != ()) is CASES[name].sequence_parallel
        if not CASES[name].by_hand:
            assert after == before


def test_a_loop_that_accelerate_drives(results: Path) -> None:
    for found in of_ranks(results, "prepared"):
        assert len(found.losses) == len(found.norms) == STEPS
        for pairs in (found.losses, found.norms):
            assert [one for one, _ in pairs] == pytest.approx([of for _, of in pairs], rel=TOLERANCE)
        assert {key: error for key, error in found.weight_errors.items() if error > TOLERANCE} == {}
        assert found.drift == found.plain == []


def test_without_the_sum_gradients_are_wrong(results: Path) -> None:
    for found in of_ranks(results, "not_reduced"):
        wrong = {name for name, error in found.gradient_errors.items() if error > 1e-2}
        assert any(name.endswith("q_norm.weight") for name in wrong)
        assert "model.norm.weight" in wrong
        assert not any(name.endswith("proj.weight") for name in wrong)


def test_a_mesh_with_the_tensor_axis_in_it(results: Path) -> None:
    for rank in range(WORLD_SIZE):
        found = result(results, "wrong_mesh", rank)
        first = rank // 2 * 2
        assert "mesh: expected the data axis alone, found 2 axes" in found["both axes"]
        assert f"found ranks [{first}, {first + 1}] in it" in found["world"]
