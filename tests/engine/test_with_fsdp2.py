"""Two processes under FSDP2: the gradients are those of FSDP2 alone, and gathered weights never move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.fsdp2_worker import CASES_RUN, WORLD_SIZE, Case, Result, run_on_rank
from tests.engine.tiny_models import assert_bitwise_equal
from tests.processes import launched, result

LIMIT_S = 120

pytestmark = pytest.mark.dist


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S)


def result_of(case: Case, rank: int, folder: Path) -> Result:
    return result(folder, case.file_stem, rank)


PLANNED = [case for case in CASES_RUN if case.plan != "nothing"]
SHARDED = [case for case in PLANNED if case.sharding != "whole"]


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.file_stem)
def test_each_rank_has_the_gradients_of_fsdp2_alone(case: Case, results: Path) -> None:
    """Catches reloaded weights, collectives in another order, and gathered memory that FSDP2 took away."""
    for rank in range(WORLD_SIZE):
        found = result_of(case, rank, results)
        bare = result_of(Case("nothing", case.sharding), rank, results)
        assert found.losses == bare.losses
        assert_bitwise_equal(found.grads, bare.grads)
        assert found.left_over == (0, 0)


@pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.file_stem)
def test_weights_are_never_swapped(case: Case, results: Path) -> None:
    """Catches storages of parameters that are collected before FSDP2 has gathered them."""
    for rank in range(WORLD_SIZE):
        found = result_of(case, rank, results)
        assert found.weights_moved == []
        assert found.offloaded_bytes == result_of(Case(case.plan, "whole"), rank, results).offloaded_bytes


def test_the_ranks_see_different_data_and_hold_different_shards(results: Path) -> None:
    """The comparisons above mean something: sharding happened, and so did the plans."""
    first, second = (result_of(Case("nothing"), rank, results) for rank in range(WORLD_SIZE))
    assert first.losses != second.losses
    name = "model.layers.1.mlp.up_proj.weight"
    whole = result_of(Case("nothing", "whole"), 0, results).grads[name]
    assert first.grads[name].shape == second.grads[name].shape == (whole.shape[0] // 2, whole.shape[1])
    assert not torch.equal(first.grads[name], second.grads[name])
    for case in PLANNED:
        if "swapped" in case.plan and case.sharding == "whole":
            assert result_of(case, 0, results).offloaded_bytes > 0
