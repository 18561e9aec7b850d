"""A stage on paper: what knows the schedule is faster, and holds no more than two thirds of a pass twice."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_paper import COUNT, OPS, STAGES, StageOnPaper
from hf_actswap.engine.link import Link
from hf_actswap.pipeline.runtime import order_of_passes

STORAGES = [(1000, op, op + 3) for op in range(0, OPS - 10, 10)]
MOVED = sum(size_bytes for size_bytes, _, _ in STORAGES)
FORWARD_MS, BACKWARD_MS = 50.0, 100.0


def ran(stage: int, micro_batch_ms: float, knows: bool) -> tuple[float, float]:
    """Time of a micro-batch, and micro-batches on the device, where a copy of one takes so long."""
    rate = MOVED / micro_batch_ms
    paper = StageOnPaper(STORAGES, FORWARD_MS, BACKWARD_MS, Link(rate, rate, rate, rate, 0.0))
    ends = paper.run(order_of_passes("1f1b", COUNT, STAGES, stage), knows)
    return (ends[21] - ends[9]) / 6, paper.most_bytes / MOVED


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_copies_that_take_most_of_both_passes_are_hidden(stage: int) -> None:
    known, alone = ran(stage, 100.0, True), ran(stage, 100.0, False)
    assert known[0] == pytest.approx(FORWARD_MS + BACKWARD_MS)
    assert alone[0] == pytest.approx(2 * 100.0, rel=0.03)  # each way the copies last longer than the compute
    assert 1.0 < known[1] <= 1.4
    assert alone[1] <= 1.0


def test_copies_that_take_no_time_leave_compute_alone() -> None:
    assert ran(1, 1e-6, True)[0] == pytest.approx(FORWARD_MS + BACKWARD_MS)
    assert ran(3, 1e-6, True) == ran(3, 1e-6, False)
