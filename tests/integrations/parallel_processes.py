"""Runs a function of Trainers on several processes of this machine, as a launcher would start them."""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import finish

Cases = Mapping[str, Callable[[Path], object]]
"""What each process runs, in order; it gets a folder that all processes of the launch share."""

COLLECTIVE_LIMIT_S = 90


def launch(cases: str, folder: Path, world_size: int, limit_s: float) -> Path:
    """Run the ``CASES`` of a module on each process; fail when they take longer than the limit.

    Args:
        cases: ``module:name`` of the cases.
    """
    store = tempfile.mkdtemp(dir=folder)  # a used one would bring the processes of an earlier launch back
    context = torch.multiprocessing.spawn(
        _run, (cases, str(folder), store, world_size), nprocs=world_size, join=False
    )
    finish(context, limit_s)
    return folder


def result(folder: Path, name: str, rank: int = 0) -> Any:
    """Read one rank's result of a case; fail with its error."""
    found = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
    assert not (isinstance(found, str) and found.startswith("error: ")), found
    return found


def _run(rank: int, cases: str, folder: str, store_folder: str, world_size: int) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(store_folder, "store")), world_size)
    limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    module, _, name = cases.partition(":")
    try:
        for case, run in getattr(importlib.import_module(module), name).items():
            try:
                found: object = run(Path(folder))
            except Exception:  # told to the test of this case; the others go on
                found = f"error: {traceback.format_exc()}"
            torch.save(found, Path(folder, f"{case}.{rank}.pt"))
    finally:
        dist.destroy_process_group()
