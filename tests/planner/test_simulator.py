"""Tiny steps of which everything can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_actswap.engine import Link
from hf_actswap.plan import MemoryPlan, PlanRow, Windows
from hf_actswap.plan.actions import COMPILE_BUDGET
from hf_actswap.planner import Profile, predict
from hf_actswap.planner.cost.scope_fates import StepOrder, timeline
from hf_actswap.planner.cost.simulate import fates_of

from .search_profiles import Op, profile_of

KIB = 1024
LINK = Link(KIB, KIB, KIB, KIB, 0.0)
"""One KiB each ms."""


def chain(link: Link | None = LINK) -> Profile:
    """One layer: ``a`` reads x, ``b`` reads what a makes, ``c`` that of b; each saves what it reads.

    x is 8 KiB, the others 16, 4 and 8; forward takes 10, 20 and 30 ms, backward twice that; the head 1 and 2,
    the embedding 0.1 each way. Everything has a base of 1 KiB.
    """
    ops = (
        Op("a", 16 * KIB, 10.0, ("x",), ("x",)),
        Op("b", 4 * KIB, 20.0, ("a",), ("a",)),
        Op("c", 8 * KIB, 30.0, ("b",), ("b",)),
    )
    return profile_of([ops], link, hidden_bytes=8 * KIB, base_bytes=KIB)


def plan_of(*rows: PlanRow, **settings: object) -> MemoryPlan:
    return MemoryPlan(rows, 1, min_tensor_bytes=0, **settings)  # type: ignore[arg-type]


def swap(path: str, prefetch_ops: int, release_ops: int) -> PlanRow:
    return PlanRow(0, path, "swap", windows=Windows(prefetch_ops, release_ops))


def test_without_a_plan() -> None:
    found = predict(chain(), plan_of())
    assert found.compute_ms == pytest.approx(3 * 61.0 + 0.2)
    assert found.step_ms == pytest.approx(3 * 61.0 + 0.2 + 1.0)
    assert found.forward_end_ms == pytest.approx(61.1)
    assert found.peak_bytes == (1 + 8 + 16 + 4 + 8) * KIB
    assert found.peak_at == (0, "c", 0)
    assert found.kept_bytes == 36 * KIB
    assert found.swapped_bytes == found.recomputed_bytes == found.host_bytes == 0


def test_a_swap_that_is_hidden() -> None:
    """Out 10.1 to 26.1, released when ``c`` saves (30.1); back from the first hook of backward, read by b."""
    found = predict(chain(), plan_of(swap("a", 5, 1)))
    assert found.forward_stall_ms == found.backward_stall_ms == 0
    (copy,) = found.copies
    assert (copy.out_start_ms, copy.out_end_ms) == pytest.approx((10.1, 26.1))
    assert copy.release_ms == pytest.approx(30.1)
    assert (copy.in_start_ms, copy.in_end_ms) == pytest.approx((61.1, 77.1))
    assert copy.read_ms == pytest.approx(61.1 + 2 + 60)
    # At the head x, b and c are there, and in backward of the head what comes back.
    assert max(p.total_bytes for p in found.memory if p.ms < 61.1) == (1 + 8 + 16 + 4) * KIB
    assert found.peak_bytes == (1 + 8 + 4 + 8 + 16) * KIB
    assert found.swapped_bytes == found.host_bytes == 16 * KIB


def test_a_release_that_comes_too_early_stalls_forward() -> None:
    slow = Link(KIB / 2, KIB / 2, KIB / 2, KIB / 2, 0.0)  # 32 ms for 16 KiB, and b takes 20
    found = predict(chain(slow), plan_of(swap("a", 5, 1)))
    assert found.forward_stall_ms == pytest.approx(12.0)
    assert found.forward_end_ms == pytest.approx(73.1)


def test_a_prefetch_that_comes_too_late_stalls_backward() -> None:
    found = predict(chain(), plan_of(swap("a", 0, 1)))
    assert found.backward_stall_ms == pytest.approx(16.0)
    assert found.peak_bytes == (1 + 8 + 16 + 4) * KIB  # while b or c runs forward
    assert found.step_ms == pytest.approx(3 * 61.0 + 0.2 + 1.0 + 16.0)


def test_what_is_built_again() -> None:
    """``a`` is run again from x when backward comes to b."""
    found = predict(chain(), plan_of(PlanRow(0, "a", "recompute")))
    assert found.recompute_ms == pytest.approx(10.0)
    assert found.recomputed_bytes == 16 * KIB
    assert found.step_ms == pytest.approx(3 * 61.0 + 0.2 + 1.0 + 10.0)
    assert found.peak_bytes == (1 + 8 + 16 + 4) * KIB


def test_a_region_wants_its_inputs_before_their_own_reader_does() -> None:
    """a is swapped, and b is built from it when backward comes to c: too early for the prefetch."""
    found = predict(chain(), plan_of(swap("a", 0, 2), PlanRow(0, "b", "recompute")))
    (copy,) = found.copies
    assert (copy.in_start_ms, copy.in_end_ms, copy.read_ms) == pytest.approx((63.1, 79.1, 79.1))
    assert found.backward_stall_ms == pytest.approx(16.0)
    assert found.recompute_ms == pytest.approx(20.0)
    early = predict(chain(), plan_of(swap("a", 5, 2), PlanRow(0, "b", "recompute")))
    assert early.backward_stall_ms == pytest.approx(14.0)


def test_windows_that_nobody_gave_hide_everything_or_keep() -> None:
    auto = PlanRow(0, "", "swap")
    found = predict(chain(), plan_of(auto))
    assert found.swapped_bytes > 0
    assert found.forward_stall_ms + found.backward_stall_ms == pytest.approx(0.0)
    crawling = Link(1.0, 1.0, 1.0, 1.0, 0.0)
    assert predict(chain(crawling), plan_of(auto)).swapped_bytes == 0
    assert predict(chain(None), plan_of(auto)).swapped_bytes == 28 * KIB  # windows of 1, copies take no time


def test_the_cap_on_host_memory_keeps_what_does_not_fit() -> None:
    rows = swap("a", 5, 1), swap("b", 5, 1)
    found = predict(chain(), plan_of(*rows, host_memory_bytes=10 * KIB))
    assert found.swapped_bytes == found.host_bytes == 4 * KIB
    assert fates_of(chain(), plan_of(*rows)) == ("keep", "swap", "swap", "keep")
    assert found.kept_bytes == (8 + 16 + 8) * KIB


def test_optimizer_states_that_are_away() -> None:
    profile = replace(chain(), optimizer_state_bytes=KIB, outside_base_bytes=100 * KIB)
    here, away = (predict(profile, plan_of(), optimizer_states_moved=moved) for moved in (False, True))
    assert here.peak_bytes == 100 * KIB
    assert here.peak_at == (None, "", None)
    assert away.peak_bytes == 99 * KIB
    assert max(p.total_bytes for p in away.memory) == 36 * KIB


def test_a_compiled_layer_saves_a_share() -> None:
    profile = profile_of([(Op("", 8 * KIB, 30.0, ("x",), ("x", "")),)], LINK, 8 * KIB)
    profile = replace(profile, compiled_layers=frozenset({0}))
    full = predict(profile, plan_of(PlanRow(0, "", "keep", parameters={COMPILE_BUDGET: 1.0})))
    half = predict(profile, plan_of(PlanRow(0, "", "keep", parameters={COMPILE_BUDGET: 0.5})))
    assert full.compute_ms == pytest.approx(predict(profile, plan_of()).compute_ms)
    assert half.compute_ms > full.compute_ms


def test_the_timeline_of_a_profile() -> None:
    order = StepOrder(chain())
    forward = [(pack.op, order.start_ms[pack.op_event + pack.at_end]) for pack in order.packs]
    forward_end_ms = now_ms = order.start_ms[-1]
    backward = []
    for number in order.places.order:
        backward += [(op, now_ms) for op in order.ops_of_event[number]]
        now_ms += order.op_events[number].backward_ms
    found = timeline(forward, forward_end_ms, backward)
    assert [op for op, _ in found.forward] == [1, 2, 3, 4, 4]
    assert [ms for _, ms in found.forward] == pytest.approx([0.1, 10.1, 30.1, 60.1, 61.1])
    assert [op for op, _ in found.backward] == [4, 3, 2, 1]
    assert [ms for _, ms in found.backward] == pytest.approx([61.1, 63.1, 123.1, 163.1])
