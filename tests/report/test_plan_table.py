"""The plan as a table."""

from __future__ import annotations

import pytest

from hf_actswap.plan import MemoryPlan, PlanRow, Windows
from hf_actswap.plan.actions import Adjustment
from hf_actswap.report import plan_table

PLAN = MemoryPlan(
    rows=(
        PlanRow(0, "", "swap"),
        PlanRow(1, "", "swap", windows=Windows(20, 60)),
        PlanRow(2, "mlp", "recompute"),
    ),
    num_layers=4,
    family="llama",
)


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_windows_still_to_be_measured_are_auto_and_only_those_of_a_swap() -> None:
    assert cells(plan_table(PLAN)) == [
        ["0", "everything", "swap", "auto", "auto"],
        ["1", "everything", "swap", "20", "60"],
        ["2", "mlp", "recompute", "", ""],
        ["3", "everything", "keep", "", ""],
    ]


def test_overrides_stand_below() -> None:
    adjustment = Adjustment("swap_config", (0,), "", "swap, backward_prefetch auto", "keep 4 bytes", "late")
    plan = MemoryPlan(PLAN.rows, PLAN.num_layers, adjustments=(adjustment,))
    assert plan_table(plan).splitlines()[-2:] == ["Requests that were changed:", f"  - {adjustment}"]


def test_a_notebook_has_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = plan_table(PLAN)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert plan_table(PLAN) == text
