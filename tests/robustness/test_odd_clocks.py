"""Clocks that stand still, run backwards, or jump: what they measure is of no use, and nothing raises."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_actswap.engine.link import link_of_times
from hf_actswap.report.run_files import read_run
from hf_actswap.report.write_report import write_report
from tests.engine.tiny_models import tiny_llama
from tests.planner.simulated_device import train
from tests.quick_cases import quick_first
from tests.report.recorded_runs import train_recorded

MEMORY = {"mode": "adaptive", "warmup_steps": 2, "search_steps": 4, "reduce_by_gib": 20_000 / 2**30}


def jumping() -> Iterator[float]:
    dice, now_s = random.Random(1), 0.0
    while True:
        now_s += dice.choice([1e-4, 1e-4, 0.0, -1e-4, -30.0, 1e-9])
        yield now_s


CLOCKS: dict[str, Callable[[], Iterator[float]]] = {
    "still": lambda: itertools.repeat(5.0),
    "backwards": lambda: itertools.count(1e6, -1e-4),
    "jumping": jumping,
}


@pytest.fixture(params=quick_first(reversed(CLOCKS), 1))
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    ticks = CLOCKS[request.param]()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    return str(request.param)


@pytest.mark.parametrize("requested", quick_first([{"memory": MEMORY}, {"swap_config": {"swap": True}}], 1))
def test_a_training_its_record_and_its_report(requested: object, clock: str, tmp_path: Path) -> None:
    steps = train_recorded(tmp_path, requested, count=14)
    run = read_run(tmp_path)
    assert [line["step"] for line in run.steps] == list(range(1, len(steps) + 1))
    assert all(line["step_ms"] >= 0 and line["stats"]["stall_ms"] >= 0 for line in run.steps), clock
    assert write_report(tmp_path).page.is_file()


@pytest.mark.slow
def test_a_budget_is_kept(clock: str) -> None:
    found = train(tiny_llama, {"mode": "adaptive"})
    assert found.phases[-1] == "stable", clock
    assert found.losses == train(tiny_llama).losses


def test_a_link_of_such_times() -> None:
    for out_ms, in_ms, out_beside_ms, in_beside_ms in itertools.product((0.0, -1.0, 1e-12, 3.0), repeat=4):
        link = link_of_times(2**26, out_ms, in_ms, out_beside_ms, in_beside_ms)
        assert math.isfinite(link.out_ms(2**20) + link.in_ms(2**20))
