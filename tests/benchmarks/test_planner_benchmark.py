"""The planner among the methods of the frontier, and plans on paper."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import frontier
from benchmarks.methods import Budget, options_of
from benchmarks.planner_paper import Paper
from benchmarks.records import Result
from benchmarks.rows import BUDGETS, PLANNER_ROWS, ROWS
from benchmarks.workloads import PRESETS

GIB = 2**30
TINY = ("--device", "cpu", "--preset", "cpu", "--layers", "3", "--tokens", "64", "--steps", "2")
METHODS = ("actswap_plan_checkpointing", "actswap_plan_half", "actswap_plan_reduce")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("planner") / "out.json"
    assert frontier.main([*TINY, "--rows", *METHODS, "--out", str(out)]) == 0
    assert [path.name for path in sorted(out.parent.iterdir())] == ["out.json", "out.png"]
    return {row["method"]: row for row in json.loads(out.read_text(encoding="utf-8"))}


@pytest.mark.slow
def test_the_planner_keeps_to_its_budgets_and_changes_no_bit(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == ["eager", "hf-checkpointing", *METHODS]  # a budget's base is measured unasked
    for name in METHODS:
        row = rows[name]
        assert (row["status"], row["exact"]) == ("measured", True)
        assert row["peak_allocated_bytes"] <= row["budget_bytes"]
        assert row["predicted_peak_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=0.01)
        assert row["predicted_ms"] > 0
        assert 3 <= row["steps_to_stable"] <= 10
        assert row["trials"] >= 1
        assert len(row["planner_step_ms"]) == row["steps_to_stable"]
        assert 0 < row["planning_s"] < 60


@pytest.mark.slow
def test_budgets_are_what_they_are_called(rows: dict[str, dict[str, Any]]) -> None:
    eager = rows["eager"]
    used = eager["activation_bytes"]
    budgets = {name: rows[name]["budget_bytes"] for name in METHODS}
    assert budgets["actswap_plan_checkpointing"] == rows["hf-checkpointing"]["peak_allocated_bytes"]
    baseline = eager["peak_allocated_bytes"] - used
    assert budgets["actswap_plan_half"] == pytest.approx(baseline + used / 2, abs=1)
    assert budgets["actswap_plan_reduce"] == pytest.approx(eager["peak_allocated_bytes"] - 0.3 * used, abs=1)
    memory = rows["actswap_plan_reduce"]["config"]["memory"]
    assert memory == {"reduce_by_gib": pytest.approx(0.3 * used / GIB)}


def result(method: str, ms: float | None = 1.0, **values: Any) -> Result:
    return replace(Result(method, False, "m", 1, 1, 1, False, ms=ms), **values)


def test_a_budget_whose_base_was_not_measured_says_so() -> None:
    eager = result("eager", activation_bytes=10, peak_allocated_bytes=30, peak_reserved_bytes=40)
    without = result("hf-checkpointing", None)
    assert options_of(Budget(share=0.5), False, [eager]) == {
        "memory": {"budget_gib": 35 / GIB},
        "budget_bytes": 35,
    }
    reason = "its budget is the peak of hf-checkpointing, which was not measured"
    for known in ([eager], [eager, without]):
        assert options_of(BUDGETS["checkpointing"], True, known) == reason
    base = result("hf-checkpointing", peak_allocated_bytes=11, peak_reserved_bytes=12)
    found = options_of(BUDGETS["checkpointing"], True, [eager, base])
    assert found == {"planned": {"memory": {"budget_gib": 12 / GIB}, "budget_bytes": 12}}


def test_every_planner_row_is_named_for_what_it_is() -> None:
    assert all(row.name.startswith("actswap_plan_") and row.budget for row in PLANNER_ROWS)
    assert {row.name for row in ROWS} >= {row.name for row in PLANNER_ROWS}
    assert [row.budget for row in PLANNER_ROWS if row.compiles] == list(BUDGETS.values())
    names = [row.name for row in ROWS]
    for row in PLANNER_ROWS:
        assert row.budget is not None
        assert all(names.index(base) < names.index(row.name) for base in row.budget.needs)


def test_plans_on_paper_lie_below_checkpointing() -> None:
    tiny = replace(PRESETS["7b-8k"], layers=4, tokens=4096)
    found = {item.method: item for item in Paper(tiny, "H200").run((0.5,))}
    checkpointing = found["hf-checkpointing"]
    for name in ("actswap_plan_checkpointing", "actswap_plan_half", "actswap_plan_least"):
        planned = found[name]
        assert planned.predicted_peak_bytes <= (planned.budget_bytes or 0)
        assert planned.ms < checkpointing.ms
    assert found["eager"].ms <= found["actswap_plan_half"].ms <= found["actswap_plan_checkpointing"].ms
    assert found["measured eager"].ms == 388
