"""Two ranks on rehearsed devices (`make rehearse`): what their collectives compute in all orders, what DDP,
FSDP2, the pipeline and tensor parallelism train beside one process, and how faults of ranks end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from hf_actswap.rehearsal import Options, build, environment
from tests.rehearsal.rank_cases import CASES, ORDERS, SIZE

pytestmark = pytest.mark.rehearsal

LIMIT_S = 900


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what both ranks wrote; processes that take too long are killed."""
    folder = tmp_path_factory.mktemp("ranks")
    settings = environment(Options("A100-40", devices=SIZE, arithmetic="all"), build())
    processes = []
    for rank in range(SIZE):
        command = [sys.executable, "-m", "tests.rehearsal.rank_cases", str(rank), str(folder)]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(command, env=settings, cwd=Path(__file__).parents[2], stdout=log, stderr=log)
            )
    end = monotonic() + LIMIT_S
    try:
        codes = [process.wait(max(end - monotonic(), 1)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * SIZE, "\n".join(
        (folder / f"{rank}.log").read_text()[-3000:] for rank in range(SIZE)
    )
    return folder


def of_rank(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"cases.{rank}.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_all_is_right_on_both_ranks(ranks: Path, case: str, order: str, seed: int) -> None:
    found = [of_rank(ranks, rank)[f"{case} {order} {seed}"] for rank in range(SIZE)]
    assert found == [[]] * SIZE


def test_a_result_that_is_read_too_early_is_found(ranks: Path) -> None:
    for rank in range(SIZE):
        values, race = of_rank(ranks, rank)["missing_wait"]
        assert values == "values 1.0", "the collective had not written yet"
        assert "all_reduce" in race


@pytest.mark.parametrize(
    ("fault", "rank", "text"),
    [
        ("disagree", 0, "rank 0 launched all_reduce of 4 float32 (sum), rank 1 all_reduce of 5 float32"),
        ("never_launched", 0, "of a group of 2 ranks: rank 1 did not launch it within 4 s"),
        ("ended", 0, "rank 1 has ended (remote process exited)"),
        ("never_joins", 0, "of 2 ranks of a group these did not come within 4 s: 1"),
        ("one_device", 1, "ranks 1 and 0 of a group are both on device 0"),
    ],
)
def test_a_fault_of_a_rank_ends_in_an_error_that_names_it(
    ranks: Path, fault: str, rank: int, text: str
) -> None:
    assert text in (ranks / f"{fault}.{rank}.err").read_text()
