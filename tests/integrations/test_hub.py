"""`actswap="org/name@revision"`: one commit for all ranks, downloaded once, and kept with the run."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_actswap import ActSwapTrainingArguments, ConfigError, MemoryPlan

from ..hub_server import TOKEN, HubServer, hub_server

CONFIG = {"actswap_config.yaml": "log: full\nswap_config: {swap: true}\n"}
LAUNCH = [
    *("--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(monkeypatch, str(tmp_path / "cache")) as server:
        yield server


def arguments(tmp_path: Path, actswap: str) -> ActSwapTrainingArguments:
    return ActSwapTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", actswap=actswap)


def test_the_arguments_keep_the_commit(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository("org/name")
    commit = repository.put(CONFIG, tag="v1")
    args = arguments(tmp_path, "org/name@v1")
    assert args.actswap == args.to_dict()["actswap"] == f"org/name@{commit}"
    hub.close()
    assert args.actswap_config().swap_config.swap is True
    assert arguments(tmp_path, args.actswap).actswap == args.actswap


def test_a_folder_of_that_name_stays(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "actswap_config.yaml").write_text(CONFIG["actswap_config.yaml"])
    assert arguments(tmp_path, "org/name").actswap == "org/name"
    assert hub.requests == []


def test_no_such_repository(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no repository org/nothing"):
        arguments(tmp_path, "org/nothing")


def test_the_session_of_the_page(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    plan = json.loads(MemoryPlan(rows=(), num_layers=32).to_json())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text(json.dumps({**plan, "made_for": {"model": "llama"}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    page = (repository / "docs" / "hub.md").read_text().replace("https://...", "http://...")
    session = doctest.DocTestParser().get_doctest(page, {}, "docs/hub.md", None, 0)
    assert len(session.examples) > 10
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(session, out=said.append).failed == 0, "".join(said)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(200)
def test_two_processes_take_one_commit(hub: HubServer, tmp_path: Path, repository: Path) -> None:
    commit = hub.repository("org/name").put(CONFIG)
    hub.faults.moves_on = True
    environment = {
        **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(repository),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
    }
    script = repository / "tests" / "integrations" / "hub_run.py"
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, str(script), str(tmp_path / "r")]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr[-4000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"r.{rank}").read_text())
        assert found["actswap"] == f"org/name@{commit}"
        assert found["swap"] is True
        assert f"org/name on the Hub is read at commit {commit}." in found["log"]
        assert "has no repository org/nothing" in found["error"]
    # Rank 0 asked for size and commit, then for the file; nobody else asked for anything.
    path = "org/name/resolve/main/actswap_config.yaml"
    asked = [(request.method, request.path) for request in hub.requests if "org/name/" in request.path]
    assert asked == [("HEAD", path), ("HEAD", path), ("GET", path)]
    assert hub.repositories["org/name"].refs["main"] != commit
    assert f"The configuration org/name@main is org/name@{commit}." in run.stderr
    saved = torch.load(tmp_path / "out" / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.actswap == f"org/name@{commit}"
