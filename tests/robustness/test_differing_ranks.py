"""One rank has another configuration, a malformed one, or no checkpoint: both end, and say which rank."""

from __future__ import annotations

import json
from pathlib import Path
from socket import socket
from time import monotonic
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_actswap.releases import loss_is_scaled_by_data_ranks
from tests.robustness.differing_ranks import FRESH, TOGETHER, run_cases
from tests.robustness.ranks import run_recipe, started

LIMIT_S, MOST_S = 90, 30.0

pytestmark = [pytest.mark.dist, pytest.mark.timeout(LIMIT_S + 30)]

Found = list[dict[str, tuple[Any, float]]]


def run(names: list[str], folder: Path, store: dict[str, str] | None = None) -> Found:
    with started(run_cases, [(names, str(folder), store or {})] * 2, folder) as running:
        codes = running.exit_codes(LIMIT_S)
        assert codes == [0, 0], running.log.read_text()[-3000:]
        return [json.loads(report.read_text()) for report in running.reports]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(list(TOGETHER), tmp_path_factory.mktemp("together"))


def assert_named(name: str, found: Found) -> None:
    if "divided" in name and not loss_is_scaled_by_data_ranks():
        pytest.skip("it needs transformers 5.16")
    (of_right, right_s), (of_odd, odd_s) = (of_rank[name] for of_rank in found)
    assert max(right_s, odd_s) < MOST_S
    assert of_right.startswith("RankAgreementError: "), of_right
    if "malformed" in name or "such file" in name:
        assert of_odd.startswith("ConfigError: 1 problem in the configuration"), of_odd
        said = "none.yaml" if "file" in name or name.startswith("ActSwap") else "swap_config.swapp: expected"
        assert "rank 1: expected no error on any rank, found ConfigError: " in of_right
        assert said in of_right
        return
    assert of_odd.startswith("RankAgreementError: "), of_odd
    key = (
        "resume_from_checkpoint" if "checkpoint" in name else "swap_config" if "swap" in name else "_config."
    )
    for text in (of_right, of_odd):
        assert key in text
        assert "expected the same on all ranks, found " in text
        assert " on rank 0; " in text


@pytest.mark.parametrize("name", [name for name in TOGETHER if name != "nothing wrong"])
def test_both_ranks_say_which_one_differs(name: str, together: Found) -> None:
    assert_named(name, together)


def test_afterwards_the_same_ranks_train(together: Found) -> None:
    for of_rank in together:
        assert isinstance(of_rank["nothing wrong"][0], float), of_rank["nothing wrong"]


@pytest.mark.parametrize("name", FRESH)
def test_ahead_of_any_process_group(name: str, tmp_path: Path) -> None:
    assert_named(name, run([name], tmp_path))


@pytest.mark.parametrize("names", [["arguments, no such file"], ["nothing wrong", "prepare, malformed"]])
def test_where_rank_0_serves_the_store(names: list[str], tmp_path: Path) -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    served = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    found = run(names, tmp_path, served)
    assert_named(names[-1], found)
    assert len(names) == 1 or all(isinstance(of_rank[names[0]][0], float) for of_rank in found)


RECIPE: dict[str, tuple[list[str], str]] = {
    "malformed": (["bad.yaml"], "ConfigError: 1 problem in the configuration"),
    "no such file": (["none.yaml"], "RecipeError: The configuration file none.yaml cannot be read"),
    "no such data": (["config.yaml", "--dataset", "none.txt"], "RecipeError: "),
    "another size": (["divided.yaml"], ""),
    "no such checkpoint": (["config.yaml", "--resume_from_checkpoint", "missing"], "RecipeError: "),
    "no last checkpoint": (["config.yaml", "--resume_from_checkpoint", "last", "--output_dir", "other"], ""),
    "no such checkpoint, nothing swapped": (
        ["config.yaml", "--actswap", "none", "--resume_from_checkpoint", "missing"],
        "RecipeError: ",
    ),
}
"""What the odd rank is told instead, and what it says; without an own error both say who differs."""


SLOW = ("no such data", "another size", "no such checkpoint, nothing swapped")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RECIPE]
)
def test_the_recipe(name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    odd, said = RECIPE[name]
    text = Path(arguments[0]).read_text()
    Path("config.yaml").write_text(text)
    Path("bad.yaml").write_text(text.replace("swap: true", "swapp: true"))
    Path("divided.yaml").write_text(text + "parallel_config: {tensor_parallel_size: 2}\n")
    more = [*arguments[1:], "--max_steps", "2", "--output_dir", str(tmp_path / "out")]
    right = ["config.yaml", *more]
    if "checkpoint" in name:
        saved = tmp_path / "out" / "checkpoint-1"
        saved.mkdir(parents=True)
        (saved / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": []}))
        save_file({"a": torch.ones(1)}, saved / "model.safetensors")
        right += ["--resume_from_checkpoint", "last"]
    if "nothing" in name:
        right += ["--actswap", "none"]
    begin = monotonic()
    with started(run_recipe, [(right,), ([odd[0], *more, *odd[1:]],)], tmp_path) as running:
        codes = running.exit_codes(LIMIT_S)
    assert monotonic() - begin < MOST_S
    log = running.log.read_text()
    assert codes == [1, 1], log[-3000:]
    assert "Traceback" not in log
    if said:
        assert log.count("RankAgreementError: ") == 1
        assert log.count(said) == 2  # by the odd rank, and by the other of it
    else:
        assert log.count("RankAgreementError: ") == 2
        assert log.count("expected the same on all ranks, found ") == 2
