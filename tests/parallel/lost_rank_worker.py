"""What two processes run: one of them ends in mid-training, and the other says so."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist

from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients, clip_grad_norm
from hf_actswap.parallel.patch_model import patch_model
from tests.parallel.patch_worker import config
from tests.parallel.patched_models import tiny_model
from tests.processes import join_group

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
