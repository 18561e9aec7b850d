"""The plan as a table."""

from __future__ import annotations

import pytest

from hf_actswap import apply, model_structure
from hf_actswap.plan import Adjustment, MemoryPlan, PlanRow, Windows
from hf_actswap.plan.in_words import MOST_LINES, plan_in_words
from hf_actswap.report import plan_summary, plan_table
from tests.engine.tiny_models import tiny_llama

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


def rows(scope: int, paths: list[str], fate: str = "recompute") -> list[PlanRow]:
    return [PlanRow(scope, path, fate) for path in paths]  # type: ignore[arg-type]


def test_in_words_equal_layers_and_the_ops_of_a_module_stand_together() -> None:
    shape = model_structure(tiny_llama())
    norm = [op.path for op in shape.layers[0].ops if op.path.startswith("input_layernorm.")]
    assert len(norm) > 2
    some = ["mlp.gate_proj", "mlp.up_proj"]
    plan = MemoryPlan(
        (
            *rows(0, [*norm, *some]),
            *rows(1, [*norm, *some]),
            *rows(2, ["", "mlp"], "swap"),
            *rows(3, norm[:1]),
        ),
        4,
        "llama",
    )
    assert plan_in_words(plan, shape) == [
        "layers 0-1: recompute input_layernorm.*, mlp.{gate_proj, up_proj}",
        "layer 2: swap everything, mlp",
        f"layer 3: recompute {norm[0]}",
    ]
    assert plan_in_words(plan)[0].startswith("layers 0-1: recompute ")
    assert "input_layernorm.*" not in plan_in_words(plan)[0]
    assert plan_in_words(MemoryPlan((), 4)) == ["everything is kept"]


def test_the_summary_of_the_largest_plan_has_eight_lines() -> None:
    adjustments = tuple(Adjustment("swap_config", (n,), "", "swap", "keep", f"reason {n}") for n in range(9))
    ops = [f"op{n}" for n in range(12)]
    plan = MemoryPlan(
        tuple(PlanRow(n // 2 * 2, op, "swap") for n, op in enumerate(ops)), 12, adjustments=adjustments
    )
    lines = plan_summary(plan)
    assert len(lines) == 1 + MOST_LINES + 1 + 2 == 8
    assert "  and 2 more (`log: full` shows the table)" in lines
    assert lines[-1] == "  changed: 8 more request(s) (`log: full` lists them)"


def test_an_applied_plan_says_what_it_does() -> None:
    applied = apply(tiny_llama(), {"recompute_config": {"recompute": [2]}})
    assert repr(applied) == "<AppliedPlan, on: layers 0-1: recompute everything; keep output>"
    applied.remove()
    assert repr(applied).startswith("<AppliedPlan, removed: ")
