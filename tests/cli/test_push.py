"""``push``, to a server that speaks the Hub's protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_actswap import MemoryPlan, load_config
from hf_actswap.plan import PlanRow, load_plan

from ..hub_server import TOKEN, HubServer, hub_server
from .conftest import Run

Write = Callable[[str], Path]
TEXT = "swap_config: {swap: true, default_prefetch: 7}\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(monkeypatch, str(tmp_path / "cache")) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def test_what_is_pushed_can_be_loaded(hub: HubServer, run: Run, write: Write, tmp_path: Path) -> None:
    plan = MemoryPlan((PlanRow(0, "mlp", "recompute"),), num_layers=2, family="llama")
    (tmp_path / "plan.json").write_text(plan.to_json())
    words = ("--plan", tmp_path / "plan.json", "--base-model", "org/base", "--message", "mine")
    ended = run("push", write(TEXT), "org/name", *words, "--json")
    assert ended.code == 0
    assert ended.document["commit"].startswith(f"{hub.endpoint}/org/name/commit/")
    assert load_config("org/name").swap_config.default_prefetch == 7
    assert load_plan("org/name") == plan
    assert [message["summary"] for message in hub.messages] == ["mine"]
    files = hub.repositories["org/name"].commits[hub.repositories["org/name"].refs["main"]]
    assert b'base_model: "org/base"' in files["README.md"]


def test_nothing_malformed_is_pushed(hub: HubServer, run: Run, write: Write, tmp_path: Path) -> None:
    (tmp_path / "no_plan.json").write_text("{}")
    (tmp_path / "plan.json").write_text(MemoryPlan((), num_layers=2).to_json())
    for words in (
        (write("swap_config: {swap: perhaps}"), "org/name"),
        (tmp_path / "plan.json", "org/name"),
    ):
        assert run("push", *words).code == 1
    assert "a plan stands beside one" in " ".join(run("push", tmp_path / "plan.json", "org/name").out.split())
    assert run("push", write(TEXT), "org/name", "--plan", tmp_path / "no_plan.json").code == 1
    assert hub.repositories == {}
    assert hub.requests == []


def test_a_rejection_is_one_line(
    hub: HubServer, run: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    ended = run("push", write(TEXT), "org/name", "--json")
    assert ended.code == 1
    (problem,) = ended.document["problems"]
    assert problem["where"] == "org/name"
    assert "\n" not in problem["found"]
