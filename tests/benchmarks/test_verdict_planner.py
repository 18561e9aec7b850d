"""The verdict on the planner, on made-up results: passing, failing, missing."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.verdict import SHAPES, judge_planner, lower_left, time_on
from tests.benchmarks.made_up_rows import GIB, Row, measured


def row(method: str, seq: int, ms: float, gib: float, budget_gib: float | None = None) -> Row:
    return {
        **measured(method, seq, ms, gib),
        "peak_reserved_bytes": int((gib + 12.1) * GIB),
        "budget_bytes": None if budget_gib is None else int((budget_gib + 12.1) * GIB),
        "predicted_peak_bytes": int((gib + 12.2) * GIB),
        "predicted_ms": 0.95 * ms,
        "steps_to_stable": 10,
        "planning_s": 3.0,
        "config": {"memory": {"reduce_by_gib": 7.0}},
    }


def planned() -> list[Row]:
    return [
        row("eager", 8192, 390, 23.6),
        row("hf-checkpointing", 8192, 502, 2.8),
        row("compiled", 8192, 330, 16.9),
        row("actswap_plan_checkpointing", 8192, 440, 2.8, 2.8),
        row("actswap_plan_half", 8192, 395, 11.8, 11.8),
        row("actswap_plan_reduce", 8192, 391, 16.5, 16.6),
        row("actswap_plan_compiled_checkpointing", 8192, 380, 2.7, 2.8),
        row("actswap_plan_compiled_half", 8192, 340, 11.7, 11.8),
        row("eager", 32768, 840, 37.4),
        row("hf-checkpointing", 32768, 1060, 8.8),
        row("compiled", 32768, 740, 27.4),
        row("actswap_plan_checkpointing", 32768, 860, 8.7, 8.8),
        row("actswap_plan_half", 32768, 850, 18.6, 18.7),
        row("actswap_plan_reduce", 32768, 845, 30.4, 30.4),
        row("actswap_plan_compiled_checkpointing", 32768, 820, 8.7, 8.8),
        row("actswap_plan_compiled_half", 32768, 750, 18.6, 18.7),
    ]


def peers() -> list[Row]:
    """Of another run, on a machine that was a tenth slower."""
    return [
        row("eager", 8192, 429, 23.6),
        row("compiled", 8192, 364, 16.9),
        row("compiled-budget", 8192, 380, 9.5),
        row("trl-offloading", 8192, 1060, 8.1),
        row("actswap-mix-eager", 8192, 495, 2.7),  # 450 beside the planner's 440
        row("eager", 32768, 840, 37.4),
        row("compiled-checkpointing", 32768, 1063, 6.3),
    ]


def verdicts(*files: list[Row]) -> dict[str, str]:
    findings = judge_planner(files, SHAPES)
    found = {finding.claim: finding.verdict for finding in findings}
    assert len(found) == len(findings)
    return found


def test_good_results_pass() -> None:
    found = verdicts(peers(), planned())
    assert set(found.values()) == {"pass"}
    assert {claim.partition(" ")[0] for claim in found} == {str(number) for number in range(8, 15)}
    assert len(found) == 2 * 12


def changed(method: str, seq: int, **values: Any) -> list[Row]:
    return [
        {**item, **values} if (item["method"], item["seq"]) == (method, seq) else item for item in planned()
    ]


@pytest.mark.parametrize(
    ("method", "seq", "values", "claim"),
    [
        ("actswap_plan_checkpointing", 8192, {"ms": 457.0}, "8 8k: actswap_plan_checkpointing, speed"),
        ("actswap_plan_checkpointing", 32768, {"ms": 923.0}, "8 32k: actswap_plan_checkpointing, speed"),
        ("actswap_plan_compiled_checkpointing", 8192, {"ms": 384.0}, "8 8k: actswap_plan_compiled_check"),
        ("actswap_plan_compiled_checkpointing", 32768, {"ms": 850.0}, "8 32k: actswap_plan_compiled_check"),
        ("actswap_plan_half", 8192, {"ms": 406.0}, "9 8k: actswap_plan_half, time over eager"),
        ("actswap_plan_compiled_half", 32768, {"ms": 771.0}, "9 32k: actswap_plan_compiled_half"),
        ("actswap_plan_half", 8192, {"budget_bytes": 23 * GIB}, "11 8k: peak reserved over the budget"),
        ("actswap_plan_reduce", 8192, {"peak_reserved_bytes": 29 * GIB + 2**28, "budget_bytes": 0}, "12"),
        ("actswap_plan_reduce", 8192, {"peak_reserved_bytes": int(28.2 * GIB)}, "12"),
        ("actswap_plan_half", 8192, {"predicted_peak_bytes": 22 * GIB}, "13 8k: predicted peak off"),
        ("actswap_plan_half", 32768, {"predicted_ms": 760.0}, "13 32k: predicted time off"),
        ("actswap_plan_half", 8192, {"steps_to_stable": 11}, "14 8k: steps to stable"),
        ("actswap_plan_half", 8192, {"steps_to_stable": None}, "14 8k: steps to stable"),
        ("actswap_plan_half", 8192, {"planning_s": 5.1}, "14 8k: s of planning"),
    ],
)
def test_each_bound_can_fail(method: str, seq: int, values: dict[str, Any], claim: str) -> None:
    values = {**values, **({"predicted_ms": values["ms"]} if "ms" in values else {})}
    found = [name for name, outcome in verdicts(changed(method, seq, **values)).items() if outcome == "FAIL"]
    assert len(found) == 1
    assert found[0].startswith(claim)


def test_somebody_below_the_curve_is_named() -> None:
    on_the_curve_ms = (440 + 395) / 2 * 429 / 390  # in the middle between two budgets
    faster = [*peers(), row("somebody", 8192, 0.97 * on_the_curve_ms, 7.3)]
    findings = [item for item in judge_planner([faster, planned()], SHAPES) if item.verdict == "FAIL"]
    assert [(item.claim.partition(",")[0], item.remark) for item in findings] == [
        ("10 8k: eager layers", "somebody")
    ]
    assert findings[0].measured == pytest.approx(0.03, abs=1e-3)


def test_without_the_planner_nothing_is_measured() -> None:
    assert set(verdicts(peers()).values()) == {"not measured"}
    assert set(verdicts([]).values()) == {"not measured"}


def test_curve() -> None:
    curve = lower_left([(2.0, 5.0), (1.0, 9.0), (3.0, 6.0), (4.0, 4.0)])
    assert curve == [(1.0, 9.0), (2.0, 5.0), (4.0, 4.0)]
    assert [time_on(curve, at) for at in (0.5, 1.0, 1.5, 3.0, 4.0, 9.0)] == [9.0, 9.0, 7.0, 4.5, 4.0, 4.0]
