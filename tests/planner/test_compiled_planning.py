"""Compiled layers under the planner: the frontier on paper and from steps, regions of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from hf_actswap import ConfigError, PlanError, apply, model_structure
from hf_actswap.plan import MemoryPlan, PlanRow
from hf_actswap.plan.actions import COMPILE_BUDGET, Fate
from hf_actswap.planner import (
    FrontierPoint,
    Limits,
    Profile,
    find_plan,
    predict,
    profile_from_json,
    profile_to_json,
)
from hf_actswap.planner.cost.compiled_shares import compile_points_of, offered_points, point_of_share
from hf_actswap.planner.search.compiled_frontier import Shown, learned, shown_by, variants_of
from hf_actswap.planner.search.find_plan import Found, candidates
from hf_actswap.planner.search.layer_milp import MOST_VARIANTS
from tests.engine.tiny_models import forward, tiny_llama
from tests.planner.compiled_profiles import FEED_FORWARD, GIB, compiled_profile
from tests.planner.simulated_device import Trained, train

MEASURED_MS = {0.5: 353.0, 0.2: 385.0, 0.0: 486.0}
MEASURED_GIB = {0.5: 9.2, 0.2: 5.3, 0.0: 2.5}
"""One H200, 16 layers, 8,192 tokens."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")

STEPS = 10
"""Three of warm-up, one of which compiles, at most four of search, and three that are stable."""


def nothing(layers: int) -> MemoryPlan:
    return MemoryPlan((), layers)


def at_share(share: float, layers: int = 16) -> MemoryPlan:
    rows = (PlanRow(layer, "", "keep", parameters={COMPILE_BUDGET: share}) for layer in range(layers))
    return MemoryPlan(tuple(rows), layers)


def found_at(profile: Profile, gib: float) -> Found:
    return find_plan(profile, nothing(profile.num_layers), Limits(int(gib * GIB)))


def ways_in(profile: Profile, found: Found) -> set[Any]:
    return {point.variant for _, point in compile_points_of(profile, found.plan)}


@pytest.mark.parametrize("share", MEASURED_MS)
def test_the_guess_is_near_what_one_machine_did(share: float) -> None:
    prediction = predict(compiled_profile(), at_share(share))
    assert prediction.step_ms == pytest.approx(MEASURED_MS[share], rel=0.02)
    assert prediction.peak_bytes == pytest.approx(MEASURED_GIB[share] * GIB, rel=0.06)


@pytest.mark.parametrize(
    ("layers", "tokens", "step_ms", "base_gib", "gib", "most_ms"),
    [
        (16, 8192, 329.0, 0.84, 2.8, 502 / 1.31),
        (16, 8192, 329.0, 0.84, 11.8, 329 * 1.04),
        (6, 32768, 740.0, 3.0, 8.8, 1060 / 1.25),
        (6, 32768, 740.0, 3.0, 18.7, 740 * 1.04),
    ],
)
def test_on_paper_the_yardstick_is_reached(
    layers: int, tokens: int, step_ms: float, base_gib: float, gib: float, most_ms: float
) -> None:
    profile = compiled_profile(layers, tokens, step_ms, base_gib)
    found = found_at(profile, gib)
    assert found.prediction.peak_bytes <= gib * GIB
    assert found.prediction.step_ms <= most_ms
    assert found.bound_ms <= found.prediction.step_ms + 1e-6
    assert len(ways_in(profile, found)) <= MOST_VARIANTS
    assert found.prediction == predict(profile, found.plan)


def test_what_is_told_the_compiler_is_told_in_rows() -> None:
    profile = replace(compiled_profile(), frontier=(FEED_FORWARD,))
    found = found_at(profile, 2.8)
    alone = found_at(compiled_profile(), 2.8)
    assert found.prediction.step_ms < alone.prediction.step_ms
    assert FEED_FORWARD.variant in ways_in(profile, found)
    told = {row.scope for row in found.plan.rows if row.op_path == "mlp"}
    assert told == {row.scope for row in found.plan.rows if row.op_path == "norm.mul"}
    assert told == {layer for layer, point in compile_points_of(profile, found.plan) if point.recomputed}


def test_layers_with_fates_of_their_own_are_told_nothing() -> None:
    profile = compiled_profile()
    fixed = MemoryPlan((PlanRow(3, "", "swap"), PlanRow(4, "", "keep")), 16)
    found = find_plan(profile, fixed, Limits(5 * GIB))
    assert not {3, 4} & {layer for layer, _ in compile_points_of(profile, found.plan)}


def test_candidates_show_different_points() -> None:
    profile = compiled_profile()
    first, second, *_ = candidates(profile, nothing(16), Limits(4 * GIB), 3)
    assert ways_in(profile, first)
    assert ways_in(profile, second)
    assert not ways_in(profile, first) & ways_in(profile, second)


def test_a_model_compiled_whole_has_no_frontier() -> None:
    profile = compiled_profile(4)
    assert offered_points(profile)
    assert not offered_points(replace(profile, op_events=profile.op_events[:1]))
    assert not offered_points(replace(profile, compiled_layers=frozenset()))


def test_a_step_is_learned_from() -> None:
    profile, plan = compiled_profile(), at_share(0.5)
    shown = Shown(step_ms=369.0, peak_bytes=int(8.0 * GIB), offloaded_bytes=0)
    found = learned(profile, plan, shown)
    assert predict(found, plan).step_ms == pytest.approx(369.0, rel=1e-3)
    assert predict(found, plan).peak_bytes == pytest.approx(8.0 * GIB, rel=1e-3)
    assert point_of_share(found, 0.5).measured
    near, far = (point_of_share(item, 0.35) for item in (found, profile))
    assert near.again > far.again
    assert near.saved < far.saved
    assert not near.measured
    assert profile_from_json(profile_to_json(found)) == found


def test_swapped_bytes_tell_what_is_saved_and_the_peak_what_passes() -> None:
    profile = compiled_profile()
    found = find_plan(profile, nothing(16), Limits(int(2.8 * GIB)))
    expected = found.prediction
    shown = Shown(None, expected.peak_bytes + GIB // 8, int(0.9 * expected.swapped_bytes))
    better = learned(profile, found.plan, shown)
    again = predict(better, found.plan)
    assert again.swapped_bytes == pytest.approx(shown.offloaded_bytes, rel=0.01)
    assert again.peak_bytes == pytest.approx(shown.peak_bytes, rel=0.01)
    for _, point in compile_points_of(better, found.plan):
        before = next(item for item in offered_points(profile) if item.variant == point.variant)
        assert point.saved < before.saved
        assert point.again == before.again  # no step was timed


def test_a_disturbed_step_does_not_spoil_a_point() -> None:
    profile, plan = compiled_profile(), at_share(0.5)
    point = point_of_share(learned(profile, plan, Shown(9e9, 90 * GIB, 0)), 0.5)
    guess = point_of_share(profile, 0.5)
    assert point.again == pytest.approx(5 * guess.again)
    assert point.saved <= 1
    assert learned(profile, nothing(16), Shown(1.0, 1, 1)) is profile


def compiled_llama() -> Any:
    model = tiny_llama()
    model.config.use_cache = False
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def test_what_can_be_told_is_read_off_the_model() -> None:
    model = compiled_llama()
    first, second = variants_of(model_structure(model), model, 128)
    assert first.recomputed == ("input_layernorm.mul", "mlp", "post_attention_layernorm.mul")
    assert second.recomputed == (*first.recomputed, "self_attn")
    assert second.kept == ("self_attn.flash_attention",)
    assert first.saved > second.saved
    assert first.again < second.again
    assert variants_of(model_structure(tiny_llama()), tiny_llama(), 128) == ()


@pytest.mark.slow
def test_the_bytes_of_a_way_are_as_guessed() -> None:
    """What a step keeps under the first way, against the guess from weights alone."""
    model = compiled_llama()
    point = variants_of(model_structure(model), model, 16)[0]
    rows = [PlanRow(layer, path, "recompute") for layer in range(4) for path in point.recomputed]
    sizes = [bytes_saved(compiled_llama(), plan) for plan in ((), rows)]
    assert sizes[1] / sizes[0] == pytest.approx(point.saved, abs=0.03)


def bytes_saved(model: Any, rows: Any) -> int:
    """Bytes that the inner layers swap when all of them are swapped: all that they save."""
    torch._dynamo.reset()
    fates: tuple[tuple[str, Fate], ...] = (("", "swap"), ("output", "keep"))
    swaps = [PlanRow(layer, path, fate) for layer in range(1, 3) for path, fate in fates]
    plan = MemoryPlan((*swaps, *rows), 4, min_tensor_bytes=1)
    with apply(model, plan) as applied:
        forward(model).backward()
    return applied.stats().offloaded_bytes


@pytest.mark.slow
def test_many_plans_do_not_make_the_compiler_give_up() -> None:
    model = compiled_llama()
    shares = [round(0.05 * number, 2) for number in range(1, 13)]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for share in shares:
            with apply(model, at_share(share, 4)):
                forward(model).backward()
    assert counters["stats"]["unique_graphs"] == len(shares)


def planned(share: float, unplanned: Trained, **settings: Any) -> Trained:
    budget = share * unplanned.peak_bytes / GIB
    return train(compiled_llama, {"mode": "adaptive", "budget_gib": budget, **settings}, steps=STEPS)


@pytest.fixture(scope="module")
def unplanned() -> Trained:
    torch._dynamo.reset()
    return train(compiled_llama, steps=STEPS)


@pytest.mark.parametrize(
    ("build", "asked", "steps"),
    [(tiny_llama, 1, 1), (compiled_llama, 1, 3), (compiled_llama, 2, 3), (compiled_llama, 4, 4)],
)
def test_the_memory_of_the_step_that_compiles_is_not_recorded(
    build: Callable[[], Any], asked: int, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    memory = {"mode": "adaptive", "warmup_steps": asked}
    with (
        caplog.at_level("INFO"),
        apply(model, {"memory": memory}, optimizer=torch.optim.SGD(model.parameters())) as planner,
    ):
        first_steps = planner._phase
    said = [text for record in caplog.records if (text := record.getMessage()).startswith("adaptive: ")]
    assert first_steps.steps_left == steps
    assert len([text for text in said if f"warmup_steps: {asked}, because" in text]) == int(steps > asked)


@pytest.mark.slow
def test_three_phases_of_compiled_layers(unplanned: Trained) -> None:
    compiled: list[int] = []

    def build() -> Any:
        model = compiled_llama()
        model.register_forward_pre_hook(lambda *_: compiled.append(counters["stats"]["unique_graphs"]))
        return model

    budget = int(0.62 * unplanned.peak_bytes)
    found = train(build, {"mode": "adaptive", "budget_gib": budget / GIB, "search_steps": 4}, steps=STEPS)
    assert found.losses == unplanned.losses
    assert found.phases[-3:] == ["stable"] * 3
    assert max(found.stable_peaks()) <= budget
    assert any(COMPILE_BUDGET in row.parameters or row.op_path for row in found.plan_rows)
    assert compiled[-1] == compiled[-3] == counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]


@pytest.mark.slow
def test_all_is_run_again_where_nothing_else_fits(unplanned: Trained) -> None:
    found = planned(0.5, unplanned)
    assert found.losses == unplanned.losses
    assert max(found.stable_peaks()) <= 0.5 * unplanned.peak_bytes


def whole() -> Any:
    model = tiny_llama()
    model.compile(backend="aot_eager")
    return model


def wrapped_whole() -> Any:
    return torch.compile(tiny_llama(), backend="aot_eager")


@pytest.mark.parametrize("build", [whole, wrapped_whole])
def test_a_model_compiled_whole_is_rejected(build: Callable[[], Any]) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((PlanError, ConfigError), match="one by one"):
        apply(model, {"memory": {"mode": "adaptive", "budget_gib": 1.0}}, optimizer=optimizer)


@pytest.mark.slow
def test_the_frontier_is_measured_by_the_trials(unplanned: Trained) -> None:
    found = planned(0.55, unplanned, search_steps=6)
    assert len({trial.plan.rows for trial in found.planner.trials}) == len(found.planner.trials)
    last = found.planner.trials[-1]
    assert last.prediction.peak_bytes == pytest.approx(last.reserved_peak_bytes, rel=0.1)


def test_points_are_plain_data() -> None:
    assert FrontierPoint().variant == (1.0, (), ())
    assert FrontierPoint(0.5, saved=0.4).variant == FrontierPoint(0.5, saved=0.6).variant


def test_what_a_trial_missed_is_a_part_of_its_peak() -> None:
    """And its first step, which compiles, says nothing of the time."""
    first = SimpleNamespace(step_ms=1.0, peak_bytes=100, missing_bytes=30, offloaded_bytes=0)
    second = SimpleNamespace(step_ms=5.0, peak_bytes=110, missing_bytes=0, offloaded_bytes=7)
    trial: Any = SimpleNamespace(steps=[first, second])
    assert shown_by(trial) == Shown(5.0, 130, 7)
