"""The whole search, on profiles made by hand: plans keep within the limits, and are the best there are."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from hf_actswap.config.sizes import gib_text
from hf_actswap.errors import PlanError
from hf_actswap.plan import MemoryPlan, PlanRow, Windows, swapped_bytes
from hf_actswap.plan.actions import Fate
from hf_actswap.plan.saved_bytes import swapped_copies
from hf_actswap.planner import BudgetError, Limits, Profile, find_plan, predict
from hf_actswap.planner.search import layer_milp
from hf_actswap.planner.search.find_plan import Found, Search, candidates, least_peak_bytes
from hf_actswap.planner.search.layer_graph import effective_min_bytes
from hf_actswap.planner.search.layer_milp import Solution
from tests.quick_cases import quick_first

from .search_profiles import MIB, Op, link_of, llama_layer, profile_of

TOKENS, LAYERS = 8192, 6
NOTHING = MemoryPlan((), LAYERS, min_tensor_bytes=2**20)


def llama(gb_per_s: float | None = 55.0, tokens: int = TOKENS, layers: int = LAYERS) -> Profile:
    link = None if gb_per_s is None else link_of(gb_per_s)
    return profile_of([llama_layer(tokens)] * layers, link, tokens * 8192, 64 * MIB, 2 * tokens * 8192, 5.0)


def unplanned_peak(profile: Profile) -> int:
    return predict(profile, MemoryPlan((), profile.num_layers)).peak_bytes


def found_at(profile: Profile, share: float, fixed: MemoryPlan = NOTHING, **limits: object) -> Found:
    """The plan for a budget between the least peak (0) and the peak without a plan (1)."""
    least, most = least_peak_bytes(profile, fixed, Limits(0)), unplanned_peak(profile)
    budget = int(least + share * (most - least))
    return find_plan(profile, fixed, Limits(budget, **limits))  # type: ignore[arg-type]


def fates(plan: MemoryPlan) -> Counter[str]:
    return Counter(row.fate for row in plan.rows)


@pytest.mark.parametrize(("fate", "least_bytes"), [("swap", 5), ("recompute", 100)])
def test_the_size_below_which_nothing_moves(fate: Fate, least_bytes: int) -> None:
    """Rows that a configuration swaps hold for all tensors of its own least size, also beside a planner's."""
    fixed = MemoryPlan((PlanRow(0, "mlp", fate),), LAYERS, min_tensor_bytes=5)
    assert effective_min_bytes(fixed, Limits(0, min_tensor_bytes=100)) == least_bytes
    assert effective_min_bytes(fixed, Limits(0, min_tensor_bytes=3)) == 5


def test_without_pressure_nothing_is_planned() -> None:
    profile = llama()
    found = find_plan(profile, NOTHING, Limits(unplanned_peak(profile)))
    assert found.plan == NOTHING
    assert found.bound_ms == pytest.approx(profile.compute_ms + profile.outside_ms)
    assert found.prediction.step_ms == pytest.approx(found.bound_ms)


@pytest.mark.parametrize(
    "gb_per_s",
    [None, pytest.param(12.0, marks=pytest.mark.slow), 55.0, pytest.param(300.0, marks=pytest.mark.slow)],
)
def test_budget_holds_and_more_memory_is_never_slower(gb_per_s: float | None) -> None:
    profile = llama(gb_per_s)
    least, most = least_peak_bytes(profile, NOTHING, Limits(0)), unplanned_peak(profile)
    steps = []
    for share in (0.0, 0.05, 0.2, 0.5, 0.8):
        budget = int(least + share * (most - least))
        found = find_plan(profile, NOTHING, Limits(budget))
        assert found.prediction.peak_bytes <= budget
        assert predict(profile, found.plan) == found.prediction
        assert found.bound_ms <= found.prediction.step_ms * 1.01
        assert keeps_its_promises(found.plan)
        steps.append(found.prediction.step_ms)
    compute_ms = profile.compute_ms
    assert all(after <= before + 0.005 * compute_ms for before, after in pairwise(steps)), steps
    with pytest.raises(BudgetError, match=f"at least {gib_text(least, math.ceil)}"):
        find_plan(profile, NOTHING, Limits(least - 1))


def keeps_its_promises(plan: MemoryPlan) -> bool:
    """Swaps have windows in numbers, other rows none, and no row says again what another says."""
    names = [(row.scope, row.op_path, row.ordinal) for row in plan.rows]
    return len(set(names)) == len(names) and all(
        (row.windows is None) != (row.fate == "swap") for row in plan.rows
    )


def test_the_plan_is_faster_than_recomputing_all_layers_within_the_same_memory() -> None:
    profile = llama()
    full = predict(profile, MemoryPlan(tuple(PlanRow(n, "", "recompute") for n in range(LAYERS)), LAYERS))
    found = find_plan(profile, NOTHING, Limits(full.peak_bytes))
    assert found.prediction.step_ms < 0.9 * full.step_ms
    assert found.prediction.peak_bytes <= full.peak_bytes


def reading(profile: Profile, path: str) -> Profile:
    """Return ``profile`` where the host reads values in an op of each layer."""
    return replace(
        profile,
        op_events=tuple(replace(item, reads_values=item.call[1] == path) for item in profile.op_events),
    )


def test_a_value_that_is_read_waits_for_all_copies_that_have_begun() -> None:
    """Two ops of 10 ms, the first of which sends 55 MB on its way in 1 ms, or 1,100 MB in 20."""
    for size_bytes, stall_ms in ((55_000_000, 0.0), (1_100_000_000, 10.0)):
        ops = (
            *(Op("made", size_bytes, 10.0, ("x",), ("made",)), Op("between", 8, 10.0, ("made",))),
            *(Op("router", 8, 1.0, ("between",)), Op("after", 8, 100.0, ("router",))),
        )
        swapped = MemoryPlan((PlanRow(0, "made", "swap", windows=Windows(1, 9)),), 1)
        free = profile_of([ops], link_of(55.0))
        assert predict(free, swapped).forward_stall_ms == 0.0, "it leaves beside what comes after"
        found = predict(reading(free, "router"), swapped)
        assert found.forward_stall_ms == pytest.approx(stall_ms, abs=0.1)
        assert predict(reading(free, "router"), MemoryPlan((), 1)).forward_stall_ms == 0.0


def test_less_is_swapped_where_layers_read_values() -> None:
    """What has begun to leave before the value would be waited for: the plan recomputes more instead."""
    profile = llama(20.0)
    free = found_at(profile, 0.1)
    found = found_at(reading(profile, "attn.core"), 0.1)
    unaware = predict(reading(profile, "attn.core"), free.plan)
    assert found.prediction.swapped_bytes < free.prediction.swapped_bytes
    assert found.prediction.step_ms < unaware.step_ms
    full = predict(profile, MemoryPlan(tuple(PlanRow(n, "", "recompute") for n in range(LAYERS)), LAYERS))
    assert found.prediction.step_ms < full.step_ms


def test_the_same_input_gives_the_same_plan() -> None:
    profile = llama(layers=4)
    fixed = replace(NOTHING, num_layers=4)
    limits = Limits(unplanned_peak(profile) // 2)
    assert find_plan(profile, fixed, limits) == find_plan(profile, fixed, limits)


def test_a_link_without_end_swaps_and_does_not_recompute() -> None:
    found = found_at(llama(1e6), 0.15)
    assert set(fates(found.plan)) == {"swap"}
    assert found.prediction.recompute_ms == 0.0


def test_without_a_link_calls_are_run_again_by_ms_per_byte() -> None:
    """Three tensors of one size, rebuilt from the layer's input in 1, 2 and 4 ms."""
    ops = tuple(Op(f"op{ms}", 16 * MIB, float(ms), ("x",), (f"op{ms}",)) for ms in (4, 1, 2))
    layer = (*ops, Op("out", MIB, 0.1, ("x",), ("x",)))
    profile = profile_of([layer] * 4, None, MIB)
    fixed = MemoryPlan((), 4, min_tensor_bytes=2**20)
    for budget_mib, dropped in ((160, 1), (105, 2), (70, 3)):
        found = find_plan(profile, fixed, Limits(budget_mib * MIB))
        paths = Counter(row.op_path for row in found.plan.rows)
        assert set(fates(found.plan)) == {"recompute"}
        assert set(paths) <= set(["op1", "op2", "op4"][:dropped])


@pytest.mark.parametrize(
    ("bucket_mib", "layers_per_stage"), quick_first([(0, 1), (200, 3), (200, 1), (500, 3)], 2)
)
def test_swap_bucket_is_a_cap_of_each_stage(bucket_mib: int, layers_per_stage: int) -> None:
    profile = llama(200.0)
    bucket = bucket_mib * MIB
    found = found_at(profile, 0.3, swap_bucket_bytes=bucket, layers_per_stage=layers_per_stage)
    stages: Counter[int] = Counter()
    for copy in swapped_copies(profile.saved, found.plan):
        scope = copy.row.scope
        stages[(scope if isinstance(scope, int) else 0) // layers_per_stage] += copy.size_bytes
    assert max(stages.values(), default=0) <= bucket
    assert bool(stages) == bool(bucket)


@pytest.mark.parametrize("host_mib", [0, 300, 2000])
def test_host_memory_is_a_cap(host_mib: int) -> None:
    profile = llama(200.0)
    found = found_at(profile, 0.3, host_bytes=host_mib * MIB)
    assert swapped_bytes(profile.saved, found.plan) == found.prediction.swapped_bytes <= host_mib * MIB
    assert bool(found.prediction.swapped_bytes) == bool(host_mib)


def test_small_tensors_stay() -> None:
    profile = llama(200.0)
    unit = TOKENS * 8192
    found = found_at(profile, 0.3, min_tensor_bytes=unit + 1)
    sizes = {copy.size_bytes for copy in swapped_copies(profile.saved, found.plan)}
    assert sizes
    assert min(sizes) > unit
    large = [storage for storage in profile.saved.storages if storage.size_bytes > unit]
    makers = {use.producer[:2] for storage in large for use in storage.uses}
    swapped = {(row.scope, row.op_path) for row in found.plan.rows if row.fate == "swap"}
    assert swapped <= makers, "nothing else is named"


def test_what_is_written_by_hand_stays_and_is_not_decided_again() -> None:
    rows = (
        PlanRow(0, "", "recompute"),
        PlanRow(1, "mlp", "keep"),
        PlanRow(2, "attn.core", "swap", windows=Windows(3, 9)),
        PlanRow(3, "mlp.silu", "recompute"),
    )
    fixed = replace(NOTHING, rows=rows, bind_numa=False, family="llama")
    found = found_at(llama(), 0.2, fixed)
    assert found.plan.rows[: len(rows)] == rows
    assert (found.plan.bind_numa, found.plan.family) == (False, "llama")
    added = found.plan.rows[len(rows) :]
    assert added
    assert not any(row.scope == 0 and row.op_path != "output" for row in added)
    assert not any(row.scope == 1 and row.op_path.startswith("mlp") for row in added)
    assert not any((row.scope, row.op_path) in ((2, "attn.core"), (3, "mlp.silu")) for row in added)


def test_compiled_layers_move_or_run_again_whole() -> None:
    profile = replace(llama(200.0), compiled_layers=frozenset(range(LAYERS)))
    found = found_at(profile, 0.5)
    assert {row.op_path for row in found.plan.rows} <= {"", "output"}
    assert fates(found.plan)["swap"]
    assert found.prediction.peak_bytes < unplanned_peak(profile)
    without = find_plan(replace(profile, link=None), NOTHING, Limits(unplanned_peak(profile) // 2))
    assert set(fates(without.plan)) == {"recompute"}


def test_candidates_are_different_plans_that_fit() -> None:
    profile = llama()
    limits = Limits(unplanned_peak(profile) // 3)
    found = candidates(profile, NOTHING, limits, 6)
    assert len(found) == 6
    assert found[0] == find_plan(profile, NOTHING, limits)
    assert len({item.plan.rows for item in found}) == 6
    assert all(item.prediction.peak_bytes <= limits.device_bytes for item in found)
    others = [item.prediction.step_ms for item in found[1:]]
    assert others == sorted(others)
    assert any(not item.prediction.swapped_bytes for item in found)


def test_eighty_layers_need_few_variables_and_few_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = llama(layers=80)
    solved: list[Solution | None] = []
    predicted: list[MemoryPlan] = []
    search = Search.__dict__
    solution, simulated = search["_solution"], search["_simulated"]
    monkeypatch.setattr(
        Search, "_solution", lambda self, size: solved.append(solution(self, size)) or solved[-1]
    )
    monkeypatch.setattr(
        Search,
        "_simulated",
        lambda self, plan, *given: predicted.append(plan) or simulated(self, plan, *given),
    )
    budget = unplanned_peak(profile) // 4
    found = find_plan(profile, replace(NOTHING, num_layers=80), Limits(budget))
    assert found.prediction.peak_bytes <= budget
    assert len(solved) <= 8
    assert len(predicted) <= 30
    assert max(variant.columns for variant in solved if variant is not None) <= 800


def test_a_search_leaves_the_output_of_the_process_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, seen = layer_milp.highspy.Highs.run, []

    def talking(solver: object) -> object:
        os.write(1, b"a line of another thread\n")
        seen.append(capfd.readouterr().out)  # at once, not after the solver
        return run(solver)

    monkeypatch.setattr(layer_milp.highspy.Highs, "run", talking)
    found_at(llama(layers=2), 0.5)
    assert set(seen) == {"a line of another thread\n"}
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("library", ["scipy", "highspy"])
def test_missing_solvers_are_said(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(PlanError, match=f"found no {library}. pip install scipy highspy"):
        find_plan(llama(layers=2), replace(NOTHING, num_layers=2), Limits(2**30))
