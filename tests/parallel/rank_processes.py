"""Runs the cases of a worker on several processes of this machine, all in one launch."""

from __future__ import annotations

import gc
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import finish

PACKAGE = "hf_actswap"
Cases = Mapping[str, Callable[[dist.ProcessGroup | None], object]]
Groups = Mapping[str, list[list[int]]]


def run_cases(rank: int, folder: str, world_size: int, cases: Cases, groups: Groups) -> None:
    """Run the cases whose groups have this rank; write results, or errors' texts, as ``<case>.<rank>.pt``.

    Args:
        groups: case -> the ranks of each of its groups; ``[]``: no group is made, and ``None`` is passed.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    made = {}
    for ranks in [tuple(ranks) for of_case in groups.values() for ranks in of_case]:
        if ranks not in made:
            made[ranks] = dist.new_group(list(ranks))
    try:
        for name, case in cases.items():
            own = next((tuple(ranks) for ranks in groups[name] if rank in ranks), None)
            if own is None and groups[name]:
                continue
            try:
                found: object = case(made[own] if own is not None else None)
            except Exception:  # told to the test of this case; the others go on
                found = f"error: {traceback.format_exc()}"
            torch.save(found, Path(folder, f"{name}.{rank}.pt"))
    finally:
        gc.collect()  # models that cases have left in cycles hold groups, and must go before these
        dist.destroy_process_group()


def launch(worker: Callable[[int, str], None], folder: Path, world_size: int, limit_s: float) -> Path:
    """Run ``worker(rank, folder)`` on each process; fail when they take longer than the limit."""
    arguments = (worker.__module__, worker.__name__, str(folder))
    context = torch.multiprocessing.spawn(_start, arguments, nprocs=world_size, join=False)
    finish(context, limit_s)
    return folder


def _start(rank: int, module: str, name: str, folder: str) -> None:
    """Import the worker without the package's front door: transformers takes longer than all cases."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(Path(__file__).resolve().parents[2] / PACKAGE)]
    sys.modules[PACKAGE] = package
    getattr(importlib.import_module(module), name)(rank, folder)


def result(folder: Path, name: str, rank: int) -> Any:
    """Read one rank's result of a case; fail with its error."""
    found = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
    assert not (isinstance(found, str) and found.startswith("error: ")), found
    return found
