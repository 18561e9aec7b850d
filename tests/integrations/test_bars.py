"""The Trainer's ``disable_tqdm`` silences our bars too."""

from __future__ import annotations

from typing import Any

import pytest

from hf_actswap import ActSwapCallback
from hf_actswap.integrations import callback as callback_module
from hf_actswap.planner import Planner
from hf_actswap.report import PinningBar, PlannerBar

pytest.importorskip("scipy")

PLANNED = {"memory": {"mode": "smart_swap", "warmup_steps": 1, "search_steps": 1, "budget_gib": 1}}


QUIET = pytest.mark.parametrize("quiet", [True, pytest.param(False, marks=pytest.mark.slow)])


@QUIET
def test_the_planner_tells_a_bar_or_nobody(make_trainer: Any, quiet: bool) -> None:
    trainer = make_trainer(PLANNED, max_steps=1, disable_tqdm=quiet)
    (ours,) = [item for item in trainer.callback_handler.callbacks if isinstance(item, ActSwapCallback)]
    told: list[Any] = []
    ended = ours.on_step_end

    def listen(*args: Any, **kwargs: Any) -> None:
        assert isinstance(ours.applied, Planner)
        told.append(type(ours.applied.progress))
        ended(*args, **kwargs)

    ours.on_step_end = listen
    trainer.train()
    assert told == [type(None) if quiet else PlannerBar]


@QUIET
def test_pinning_says_so_in_the_log_only(
    make_trainer: Any, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    globals_of_apply = callback_module.apply_plan.__globals__
    install = globals_of_apply["install"]

    def listen(*args: Any) -> Any:
        given.append(args[3].progress)
        return install(*args)

    monkeypatch.setitem(globals_of_apply, "install", listen)
    make_trainer({"swap_config": {"swap": True}}, max_steps=1, disable_tqdm=quiet).train()
    (bar,) = given
    assert isinstance(bar, PinningBar)
    assert bar._shown is not quiet
