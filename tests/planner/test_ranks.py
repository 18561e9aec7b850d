"""Several ranks, one plan: devices and batches that differ, wrappers, parallel layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.planner.ranks_worker import BAD_STEP, FULL, QUICK_CHECK_STEPS, Run, run_four, run_two, run_two_more
from tests.processes import launched, of_ranks

LIMIT_S = 240

pytestmark = pytest.mark.dist


two = launched(run_two, 2, LIMIT_S)
two_more = launched(run_two_more, 2, LIMIT_S)


four = launched(run_four, 4, LIMIT_S)


def rows(run: Run, step: int = -1) -> list[dict[str, Any]]:
    return json.loads(run.plans[step])["rows"]


def assert_one_plan(found: list[Mapping[str, Run]], name: str = "planned") -> None:
    """All ranks are in the same phase with the same plan in each step, and the losses are untouched."""
    first = found[0][name]
    for runs in found:
        run = runs[name]
        assert run.problem is None
        assert run.phases == first.phases
        assert run.plans == first.plans
        assert run.losses == runs["plain"].losses[: len(run.losses)]
        assert run.left_over == []
    assert first.phases[-1] == "stable"
    assert rows(first)


def stable_peaks(run: Run) -> list[int]:
    return [peak for peak, phase in zip(run.peaks, run.phases, strict=True) if phase == "stable"]


def check_devices(found: list[Mapping[str, Run]]) -> None:
    assert_one_plan(found)
    assert found[0]["planned"].evicted_bytes > 0
    assert all(runs["planned"].evicted_bytes == 0 for runs in found[1:])
    least = int(0.6 * max(runs["plain"].peak_bytes for runs in found))
    assert all(max(stable_peaks(runs["planned"])) <= least for runs in found)


def check_lengths(found: list[Mapping[str, Run]]) -> None:
    assert_one_plan(found)
    budget = 0.7 * max(runs["plain"].peak_bytes for runs in found)
    assert all(max(stable_peaks(runs["planned"])) <= budget for runs in found)
    assert max(stable_peaks(found[-1]["planned"])) > max(stable_peaks(found[0]["planned"]))


def check_impossible(found: list[Mapping[str, Run]]) -> None:
    problems = {runs["planned"].problem for runs in found}
    assert len(problems) == 1
    assert "memory.budget_gib: expected at least" in str(problems.pop())
    for runs in found:
        assert len(runs["planned"].losses) == len(found[0]["planned"].losses)
        assert runs["planned"].left_over == []
        assert len(runs["after"].losses) == 2


@pytest.mark.slow
def test_the_smallest_device_is_the_budget_of_all(two_more: Path) -> None:
    check_devices(of_ranks(two_more, "devices"))


@pytest.mark.slow
def test_the_longest_batch_is_planned_for_on_all(two_more: Path) -> None:
    check_lengths(of_ranks(two_more, "lengths"))


@pytest.mark.slow
def test_a_longer_batch_of_one_rank_is_planned_for_ahead_of_its_step(two_more: Path) -> None:
    found = of_ranks(two_more, "longer")
    assert_one_plan(found)
    assert found[0]["planned"].phases == ["warm-up", "search", "search", "stable", "stable", "stable"]
    budget = 0.75 * max(runs["plain"].peak_bytes for runs in found)
    for runs in found:
        assert runs["planned"].peak_bytes <= budget
        assert runs["planned"].evicted_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_ranks_with_long_and_short_batches_in_turn(wrapper: str, two_more: Path) -> None:
    found = of_ranks(two_more, "turns")
    first = found[0][f"planned {wrapper}"]
    budget = 0.6 * max(runs[f"plain {wrapper}"].peak_bytes for runs in found)
    for runs in found:
        run, plain = runs[f"planned {wrapper}"], runs[f"plain {wrapper}"]
        assert run.problem is None
        assert run.losses == plain.losses
        assert (run.phases, run.plans) == (first.phases, first.plans)
        assert run.collectives == plain.collectives
        assert max(stable_peaks(run)) <= budget
        assert run.left_over == []
    assert first.phases[6:] == ["stable"] * 10


def test_no_plan_is_the_same_error_on_all(two: Path) -> None:
    check_impossible(of_ranks(two, "impossible"))


@pytest.mark.slow
def test_tiles_are_chosen_on_all_ranks(two_more: Path) -> None:
    found = of_ranks(two_more, "tiles")
    budget = 0.7 * max(runs["plain"].peak_bytes for runs in found)
    for runs in found:
        run = runs["planned"]
        assert run.problem is None
        assert run.phases == ["warm-up"] * 4 + ["search"] * 2 + ["stable"]
        assert [tile["scope"] for tile in json.loads(run.plans[-1])["tiles"]] == ["head"]
        assert run.losses == pytest.approx(runs["plain"].losses, rel=1e-5)
        assert max(stable_peaks(run)) <= budget
        assert run.left_over == []
        # Rank 1 alone would run out of memory in its first step.
        run = runs["no room"]
        assert run.problem is None
        assert run.phases == ["warm-up"] * 2 + ["search"] * 2 + ["stable"]
        assert [tile["scope"] for tile in json.loads(run.plans[1])["tiles"]] == ["head"]
        assert run.losses == pytest.approx(runs["plain"].losses[:5], rel=1e-5)
        assert run.left_over == []


@pytest.mark.slow
def test_four_ranks(four: Path) -> None:
    check_devices(of_ranks(four, "devices"))
    check_lengths(of_ranks(four, "lengths"))
    check_impossible(of_ranks(four, "impossible"))


@pytest.mark.slow
def test_the_plan_file_of_rank_0_serves_all(two_more: Path) -> None:
    found = of_ranks(two_more, "plan_file")
    assert_one_plan(found, "first")
    assert_one_plan(found, "again")
    assert (two_more / "plan.json").exists()
    assert not (two_more / "elsewhere").exists()
    for runs in found:
        assert runs["again"].phases == ["stable"] * 3
        assert rows(runs["again"], 0) == rows(runs["first"])
        assert runs["other"].phases[:2] == ["warm-up", "warm-up"]  # another budget


@pytest.mark.slow
def test_states_of_the_optimizer_are_away_on_all(two_more: Path) -> None:
    assert_one_plan(of_ranks(two_more, "states"))


@pytest.mark.slow
def test_frozen_weights_are_on_the_host_of_all(two_more: Path) -> None:
    found = of_ranks(two_more, "frozen")
    for name, share in (("planned", 0.75), ("chosen", 0.67)):
        assert_one_plan(found, name)
        for runs in found:
            assert json.loads(runs[name].plans[-1])["weights"] == "host"
            # The first stable step has checksums beside, of some 2 KiB, which the planner leaves out too.
            assert max(stable_peaks(runs[name])[1:]) <= share * runs["plain"].peak_bytes
    assert [runs["chosen"].phases.count("warm-up") for runs in found] == [
        4,
        4,
    ]  # again, with the weights moved


@pytest.mark.slow
def test_sharded_weights(two_more: Path) -> None:
    found = of_ranks(two_more, "fsdp2")
    assert_one_plan(found)
    limit = int(0.75 * max(runs["plain"].peak_bytes for runs in found))
    for runs in found:
        assert max(runs["planned"].peaks) <= limit < runs["plain"].peak_bytes * 0.76
        assert runs["planned"].evicted_bytes > 0


def test_what_communicates_is_not_recomputed(two: Path) -> None:
    check_communication(of_ranks(two, "tensor_parallel"))


@pytest.mark.slow
def test_what_communicates_is_not_recomputed_with_sequence_parallelism(two_more: Path) -> None:
    check_communication(of_ranks(two_more, "sequence_parallel"))


def check_communication(found: list[Mapping[str, Run]]) -> None:
    assert_one_plan(found)
    for runs in found:
        assert runs["planned"].collectives == runs["plain"].collectives
    assert found[0]["planned"].collectives == found[1]["planned"].collectives
    assert sum(found[0]["plain"].collectives[0].values()) > 0


@pytest.mark.slow
def test_a_batch_that_grows_on_one_rank(two_more: Path) -> None:
    found = of_ranks(two_more, "grows")
    assert_one_plan(found)
    phases = found[0]["planned"].phases
    first = phases.index("stable")
    looks = [step for step in range(10, 18) if (step - first) % QUICK_CHECK_STEPS == 0]
    assert phases[9] == "stable"
    assert phases.index("warm-up", first) == looks[0]
    limit = int(0.75 * max(runs["plain"].peak_bytes for runs in found))
    assert max(found[1]["planned"].peaks) <= limit


def test_a_forward_that_runs_out_on_one_rank_is_run_again_there(two: Path) -> None:
    found = of_ranks(two, "retry")
    assert_one_plan(found)
    for rank, runs in enumerate(found):
        plain, planned = runs["plain"], runs["planned"]
        assert planned.losses == plain.losses
        assert planned.weights == plain.weights
        assert planned.phases[BAD_STEP - 1 :] == ["stable"] * (len(planned.losses) - BAD_STEP + 1)
        # Ranks look at each other's needs later; until then each survives alone.
        assert planned.guarded[BAD_STEP - 1 : BAD_STEP + 2] == [False, rank == 1, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("backward", "gradients are reduced in backward"),
        ("fsdp2", "FSDP2 gathers weights inside it"),
        ("synchronised", "it communicates, and the other ranks have done their part"),
        ("later", "it communicates, and the other ranks have done their part"),
    ],
)
def test_what_communicates_is_not_run_again(two_more: Path, case: str, why: str) -> None:
    for runs in of_ranks(two_more, "no_retry"):
        problem = runs[case].problem
        assert problem is not None
        assert FULL in problem
        assert why in problem
        assert len(runs[case].losses) == BAD_STEP
        assert runs[case].left_over == []
