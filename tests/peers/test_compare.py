"""The comparison of two runs of other projects' tests finds what a plan broke."""

from __future__ import annotations

from typing import Any

from tests.peers.run import compare


def outcome_of(
    outcome: str = "passed", numbers: tuple[str, ...] = ("0.5 abc",), plans: int = 1
) -> dict[str, Any]:
    return {"outcome": outcome, "numbers": list(numbers), "plans": plans}


def test_failures_and_other_numbers_count_where_the_test_passes_without_a_plan() -> None:
    without = {
        "same": outcome_of(plans=0),
        "no training": outcome_of(numbers=(), plans=0),
        "fails": outcome_of(plans=0),
        "other gradient": outcome_of(plans=0),
        "absent": outcome_of(plans=0),
        "never passed": outcome_of("failed"),
        "skipped": outcome_of("skipped"),
    }
    with_plan = {
        "same": outcome_of(),
        "no training": outcome_of(numbers=()),
        "fails": outcome_of("failed"),
        "other gradient": outcome_of(numbers=("0.5 abd",)),
        "never passed": outcome_of("failed"),
        "skipped": outcome_of("skipped"),
    }
    found = compare(without, with_plan)
    assert found.counted == 5
    assert found.trained == 3
    assert found.failed == ["fails", "absent"]
    assert found.differing == ["other gradient"]
