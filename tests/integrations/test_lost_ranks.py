"""Ranks that end in a loop of one's own: within `Prepared.naming_lost_ranks` the others name all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.lost_ranks_worker import ENDS, LIMIT_S, QUICK, lose_ranks
from tests.processes import launched
from tests.quick_cases import slow_among

pytestmark = pytest.mark.dist

lost = launched(lose_ranks, 4, 90, told_of_slow=True)
OUTSIDE = "outside of the block"


@pytest.mark.parametrize(
    "how", slow_among([name for name in ENDS if name != OUTSIDE], set(ENDS) - set(QUICK))
)
def test_each_rank_names_all_that_have_ended_and_no_other(how: str, lost: Path) -> None:
    ended = ENDS[how]
    for rank in {0, 1, 2, 3} - set(ended):
        said, took_s = torch.load(lost / how / f"said.{rank}.pt", weights_only=False)
        assert said.startswith(f"LostRankError: rank {rank}: a collective of ranks ["), said
        ranks = ", ".join(f"rank {other}" for other in ended)
        assert f"answer. No sign within {LIMIT_S:g} s of: {ranks}. Look for" in said, said
        assert took_s < 15


@pytest.mark.slow
def test_outside_of_the_block_the_error_names_it(lost: Path) -> None:
    said, _ = torch.load(lost / OUTSIDE / "said.2.pt", weights_only=False)
    assert "a collective of ranks [2, 3] failed" in said
    assert f"No sign within {LIMIT_S:g} s of: rank 3. Only the ranks of this collective were asked" in said
    assert "`with prepared.naming_lost_ranks():`" in said
