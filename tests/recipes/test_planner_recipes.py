"""The recipe with the planner: its two files, its two flags, one and two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .test_end_to_end import TINY, launch, losses

SHORT = ["--max_steps", "10", "--do_eval", "false"]


@pytest.fixture(scope="module")
def plain(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("plain")
    ran = launch(repository, output, *TINY, *SHORT, "--actswap", "none")
    assert ran.returncode == 0, ran.stderr[-3000:]
    return output


def planned_file(folder: Path, mode: str, reduce_by_gib: float = 0.004) -> str:
    """A recipe's file like ours, for the tiny model."""
    memory = {
        "mode": mode,
        "reduce_by_gib": reduce_by_gib,
        "warmup_steps": 2,
        "search_steps": 2,
        "min_tensor_mib": 0.01,
        "plan_file": str(folder / "plan.json"),
    }
    path = folder / "planned.json"
    path.write_text(json.dumps({"memory": memory}))
    return str(path)


def assert_three_stages(stderr: str, mode: str) -> None:
    places = [
        stderr.index(f"{mode}: {stage}") for stage in ("warm-up, 2 step", "search (2 steps", "stable: ")
    ]
    assert places == sorted(places)
    assert "Decided in step 4" in stderr  # the table of the plan


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["smart_swap", "adaptive"])
def test_losses_are_those_without(plain: Path, repository: Path, tmp_path: Path, mode: str) -> None:
    output = tmp_path / "out"
    ran = launch(repository, output, planned_file(tmp_path, mode), *TINY, *SHORT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert_three_stages(ran.stderr, mode)
    assert losses(output) == losses(plain)
    assert json.loads((tmp_path / "plan.json").read_text())["rows"]
    again = launch(repository, output, planned_file(tmp_path, mode), *TINY, *SHORT)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "nothing is searched" in again.stderr
    assert losses(output) == losses(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "mode"), [("--smart-swap", "smart_swap"), ("--adaptive-memory-optimization", "adaptive")]
)
def test_the_flags(plain: Path, repository: Path, tmp_path: Path, flag: str, mode: str) -> None:
    ran = launch(repository, tmp_path, *TINY, *SHORT, flag)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"{mode}: stable: " in ran.stderr
    assert losses(tmp_path) == losses(plain)


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes(repository: Path, tmp_path: Path) -> None:
    ran = launch(repository, tmp_path / "plain", *TINY, *SHORT, "--actswap", "none", processes=2)
    assert ran.returncode == 0, ran.stderr[-3000:]
    ran = launch(
        repository, tmp_path / "out", planned_file(tmp_path, "smart_swap"), *TINY, *SHORT, processes=2
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert_three_stages(ran.stderr, "smart_swap")
    assert losses(tmp_path / "out") == losses(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_that_hold_one_model(repository: Path, tmp_path: Path) -> None:
    document = json.loads(Path(planned_file(tmp_path, "smart_swap", 0.001)).read_text())
    divided = {"parallel_config": {"tensor_parallel_size": 2, "sequence_parallel_enabled": True}}
    for name, content in (("plain", divided), ("planned", {**divided, **document})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        ran = launch(repository, tmp_path / name, str(tmp_path / f"{name}.json"), *TINY, *SHORT, processes=2)
        assert ran.returncode == 0, ran.stderr[-3000:]
    assert_three_stages(ran.stderr, "smart_swap")
    assert losses(tmp_path / "planned") == losses(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smart_swap", "adaptive_memory"])
def test_the_files_as_they_are(repository: Path, tmp_path: Path, name: str) -> None:
    recipe = (repository / "recipes" / f"{name}.yaml").read_text()
    copy = tmp_path / f"{name}.yaml"
    copy.write_text(recipe.replace(f"output/{name}/plan.json", str(tmp_path / "plan.json")))
    short = ["--max_steps", "13", "--do_eval", "false", "--disable_tqdm", "true"]
    ran = launch(repository, tmp_path / "out", str(copy), *short)
    assert ran.returncode == 0, ran.stderr[-3000:]
    mode = "adaptive" if name == "adaptive_memory" else name
    assert f"{mode}: stable: " in ran.stderr
