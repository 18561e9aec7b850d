"""What each process of the mesh tests runs; a module of its own, because it is started afresh."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_actswap.errors import ActSwapError
from hf_actswap.parallel.mesh import ParallelMesh, build_mesh, check_innermost
from hf_actswap.parallel.rank_agreement import check_agreement, parameters_fact
from tests.processes import run_cases

WORLD_SIZE = 4
LIMIT_S, LATE_S = 1.0, 2.5


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except (ActSwapError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def meshes(_: dist.ProcessGroup | None) -> dict[str, Any]:
    def described(mesh: ParallelMesh) -> dict[str, Any]:
        return {
            "names": mesh.device_mesh.mesh_dim_names,
            "sizes": (mesh.data_parallel_size, mesh.tensor_parallel_size),
            "ranks": (mesh.data_parallel_rank, mesh.tensor_parallel_rank),
            "tp": dist.get_process_group_ranks(mesh.tensor_parallel_group),
            "dp": dist.get_process_group_ranks(mesh.data_parallel_group),
        }

    found: dict[str, Any] = {size: described(build_mesh(size)) for size in (1, 2, 4)}
    mesh = build_mesh(2, "dp_shard", "cpu")
    found["again"] = described(build_mesh(2, "dp_shard", "cpu", mesh.tensor_parallel_group))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh.tensor_parallel_group)
    found["total"] = total.item()
    return found


def rejections(_: dist.ProcessGroup | None) -> dict[str, str]:
    found = {str(size): told(lambda size=size: build_mesh(size)) for size in (0, 3, 8)}
    rank = dist.get_rank()
    tables = {"strided": [[0, 2], [1, 3]], "shifted": [[1, 2], [0, 3]], "large": [[0, 1, 2, 3]]}
    for name, table in tables.items():
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in table}
        own = next(group for ranks, group in groups.items() if rank in ranks)
        found[name] = told(lambda own=own: check_innermost(own, 2))
        found[f"{name} mesh"] = told(lambda own=own: build_mesh(2, tensor_parallel_group=own))
    return found


def agreement(_: dist.ProcessGroup | None) -> dict[str, tuple[str, float]]:
    """What every rank is told, and after how many seconds; rank 3 is the odd one."""
    rank, found = dist.get_rank(), {}

    def timed(name: str, call: Callable[[], object]) -> None:
        dist.barrier()
        begin = monotonic()
        text = told(call)
        found[name] = text, monotonic() - begin

    def check(name: str, limit_s: float = 20.0, **facts: str) -> None:
        check_agreement(facts, limit_s, name)

    odd = rank == 3
    timed("agree", lambda: [check("agree", tp="2", config="abc") for _ in range(3)])
    timed("differ", lambda: check("differ", tp="4" if odd else "2", config="abc"))
    timed("second differs", lambda: [check("second", tp="2"), check("second", tp="3" if odd else "2")])
    model = nn.Linear(2, 3 if odd else 4)
    timed("models", lambda: check("models", parameters=parameters_fact(model)))
    timed("more facts", lambda: check("more", tp="2", **({"extra": "1"} if odd else {})))
    timed("missing", lambda: None if odd else check("missing", LIMIT_S, tp="2"))
    timed("late", lambda: [sleep(LATE_S if odd else 0), check("late", LIMIT_S, tp="2")])
    timed("some", lambda: None if odd else check_agreement({"tp": "2"}, 20.0, "some", [0, 1, 2]))
    return found


CASES = {"meshes": meshes, "rejections": rejections, "agreement": agreement}


def run_on_rank(rank: int, folder: str) -> None:
    run_cases(rank, folder, WORLD_SIZE, CASES)
