"""What four processes run, two for each model: ranks end in a loop of Accelerate's."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist
from accelerate import Accelerator

import hf_actswap
from hf_actswap.parallel import rank_agreement
from tests.integrations.parallel_runs import Rows, parallel, tiny_llama, told
from tests.processes import run_trainers_in_fork

ENDS = {"one": (3,), "one of each model": (1, 3), "outside of the block": (3,)}
"""Which ranks end."""
QUICK = ("one of each model",)
LIMIT_S = 2.0
"""How long the others wait for an answer."""


def lose_ranks(slow: bool, rank: int, folder: str) -> None:
    """Run each case, every rank in a process of its own."""
    rank_agreement.ANSWER_LIMIT_S = LIMIT_S
    for name in ENDS if slow else QUICK:
        run_trainers_in_fork(f"{__name__}:LOSING", 4, rank, Path(folder, name))


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
