"""Runs the cases of the layer tests in each process: functions ``case_..(group)`` that assert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist

from tests.parallel import column_input_cases, layer_cases, neox_cases, sharded_module_cases
from tests.processes import run_cases

Case = Callable[[dist.ProcessGroup | None], None]
MODULES: tuple[ModuleType, ...] = (layer_cases, sharded_module_cases, column_input_cases, neox_cases)


def cases() -> dict[str, Case]:
    """All cases by name, in order."""
    return {
        name.removeprefix("case_"): partial(_seeded, value)
        for module in MODULES
        for name, value in vars(module).items()
        if name.startswith("case_")
    }


def _seeded(case: Case, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    case(group)


def run_on_two(rank: int, folder: str) -> None:
    run_cases(rank, folder, 2, cases(), {name: [[0, 1]] for name in cases()})


def run_on_four(rank: int, folder: str) -> None:
    run_cases(rank, folder, 4, cases(), {name: [[0, 1, 2, 3]] for name in cases()})
