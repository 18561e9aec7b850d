"""Bars for slow work: drawn on a terminal, by one rank, unless they are switched off."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub.utils import enable_progress_bars
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hf_actswap import apply
from hf_actswap.integrations.parallel_training import ParallelTraining
from hf_actswap.parallel.patch_model import with_progress
from hf_actswap.planner import Planner
from hf_actswap.report import BytesBar, PinningBar, PlannerBar
from tests.engine.tiny_models import one_step, tiny_llama

MIB, GIB = 2**20, 2**30
CLEARED = "\x1b[1A\x1b[2K"


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)


def no_terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def bars_off() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()
    enable_progress_bars()


def test_it_is_drawn_and_goes() -> None:
    console = terminal()
    bar = BytesBar("gathering weights", console)
    bar(3 * MIB, 7 * MIB)
    assert "gathering weights" in drawn(console)
    assert "3.0/7.0 MiB" in drawn(console)
    bar(7 * MIB, 7 * MIB)
    assert drawn(console).endswith(CLEARED)  # the line is cleared
    bar.close()
    other = terminal()
    stopped = BytesBar("gathering weights", other)
    stopped(1, 2)
    stopped.close()  # an exception in the middle of the work
    assert drawn(other).endswith(CLEARED)


def test_who_wants_none_sees_none() -> None:
    for shown, console in ((False, terminal()), (True, no_terminal())):
        for bar in (BytesBar("gathering weights", console, shown), PinningBar(console, shown)):
            bar(1, 2)
            bar(2, 2)
        assert drawn(console) == ""
    console = no_terminal()
    bar = PlannerBar(console)
    bar("warm-up", 2)
    bar("stable", 0)
    assert drawn(console) == ""


@pytest.mark.usefixtures("bars_off")
def test_transformers_switch_is_ours_too() -> None:
    console = terminal()
    BytesBar("gathering weights", console)(1, 2)
    PinningBar(console)(1, 2)
    PlannerBar(console)("search", 3)
    assert drawn(console) == ""


def test_the_planner_bar_shows_the_phases_and_then_nothing() -> None:
    console = terminal()
    bar = PlannerBar(console)
    bar("warm-up", 2)
    assert "planner: warm-up" in drawn(console)
    assert "2 step(s) left at most" in drawn(console)
    bar("search", 8)
    assert "planner: search" in drawn(console)
    bar("stable", 0)
    assert drawn(console).endswith(CLEARED)
    length = len(drawn(console))
    bar("stable", 0)
    bar.close()
    assert len(drawn(console)) == length


def test_the_planner_bar_has_a_title() -> None:
    console = terminal()
    bar = PlannerBar(console, title="profile")
    bar("times", 3)
    bar.close()
    assert "profile: times" in drawn(console)


def test_called_after_each_item() -> None:
    heard: list[tuple[int, int]] = []
    seen = []
    for item in with_progress("ab", [3, 4], lambda done, total: heard.append((done, total))):
        seen.append((item, len(heard)))
    assert seen == [("a", 0), ("b", 1)]
    assert heard == [(3, 7), (7, 7)]
    assert list(with_progress("ab", [3, 4], None)) == ["a", "b"]


@pytest.mark.parametrize(("rank", "shows"), [(0, True), (0, False), (1, True)])
def test_one_rank_shows_what_is_gathered(monkeypatch: pytest.MonkeyPatch, rank: int, shows: bool) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda *_: rank)
    training: Any = SimpleNamespace(shows_bars=shows)
    with ParallelTraining.gathering_bar(training, "weights") as progress:
        assert (progress is None) == (rank != 0)
        if progress is not None:
            assert progress._shown is shows


def test_the_planner_tells_each_step_until_the_plan_is_found() -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory: dict[str, Any] = {"mode": "adaptive", "warmup_steps": 2, "search_steps": 2}
    requested = {"memory": {**memory, "reduce_by_gib": 20_000 / GIB}}
    told: list[tuple[str, int]] = []
    with apply(model, requested, optimizer=optimizer) as planner:
        assert isinstance(planner, Planner)
        planner.progress = lambda phase, left: told.append((phase, left))
        for step in range(8):
            one_step(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert told[:2] == [("warm-up", 1), ("search", 2)]
    assert told[-1] == ("stable", 0)
    assert [phase for phase, _ in told].count("stable") == 1


def test_pinned_memory_is_drawn_and_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    console = terminal()
    bar = PinningBar(console)
    with caplog.at_level(logging.INFO):
        bar(int(3.2 * GIB), 7 * GIB)
        assert "pinning host memory" in drawn(console)
        assert "3.2/7.0 GiB" in drawn(console)
        assert caplog.records == []
        bar(7 * GIB, 7 * GIB)
    assert "7.0/7.0 GiB" in drawn(console)
    assert drawn(console).endswith(CLEARED)
    assert [record.getMessage()[:35] for record in caplog.records] == ["7.0 GiB of host memory ready after "]
    after_the_first = len(drawn(console))
    bar(GIB, 2 * GIB)  # a second reservation
    assert "1.0/2.0 GiB" in drawn(console)[after_the_first:]
    bar(2 * GIB, 2 * GIB)


def test_pinned_memory_is_one_log_line_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    console = no_terminal()
    bar = PinningBar(console)
    with caplog.at_level(logging.INFO):
        for done in range(5):
            bar(done * GIB, 4 * GIB)
        assert drawn(console) == ""
        assert len(caplog.records) == 1
        assert caplog.records[0].getMessage().startswith("4.0 GiB of host memory ready after ")
        PinningBar(terminal())(0, 0)  # a reservation of nothing
    assert len(caplog.records) == 2
