"""Bars for work that is counted in bytes: drawn on a terminal, by one rank, unless they are switched off."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from huggingface_hub.utils import enable_progress_bars
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hf_actswap.integrations.parallel_training import ParallelTraining
from hf_actswap.parallel.patch_model import with_progress
from hf_actswap.report import BytesBar, PinningBar, PlannerBar

MIB = 2**20


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)


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
    assert drawn(console).endswith("\x1b[1A\x1b[2K")  # the line is cleared
    bar.close()
    other = terminal()
    stopped = BytesBar("gathering weights", other)
    stopped(1, 2)
    stopped.close()  # an exception in the middle of the work
    assert drawn(other).endswith("\x1b[1A\x1b[2K")


def test_who_wants_none_sees_none() -> None:
    for shown, console in ((False, terminal()), (True, Console(file=io.StringIO(), force_terminal=False))):
        for bar in (BytesBar("gathering weights", console, shown), PinningBar(console, shown)):
            bar(1, 2)
            bar(2, 2)
        assert drawn(console) == ""


@pytest.mark.usefixtures("bars_off")
def test_transformers_switch_is_ours_too() -> None:
    console = terminal()
    BytesBar("gathering weights", console)(1, 2)
    PinningBar(console)(1, 2)
    PlannerBar(console)("search", 3)
    assert drawn(console) == ""


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
