"""A step of a pipeline on paper: waits for other stages, what is held, windows that cross passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hf_actswap.config.schema import PipelineSchedule
from hf_actswap.engine import Link
from hf_actswap.engine.schedule import Pass
from hf_actswap.pipeline.runtime import bubble_share, order_of_passes, passes_in_flight
from hf_actswap.planner.cost.pipeline_step import OPS, Moving, StageRun, StageWork, run_step
from hf_actswap.planner.profile import Limits
from hf_actswap.planner.search import find_plan

STAGES, COUNT = 4, 16
FORWARD_MS, BACKWARD_MS = 50.0, 100.0
MOVING = tuple(Moving(1000, op, op + 3) for op in range(0, OPS - 10, 10))


def ran(moving: tuple[Moving, ...], micro_batch_ms: float, crosses: bool = True) -> tuple[StageRun, ...]:
    """Four equal stages, 1F1B, all but the last swap: copies of a micro-batch take so long each way."""
    rate = max(sum(item.size_bytes for item in moving), 1) / micro_batch_ms
    work = StageWork(FORWARD_MS, BACKWARD_MS, moving, Link(rate, rate, rate, rate, 0.0))
    orders = [order_of_passes("1f1b", COUNT, STAGES, number) for number in range(STAGES)]
    return run_step([*[work] * (STAGES - 1), replace(work, moving=())], orders, crosses=crosses)


@pytest.mark.parametrize(
    ("schedule", "interleaves"), [("1f1b", 1), ("gpipe", 1), ("gpipe", 2), ("interleaved_1f1b", 2)]
)
def test_equal_stages_wait_as_the_formula_says(schedule: PipelineSchedule, interleaves: int) -> None:
    """And hold as many micro-batches as theirs (`bubble_share`, `passes_in_flight`)."""
    link = Link(1.0, 1.0, 1.0, 1.0, 0.0)
    work = StageWork(FORWARD_MS, BACKWARD_MS, (), link, kept_bytes=1000)
    orders = [order_of_passes(schedule, COUNT, STAGES, number, interleaves) for number in range(STAGES)]
    runs = run_step([work] * STAGES, orders, interleaves)
    step_ms = max(run.ends_ms[-1] for run in runs)
    for number, run in enumerate(runs):
        assert run.busy_ms == pytest.approx(COUNT * (FORWARD_MS + BACKWARD_MS))
        assert 1 - run.busy_ms / step_ms == pytest.approx(bubble_share(COUNT, STAGES, interleaves))
        in_flight = passes_in_flight(schedule, COUNT, STAGES, interleaves, number) / interleaves
        # Held besides the micro-batch that runs; a part of that one's may lie on other chunks.
        assert in_flight - 1 <= run.peak_bytes / 1000 <= in_flight
        assert interleaves > 1 or run.peak_bytes == 1000 * (in_flight - 1)


def test_a_slow_stage_is_waited_for() -> None:
    link = Link(1.0, 1.0, 1.0, 1.0, 0.0)
    works = [StageWork(ms, 2 * ms, (), link) for ms in (50.0, 50.0, 50.0, 70.0)]
    runs = run_step(works, [order_of_passes("1f1b", COUNT, STAGES, number) for number in range(STAGES)])
    assert runs[0].ends_ms[-1] == pytest.approx(COUNT * 210.0 + 3 * 150.0)
    assert runs[0].stall_ms == 0.0


def test_copies_that_take_most_of_both_passes_are_hidden() -> None:
    known, alone, without = (ran(*given) for given in ((MOVING, 100.0), (MOVING, 100.0, False), ((), 100.0)))
    # The first forwards wait, since no backward lies between them; after that the first stage does not.
    turn_ms = (known[0].ends_ms[21] - known[0].ends_ms[9]) / 6
    assert turn_ms == pytest.approx(FORWARD_MS + BACKWARD_MS, rel=0.01)
    assert known[0].ends_ms[-1] < 1.1 * without[0].ends_ms[-1] < alone[0].ends_ms[-1]
    moved = sum(item.size_bytes for item in MOVING)
    assert moved < known[0].swapped_bytes <= 1.5 * moved
    assert alone[0].swapped_bytes <= moved


def test_copies_that_take_no_time_leave_compute_alone() -> None:
    free, without = ran(MOVING, 1e-6), ran((), 1.0)
    for one, other in zip(free, without, strict=True):
        assert one.ends_ms == pytest.approx(other.ends_ms)


def test_a_pass_that_nobody_makes_possible() -> None:
    work = StageWork(1.0, 1.0, (), Link(1.0, 1.0, 1.0, 1.0, 0.0))
    with pytest.raises(ValueError, match="no stage can go on"):
        run_step([work, work], [[Pass(0, 0, True)], [Pass(1, 0, False)]])


@pytest.mark.parametrize(
    ("more_bytes", "asked"),
    [(100, [1000, 900]), (-100, [1000, 1100]), (-20, [1000]), (0, [1000])],
    ids=["over the budget", "far below", "near", "on it"],
)
def test_a_stage_is_searched_for_what_its_simulated_peak_leaves(
    more_bytes: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its search sees one micro-batch, the simulated step all of them: here ``more_bytes`` more."""
    found: list[int] = []

    def search(searched: Any, cycle_ms: float, crosses: bool) -> Any:
        found.append(searched.limits.device_bytes)
        return SimpleNamespace(rows=(searched.limits.device_bytes,))

    def step(plans: Sequence[Any], moved: bool) -> Any:
        peaks = tuple(plan.rows[0] + more_bytes if plan.rows else 5000 for plan in plans)
        work = SimpleNamespace(forward_ms=1.0, backward_ms=2.0)
        run = SimpleNamespace(busy_ms=12.0, stall_ms=0.0)
        return SimpleNamespace(
            plans=plans, works=[work], runs=[run], peaks_bytes=peaks, step_ms=1e6 - sum(peaks)
        )

    monkeypatch.setattr(find_plan._Searched, "search", search)
    stage = SimpleNamespace(in_flight=1, buffer_bytes=0)
    pipeline: Any = SimpleNamespace(stages=[stage], crosses=True, count=4, step=step)
    fixed: Any = [SimpleNamespace(rows=())]
    result = find_plan.plan_stages(pipeline, fixed, Limits(1000))
    assert found == asked
    assert result.peaks_bytes == (asked[-1] + more_bytes,)
