"""Ranks that end in a loop of one's own: within `Prepared.naming_lost_ranks` the others name all of them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

import hf_actswap
from tests.integrations.parallel_runs import Rows, parallel, tiny_llama
from tests.processes import LOST_RANK_LIMIT_S, launched_to_lose_ranks, told
from tests.quick_cases import slow_among

ENDS = {"one": (3,), "one of each model": (1, 3), "outside of the block": (3,)}
"""Which ranks end."""
QUICK = ("one of each model",)


def loses_ranks(folder: Path) -> None:
    """Train until ranks end; write what is said, and how long it took."""
    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared = hf_actswap.prepare(accelerator, model, parallel(2), optimizer)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Rows(16), batch_size=1))
    since = monotonic()

    def loop() -> None:
        nonlocal since
        with nullcontext() if folder.name.startswith("outside") else prepared.naming_lost_ranks():
            for step, batch in enumerate(loader):
                since = monotonic()
                if step == 2 and dist.get_rank() in ENDS[folder.name]:
                    os._exit(1)
                accelerator.backward(prepared.model(**batch).loss)
                prepared.optimizer.step()
                prepared.optimizer.zero_grad()

    torch.save((told(loop), monotonic() - since), folder / f"said.{dist.get_rank()}.pt")
    os._exit(0)


LOSING = {"lost": loses_ranks}


pytestmark = pytest.mark.dist

lost = launched_to_lose_ranks(f"{__name__}:LOSING", 4, 90, ENDS, QUICK)
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
        assert f"answer. No sign within {LOST_RANK_LIMIT_S:g} s of: {ranks}. Look for" in said, said
        assert took_s < 15


@pytest.mark.slow
def test_outside_of_the_block_the_error_names_it(lost: Path) -> None:
    said, _ = torch.load(lost / OUTSIDE / "said.2.pt", weights_only=False)
    assert "a collective of ranks [2, 3] failed" in said
    assert (
        f"No sign within {LOST_RANK_LIMIT_S:g} s of: rank 3. Only the ranks of this collective were asked"
        in said
    )
    assert "`with prepared.naming_lost_ranks():`" in said
