"""The mesh of all processes, what it rejects, and the agreement of the ranks before they begin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_actswap.parallel.mesh import (
    MeshError,
    ParallelMesh,
    build_mesh,
    check_innermost,
    check_processes,
    launch_command,
)
from hf_actswap.parallel.rank_agreement import check_agreement, digest, parameters_fact
from tests.processes import launched, result, run_cases, told

WORLD_SIZE = 4
LIMIT_S, LATE_S = 1.0, 2.5


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


ALONE: dict[str, str] = {}
TOGETHER, REJECTED = [0, 1, 2], "RankAgreementError: "


folder = launched(run_on_rank, WORLD_SIZE, 150)


@pytest.mark.dist
def test_tensor_parallel_ranks_follow_one_another(folder: Path) -> None:
    for rank in range(WORLD_SIZE):
        found = result(folder, "meshes", rank)
        pair = [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
        expected = {
            "names": ("dp_replicate", "tp"),
            "sizes": (2, 2),
            "ranks": (rank // 2, rank % 2),
            "tp": pair,
            "dp": [rank % 2, rank % 2 + 2],
        }
        assert found[2] == expected
        assert found["again"] == {**expected, "names": ("dp_shard", "tp")}
        assert found["total"] == sum(pair)
        assert (found[1]["tp"], found[1]["dp"]) == ([rank], [0, 1, 2, 3])
        assert (found[4]["tp"], found[4]["dp"]) == ([0, 1, 2, 3], [rank])


@pytest.mark.dist
def test_sizes_that_do_not_fit(folder: Path) -> None:
    where = "parallel_config.tensor_parallel_size: expected"
    for rank in range(WORLD_SIZE):
        found = result(folder, "rejections", rank)
        assert f"{where} a whole number from 1 on, found 0." in found["0"]
        assert f"{where} a divisor of 4, the number of processes: one of 1, 2, 4, found 3." in found["3"]
        assert "accelerate launch --multi_gpu --num_processes 6 --num_machines 1 " in found["3"]
        assert f"{where} at most 4, the number of processes, found 8." in found["8"]
        assert "accelerate launch --multi_gpu --num_processes 8 --num_machines 1 " in found["8"]


@pytest.mark.dist
def test_groups_that_are_not_innermost(folder: Path) -> None:
    table = {
        "strided": [[0, 2], [1, 3], [0, 2], [1, 3]],
        "shifted": [[0, 3], [1, 2], [1, 2], [0, 3]],
        "large": [[0, 1, 2, 3]] * WORLD_SIZE,
    }
    for rank in range(WORLD_SIZE):
        found = result(folder, "rejections", rank)
        for name, ranks in table.items():
            for text in (found[name], found[f"{name} mesh"]):
                assert "tensor_parallel_group: expected ranks [0, 1]" in text or "ranks [2, 3]" in text
                assert f"found ranks {ranks[rank]}." in text


def test_two_trainings_that_do_not_know_of_each_other() -> None:
    with pytest.raises(MeshError) as caught:
        check_processes(2, {"WORLD_SIZE": "2"})
    assert "(WORLD_SIZE=2), found no process group." in str(caught.value)
    assert launch_command(2) in str(caught.value)
    with pytest.raises(MeshError, match="Each process would train alone"):
        check_processes(1, {"WORLD_SIZE": "2"})


@pytest.mark.parametrize("environment", [ALONE, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "?"}])
def test_one_process(environment: dict[str, str]) -> None:
    with pytest.raises(MeshError, match="expected a process group, found none") as caught:
        build_mesh(2, environment=environment)
    assert launch_command(2) in str(caught.value)


def test_launch_command() -> None:
    start = "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    for on_cpu in (True, False):
        command = launch_command(2, on_cpu)
        assert command.startswith(start)
        assert command.endswith(" --use_cpu true") is on_cpu


def test_alone_there_is_nobody_to_agree_with() -> None:
    check_agreement({"tp": "1"}, ranks=[0])
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        check_agreement({"tp": "1"})


@pytest.mark.dist
def test_ranks_that_agree(folder: Path) -> None:
    for rank in range(WORLD_SIZE):
        found = result(folder, "agreement", rank)
        assert found["agree"][0] == found["some"][0] == "nothing was raised"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "fact", "values"),
    [
        ("differ", "tp", "2 on ranks 0, 1, 2; 4 on rank 3"),
        ("second differs", "tp", "2 on ranks 0, 1, 2; 3 on rank 3"),
        ("more facts", "extra", "(nothing) on ranks 0, 1, 2; 1 on rank 3"),
        ("models", "parameters", "2 tensors, 12 elements, "),
    ],
)
def test_every_rank_hears_who_differs(name: str, fact: str, values: str, folder: Path) -> None:
    for rank in range(WORLD_SIZE):
        text, seconds = result(folder, "agreement", rank)[name]
        assert text.startswith(f"{REJECTED}1 problem")
        assert f"{fact}: expected the same on all ranks, found {values}" in text
        assert seconds < 10


@pytest.mark.dist
def test_every_rank_hears_who_is_missing(folder: Path) -> None:
    for rank in TOGETHER:
        text, seconds = result(folder, "agreement", rank)["missing"]
        assert text.startswith(REJECTED)
        assert "expected answers from all of ranks 0, 1, 2, 3 within 1 s, found none from rank 3." in text
        assert LIMIT_S <= seconds < LIMIT_S + 5


@pytest.mark.dist
def test_who_comes_too_late_does_not_go_on_alone(folder: Path) -> None:
    for rank in TOGETHER:
        text, seconds = result(folder, "agreement", rank)["late"]
        assert "found none from rank 3." in text
        assert seconds < LATE_S
    text, _ = result(folder, "agreement", 3)["late"]
    assert "ranks: expected agreement of all, found none of ranks 0, 1, 2. They say: ranks: expected" in text


def test_facts_of_a_model() -> None:
    fact = parameters_fact(nn.Linear(2, 3))
    assert fact.startswith("2 tensors, 9 elements, ")
    frozen = nn.Linear(2, 3)
    frozen.bias.requires_grad_(False)
    others = [nn.Linear(3, 2, bias=False), nn.Linear(2, 3).double(), frozen, nn.Sequential(nn.Linear(2, 3))]
    assert len({fact, *map(parameters_fact, others)}) == 5
    assert digest("a") != digest("b")
