"""Random small steps and plans: the simulator against a slow replay of the same rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_actswap.engine import Link
from hf_actswap.plan import MemoryPlan, OpCall, PlanRow, SavedBytes, SavedStorage, Use, Windows
from hf_actswap.plan.actions import Scope
from hf_actswap.planner import OpEvent, Profile, Simulator

from .step_replayed import Replay


@st.composite
def steps(draw: Any) -> Profile:
    """A step of up to three layers of up to five functions; sizes are powers of two, so that sums tell."""
    storages: list[tuple[int, list[Use]]] = []
    owners: list[OpCall] = []
    op_events: list[OpEvent] = []
    order = op = 0

    def make(call: OpCall) -> int:
        storages.append((2 ** draw(st.integers(7, 16)), []))
        owners.append(call)
        return len(storages) - 1

    def use(kind: Any, at: OpCall, number: int) -> None:
        nonlocal order
        order += 1
        size = storages[number][0]
        storages[number][1].append(Use(kind, at, owners[number], 0, size, size, 0, order))

    def op_event(call: OpCall, first: int) -> None:
        nonlocal op
        nodes = draw(st.integers(1, 3))
        times = draw(st.integers(0, 8)), draw(st.integers(0, 8))
        bases = draw(st.integers(0, 2**12)), draw(st.integers(0, 2**12))
        op_events.append(OpEvent(call, first, order, op, nodes, *map(float, times), *bases, 0))
        op += nodes

    hidden = make(("embedding", "output", None))
    op_event(("embedding", "", None), 1)
    layers = draw(st.integers(1, 3))
    for layer in range(layers):
        first = order + 1
        use("module", (layer, "", None), hidden)
        known = [hidden]
        for number in range(draw(st.integers(1, 5))):
            call = (layer, f"op{number}", 0)
            reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))
            for read in reads:
                use("function", call, read)
            for read in draw(st.lists(st.sampled_from(reads), max_size=2, unique=True)):
                use("saved", (layer, "", None), read)
            made = make(call)
            if draw(st.booleans()):
                use("saved", (layer, "", None), made)
            use("returned", call, made)
            known.append(made)
            op_event(call, first)
            first = order + 1
        hidden = known[-1]
        owners[hidden] = (layer, "output", None)
    first = order + 1
    use("saved", ("head", "", None), hidden)
    op_event(("head", "", None), first)
    kept = tuple(SavedStorage(size, tuple(uses)) for size, uses in storages if uses)
    turned = tuple(
        OpEvent(*(getattr(item, name) for name in OpEvent.__slots__[:9]), len(op_events) - 1 - place)
        for place, item in enumerate(op_events)
    )
    saved = SavedBytes(kept, {layer: frozenset({""}) for layer in range(layers)})
    return Profile(
        saved, turned, layers, "drawn", frozenset(), None, "none", 2**40, 1.0, 0, 0, 0, "", (1,), "shapes"
    )


@st.composite
def plans(draw: Any, profile: Profile) -> MemoryPlan:
    """Fates of functions, of what layers hand on, of whole layers."""
    rows: list[PlanRow] = []

    def row(scope: Scope, path: str, fate: Any) -> None:
        windows = None
        if fate == "swap":
            windows = Windows(draw(st.integers(0, 12)), draw(st.integers(0, 12)))
        rows.append(PlanRow(scope, path, fate, windows=windows))

    whole = {layer for layer in range(profile.num_layers) if draw(st.integers(0, 3)) == 0}
    for item in profile.op_events:
        layer, path, _ = item.call
        fate = draw(st.sampled_from(["keep", "swap", "recompute", "recompute"]))
        if isinstance(layer, int) and layer not in whole and fate != "keep":
            row(layer, path, fate)
    for layer in range(profile.num_layers):
        if layer in whole:
            row(layer, "", "recompute")
        if draw(st.booleans()):
            row(layer, "output", "swap")
    if draw(st.booleans()):
        row("embedding", "output", "swap")
    return MemoryPlan(tuple(rows), profile.num_layers, min_tensor_bytes=draw(st.sampled_from([0, 1024])))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_simulator_does_what_a_slow_replay_does(data: st.DataObject) -> None:
    profile = data.draw(steps())
    plan = data.draw(plans(profile))
    rate = float(data.draw(st.sampled_from([100, 2000, 40000])))
    link = Link(rate, rate / 2, rate, rate / 2, data.draw(st.sampled_from([0.0, 0.25])))
    expected = Replay(profile, plan, link).run()
    simulator = Simulator(profile)
    for curve in (True, False):
        found = simulator.predict(plan, link, curve=curve)
        assert found.peak_bytes == expected.peak_bytes
        assert found.recompute_ms == pytest.approx(expected.recompute_ms)
        assert found.forward_stall_ms == pytest.approx(expected.forward_stall_ms, abs=1e-6)
        assert found.backward_stall_ms == pytest.approx(expected.backward_stall_ms, abs=1e-6)
        assert found.step_ms == pytest.approx(expected.step_ms)
    curve_peak = max(point.total_bytes for point in simulator.predict(plan, link).memory)
    assert curve_peak == expected.peak_bytes
