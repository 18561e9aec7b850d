"""The plan of a divided model is in its checkpoints, and a training that goes on from one uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.trainer_worker import Run
from tests.processes import launch_trainers, result

pytestmark = pytest.mark.dist

LIMIT_S = 200


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, and two ranks that hold the model together; each trains and goes on."""
    folder = tmp_path_factory.mktemp("trainings")
    launch_trainers("tests.pipeline.trainer_worker:CHECKPOINT_PLANS", folder, 2, LIMIT_S)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "files"),
    [
        ("stages", 2, {"actswap_plan.stage_0.json", "actswap_plan.stage_1.json"}),
        ("parts", 1, {"actswap_plan.json"}),
    ],
)
def test_a_training_that_goes_on_uses_the_plan_of_its_checkpoint(
    name: str, stages: int, files: set[str], runs: Path
) -> None:
    checkpoint = runs / f"{name} kept 1f1b {stages}" / "checkpoint-6"
    assert {path.name for path in checkpoint.glob("actswap_plan*")} == files
    for rank in range(2):
        kept, resumed = result(runs, name, rank)
        assert isinstance(kept, Run)
        assert resumed.losses[:6] == kept.losses
        assert len(resumed.losses) == 8
    for folder in ("actswap", "actswap/stage_1")[:stages]:
        searched = {
            case: bool(
                json.loads((runs / f"{name} {case} 1f1b {stages}" / folder / "planner.json").read_text())[
                    "trials"
                ]
            )
            for case in ("kept", "resumed")
        }
        assert searched == {"kept": True, "resumed": False}
