"""``plan`` with the optimizer in backward, and ``plan --longest`` where nothing fits without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_actswap.cli.longest import RECOMPUTED, _Lengths
from hf_actswap.cli.options import AskedStep, ModelRequest, PlanRequest
from hf_actswap.cli.subject import subject
from hf_actswap.config import load_config
from hf_actswap.planner import Profile
from hf_actswap.planner.budget import with_fragments

from .conftest import Run
from .test_plan_accumulated import found
from .test_plan_accumulated import wide as wide  # a fixture

pytest.importorskip("scipy")

ALONE = "memory: {mode: adaptive, optimizer_in_backward: true}\n"
BOTH = "memory: {mode: adaptive, preference: memory_saving, optimizer_in_backward: true}\n"
STEP = ("--seq", "1k", "--device", "H100", "--optimizer", "adamw")


def test_complete_gradients_and_moved_states_are_not_at_the_peak(
    run: Run, wide: Path, write: Callable[[str], Path]
) -> None:
    plain = found(run, wide, *STEP)
    alone, both = (found(run, wide, write(text), *STEP) for text in (ALONE, BOTH))
    gradients, states = (plain["memory"]["planned"][f"{name}_bytes"] for name in ("gradients", "states"))
    assert gradients > 0
    assert states > 0
    peaks = [one["predicted"]["planned"]["peak_bytes"] for one in (plain, alone, both)]
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[1] - peaks[2] == pytest.approx(states, rel=0.25), "a tenth passes through"
    assert alone["memory"]["planned"]["gradients_bytes"] == 0
    assert both["host_memory"]["rank_bytes"] >= states
    assert alone["step"]["optimizer_in_backward"]
    several = found(run, wide, write(ALONE), *STEP, "--micro-batches", "4")
    assert several["memory"]["planned"]["gradients_bytes"] > 0


def test_the_last_line_says_what_to_write(run: Run, wide: Path, write: Callable[[str], Path]) -> None:
    text = " ".join(run("plan", wide, write(BOTH), *STEP, "--budget", "6").out.split())
    assert "optimizer in backward" in text
    assert "preference: memory_saving, optimizer_in_backward: true}` in the configuration" in text


def test_an_optimizer_that_cannot_is_named(run: Run, wide: Path, write: Callable[[str], Path]) -> None:
    ended = run("plan", wide, write(ALONE), *STEP[:-1], "adamw_8bit")
    assert ended.code
    assert "memory.optimizer_in_backward" in ended.out + ended.err


def test_the_longest_sequence_where_nothing_fits_with_states_or_gradients_on_the_device(wide: Path) -> None:
    step = AskedStep(device="H100", optimizer="adamw")
    with subject(ModelRequest(str(wide)), load_config(None)) as model:
        weights = sum(weight.nbytes for weight in model.model.parameters())
        profiles: dict[tuple[bool, int], Profile] = {}
        for copies, part, lacks in (
            (4, "recompute: true", "memory:"),
            (2, "preference: memory_saving}", "in_backward"),
            (1, "optimizer_in_backward: true}", "nothing"),
        ):
            budget = with_fragments(copies * weights + 3 * 2**28)
            asked = PlanRequest(
                ModelRequest(str(wide)), None, step, None, budget, None, (), None, False, False
            )
            lengths = _Lengths(model, asked, load_config(None))
            lengths._profiles = profiles  # each takes seconds
            answer = lengths._longest_of_all(RECOMPUTED)
            assert answer.tokens > 0
            assert part in answer.config
            assert lacks not in answer.config
            assert answer.parts is not None
            assert answer.parts.states == (2 * weights if copies == 4 else 0)
            assert (answer.parts.gradients > 0) is (copies > 1)
