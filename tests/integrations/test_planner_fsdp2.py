"""Two processes: the planner beside FSDP2 by Accelerate's plugin, in a loop and in the Trainer."""

from __future__ import annotations

from itertools import product

import pytest

from tests.integrations.planner_fsdp2_worker import STEPS, Run
from tests.processes import launch_trainers, result

WORKER = "tests.integrations.planner_fsdp2_worker:CASES"

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Run]]:
    """By rank."""
    folder = launch_trainers(WORKER, tmp_path_factory.mktemp("fsdp2_plugin"), 2, 240)
    return [result(folder, "planned", rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("where", "mode"), [*product(("loop", "trainer"), ("smart_swap", "adaptive")), ("loop", "states")]
)
def test_losses_are_those_without_the_planner(runs: list[dict[str, Run]], where: str, mode: str) -> None:
    for of_rank in runs:
        plain, found = of_rank[where], of_rank[f"{where}, {mode}"]
        assert plain.sharded
        assert found.sharded
        assert len(plain.losses) == STEPS
        assert found.losses == plain.losses
        assert found.phases == ["warm-up", "warm-up", "search", "search", *["stable"] * (STEPS - 4)]
        assert found.rows > 0
        assert found.left_over == 0
    assert runs[0][f"{where}, {mode}"].rows == runs[1][f"{where}, {mode}"].rows
