"""Two processes under DistributedDataParallel: each rank's losses and gradients are those without a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.ddp_worker import GROUPS, STEPS, WORLD_SIZE, train_on_rank
from tests.engine.tiny_models import SWAP_CASES, assert_bitwise_equal
from tests.processes import launched, of_ranks

LIMIT_S = 200


results = launched(train_on_rank, WORLD_SIZE, LIMIT_S)


BARE = {name: bare for bare, (_, plans) in GROUPS.items() for name in plans}
"""What is trained -> the same without a plan."""


@pytest.mark.dist
@pytest.mark.parametrize("name", BARE)
def test_each_rank_has_the_numbers_of_plain_training(name: str, results: Path) -> None:
    """Adapters have the weights that they leave alone on the host."""
    for found, bare in zip(of_ranks(results, name), of_ranks(results, BARE[name]), strict=True):
        (losses, grads, moved_bytes), (bare_losses, bare_grads, _) = found, bare
        assert losses == bare_losses
        assert len(grads) == len(bare_grads) == STEPS
        for one, other in zip(grads, bare_grads, strict=True):
            assert_bitwise_equal(one, other)
            assert BARE[name] != "adapters" or all("lora_" in adapter for adapter in one)
        others = ("everything_swapped", "inputs_swapped", "case_4_before_wrapping", *GROUPS["adapters"][1])
        assert (moved_bytes > 0) == (name in SWAP_CASES or name in others)
    (_, grads, _), (_, other_grads, _) = of_ranks(results, name)
    assert_bitwise_equal(grads[-1], other_grads[-1])


@pytest.mark.dist
def test_the_ranks_see_different_data_and_share_their_gradients(results: Path) -> None:
    (losses, grads, _), (other_losses, other_grads, _) = of_ranks(results, "nothing")
    assert losses != other_losses
    assert_bitwise_equal(grads[-1], other_grads[-1])
