"""The line shown while the planner measures and searches."""

from __future__ import annotations

import io
from typing import Any

import torch
from rich.console import Console

from hf_actswap import apply
from hf_actswap.planner import Planner
from hf_actswap.report import PlannerBar
from tests.engine.tiny_models import one_step, tiny_llama

GIB = 2**30


def test_a_terminal_sees_the_stages_and_then_nothing() -> None:
    screen = io.StringIO()
    bar = PlannerBar(Console(file=screen, force_terminal=True, width=80, color_system=None))
    bar("warm-up", 2)
    assert "planner: warm-up" in screen.getvalue()
    assert "2 step(s) left at most" in screen.getvalue()
    bar("search", 8)
    assert "planner: search" in screen.getvalue()
    bar("stable", 0)
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # the line is cleared
    length = len(screen.getvalue())
    bar("stable", 0)
    bar.close()
    assert len(screen.getvalue()) == length


def test_elsewhere_nothing() -> None:
    out = io.StringIO()
    bar = PlannerBar(Console(file=out, force_terminal=False))
    bar("warm-up", 2)
    bar("stable", 0)
    assert out.getvalue() == ""


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
