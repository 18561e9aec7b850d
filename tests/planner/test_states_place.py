"""Where the optimizer's states wait: chosen by the time of the optimizer's whole step, within the budget."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hf_actswap.config import MemoryConfig
from hf_actswap.plan import MemoryPlan
from hf_actswap.planner import Limits, Prediction, Profile, find_plan, predict
from hf_actswap.planner.planning import PlanningTask, best_plans, states_in_passing
from hf_actswap.planner.recorded_step import RecordedStep
from hf_actswap.planner.search.find_plan import least_peak_bytes
from hf_actswap.planner.search.states_place import (
    _HOST_MS,
    WholeStep,
    whole_step,
    with_states_in_passing,
    with_states_on_host,
)
from hf_actswap.planner.states.optimizer_states import part_bytes

from .search_profiles import MIB, link_of, llama_layer, profile_of

pytest.importorskip("scipy")

LAYERS, STATES, WEIGHTS = 6, 2048 * MIB, 512 * MIB
NOTHING = MemoryPlan((), LAYERS, min_tensor_bytes=2**20)


def llama(states: int = STATES) -> Profile:
    """A step that has weights and states on the device at every moment."""
    layers = [llama_layer(8192)] * LAYERS
    made = profile_of(layers, link_of(55.0), 8192 * 8192, WEIGHTS + states, 2 * 8192 * 8192, 5.0)
    return replace(made, optimizer_state_bytes=states)


def task_at(budget_bytes: int, **settings: Any) -> PlanningTask:
    profile = llama()
    return PlanningTask(profile, NOTHING, MemoryConfig(), budget_bytes, predict(profile, NOTHING), **settings)


def test_no_states_come_before_the_first_have_left() -> None:
    """The states of the largest weight are first: a gradient of 60 of 100."""
    profile = llama()
    moved = predict(profile, NOTHING, optimizer_states_moved=True)
    alike = with_states_in_passing(profile, moved, 1, moved.peak_bytes)
    made = replace(profile, gradient_bytes=(0, 100, 40, 10))
    large = with_states_in_passing(made, moved, 1, moved.peak_bytes)
    assert large.resident_bytes == alike.resident_bytes
    assert alike.resident_bytes is not None
    both_ways = 55e6 * 0.9
    assert large.ms - alike.ms == pytest.approx((0.6 * STATES - part_bytes(alike.resident_bytes)) / both_ways)


@pytest.fixture(scope="module")
def tight() -> int:
    """A budget in which much has to be recomputed while the states are on the device."""
    profile = llama()
    least, most = least_peak_bytes(profile, NOTHING, Limits(0)), predict(profile, NOTHING).peak_bytes
    return least + (most - least) // 20


def test_a_whole_step_pays_once_for_what_is_outside_its_passes() -> None:
    profile = llama()
    one = predict(profile, NOTHING)
    assert whole_step(profile, one, 1).ms == one.step_ms
    assert whole_step(profile, one, 5).ms == pytest.approx(5 * profile.compute_ms + profile.outside_ms)
    moved = predict(profile, NOTHING, optimizer_states_moved=True)
    copies_ms = STATES / (55e6 * 0.9)
    assert whole_step(profile, moved, 5, True).ms == pytest.approx(5 * profile.compute_ms + copies_ms)


def test_copies_beside_the_first_forward_and_the_last_backward_are_hidden() -> None:
    """By hand: what the link cannot carry meanwhile, and what memory has no room for, is waited for."""
    profile = llama()
    moved = predict(profile, NOTHING, optimizer_states_moved=True)
    roomy = with_states_in_passing(profile, moved, 4, 2**40)
    assert roomy.resident_bytes == STATES
    until_the_last_ms = sum(
        op_event.forward_ms for op_event in profile.op_events if op_event.call[0] in range(LAYERS - 1)
    )
    waits = [STATES / 55e6 - until_the_last_ms, STATES / 55e6 - profile.compute_ms + moved.forward_end_ms]
    waited_ms = sum(max(ms, 0.0) for ms in waits)
    assert roomy.ms == pytest.approx(4 * profile.compute_ms + profile.outside_ms + waited_ms)
    exact = with_states_in_passing(profile, moved, 4, moved.peak_bytes)
    assert exact.resident_bytes is not None
    for point in moved.memory:
        into = point.ms / moved.forward_end_ms
        there = (
            1 - into
            if into < 1
            else (point.ms - moved.forward_end_ms)
            / (max(one.ms for one in moved.memory) - moved.forward_end_ms)
        )
        assert point.total_bytes + there * exact.resident_bytes <= moved.peak_bytes + 1
    assert exact.ms >= roomy.ms


def test_no_states_leave_behind_a_value_that_is_read() -> None:
    """The host waits for the value, which waits for all copies that have begun."""
    profile = llama()
    read = replace(
        profile,
        op_events=tuple(
            replace(item, reads_values=item.call[1] == "attn.core") for item in profile.op_events
        ),
    )
    whole_ms = until_ms = 0.0
    for layer in range(LAYERS - 1):
        ops = [item for item in profile.op_events if item.call[0] == layer]
        core = [item.call[1] for item in ops].index("attn.core")
        whole_ms += sum(item.forward_ms for item in ops)
        until_ms += sum(item.forward_ms for item in ops[:core])
    moved = predict(profile, NOTHING, optimizer_states_moved=True)
    free, held = (with_states_in_passing(item, moved, 1, 2**40) for item in (profile, read))
    copies_ms = STATES / 55e6
    assert copies_ms > whole_ms > until_ms
    assert held.ms - free.ms == pytest.approx(whole_ms - until_ms)


def test_with_accumulation_the_states_go_to_the_host(tight: int) -> None:
    stays, best = states_in_passing(task_at(tight), 1)
    assert stays is None
    assert best is not None
    assert best_plans(task_at(tight), 3, best) == best_plans(task_at(tight), 3)
    assert states_in_passing(task_at(WEIGHTS), 1, best)[1] is best, "it is not searched again"
    found, _ = states_in_passing(task_at(tight), 64)
    assert found is not None
    assert found.ms < found.kept_ms
    assert 0 < found.resident_bytes <= STATES
    kept = find_plan(llama(), NOTHING, Limits(tight)).prediction
    assert found.kept_ms == pytest.approx(whole_step(llama(), kept, 64).ms)


def test_they_stay_where_nothing_is_gained_or_known(tight: int) -> None:
    assert states_in_passing(task_at(2**40), 64)[0] is None, "everything fits"
    few = replace(task_at(tight), memory=MemoryConfig(host_memory_gib=STATES / 2**31))
    assert states_in_passing(few, 64)[0] is None, "the host has no room"
    unlinked = replace(task_at(tight), profile=replace(llama(), link=None))
    assert states_in_passing(unlinked, 64)[0] is None, "the time of copies is not known"
    assert states_in_passing(task_at(WEIGHTS), 64)[0] is None, "nothing fits with them on the device"


def test_no_search_where_no_plan_could_be_faster() -> None:
    profile = llama()
    one: Prediction = predict(profile, NOTHING)

    def search(swaps: bool) -> tuple[None, WholeStep]:
        raise AssertionError("searched")

    kept = whole_step(profile, one, 8)
    assert with_states_on_host(profile, 8, None, kept, search) is None
    slower = replace(kept, ms=1.02 * kept.ms)
    with pytest.raises(AssertionError, match="searched"):
        with_states_on_host(profile, 8, None, slower, search)
    many = replace(profile, gradient_bytes=tuple(range(1 + math.ceil(0.021 * kept.ms / _HOST_MS))))
    assert with_states_on_host(many, 8, None, slower, search) is None, "the host's work for so many weights"
    few = replace(profile, optimizer_state_bytes=one.peak_bytes // 101)
    assert with_states_on_host(few, 8, None, slower, search) is None
    with pytest.raises(AssertionError, match="searched"):
        with_states_on_host(few, 8, None, None, search)


def test_the_recorded_step_without_its_states() -> None:
    step = RecordedStep(llama(), {}, 100 * MIB + STATES)
    found = step.without_states(MIB)
    assert found.baseline_bytes == 100 * MIB
    assert found.profile.optimizer_state_bytes == 0
    assert found.profile.outside_base_bytes == WEIGHTS + MIB
    kept, moved = predict(step.profile, NOTHING), predict(found.profile, NOTHING)
    assert kept.peak_bytes - moved.peak_bytes == STATES
    assert moved.step_ms == kept.step_ms
