"""Runs the cases of the layer tests in each process; a module of its own, because it is started afresh.

A case is a function ``case_..(group)`` that asserts. What each rank found (``ok``, or the traceback) is
written down, so that all cases run in one launch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.parallel import column_input_cases, layer_cases, neox_cases, sharded_module_cases

Case = Callable[[dist.ProcessGroup], None]
OK = "ok"
MODULES: tuple[ModuleType, ...] = (layer_cases, sharded_module_cases, column_input_cases, neox_cases)


def cases() -> dict[str, Case]:
    """All cases by name, in order."""
    return {
        name.removeprefix("case_"): value
        for module in MODULES
        for name, value in vars(module).items()
        if name.startswith("case_")
    }


def run_on_rank(rank: int, world_size: int, folder: str) -> None:
    """Run each case on ``world_size`` processes and write ``<case>.<rank>.txt``."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    try:
        for name, case in cases().items():
            torch.manual_seed(0)
            try:
                case(group)
                found = OK
            except (Exception, pytest.fail.Exception):  # told to the test of this case; the others go on
                found = traceback.format_exc()
            failed = torch.tensor(found != OK, dtype=torch.int)
            dist.all_reduce(failed, group=group)
            if failed and found == OK:
                found = "another rank failed"
            Path(folder, f"{name}.{rank}.txt").write_text(found)
    finally:
        dist.destroy_process_group()
