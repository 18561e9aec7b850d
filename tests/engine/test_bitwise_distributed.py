"""Two processes under DistributedDataParallel: each rank's losses and gradients are those without a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.ddp_worker import STEPS, WORLD_SIZE, adapters_plans, plans, train_on_rank
from tests.engine.tiny_models import SWAP_CASES, assert_bitwise_equal
from tests.processes import launched, of_ranks

LIMIT_S = 200


results = launched(train_on_rank, WORLD_SIZE, LIMIT_S)


@pytest.mark.dist
@pytest.mark.parametrize("name", [*(name for name in plans() if name != "nothing"), "case_4_before_wrapping"])
def test_each_rank_has_the_numbers_of_plain_training(name: str, results: Path) -> None:
    for found, bare in zip(of_ranks(results, name), of_ranks(results, "nothing"), strict=True):
        (losses, grads, moved_bytes), (bare_losses, bare_grads, _) = found, bare
        assert losses == bare_losses
        assert len(grads) == len(bare_grads) == STEPS
        for one, other in zip(grads, bare_grads, strict=True):
            assert_bitwise_equal(one, other)
        others = ("everything_swapped", "inputs_swapped", "case_4_before_wrapping")
        swaps = name in SWAP_CASES or name in others
        assert (moved_bytes > 0) == swaps


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in adapters_plans() if name != "adapters"])
def test_frozen_weights_on_the_host_under_data_parallelism(name: str, results: Path) -> None:
    for found, bare in zip(of_ranks(results, name), of_ranks(results, "adapters"), strict=True):
        (losses, grads, moved_bytes), (bare_losses, bare_grads, _) = found, bare
        assert losses == bare_losses
        for one, other in zip(grads, bare_grads, strict=True):
            assert one.keys() == other.keys()
            assert all("lora_" in adapter for adapter in one)
            assert_bitwise_equal(one, other)
        assert moved_bytes > 0
    (_, grads, _), (_, other_grads, _) = of_ranks(results, name)
    assert_bitwise_equal(grads[-1], other_grads[-1])


@pytest.mark.dist
def test_the_ranks_see_different_data_and_share_their_gradients(results: Path) -> None:
    (losses, grads, _), (other_losses, other_grads, _) = of_ranks(results, "nothing")
    assert losses != other_losses
    assert_bitwise_equal(grads[-1], other_grads[-1])
