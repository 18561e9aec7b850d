"""Warm-up, search and stable of real trainings, on a device whose memory is counted."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_actswap import MemoryPlan, PlanError, apply
from hf_actswap.plan import fingerprint_of
from hf_actswap.planner import BudgetError
from tests.engine.tiny_models import tiny_llama
from tests.planner.simulated_device import Trained, train
from tests.quick_cases import quick_first

GIB = 2**30


@pytest.fixture(scope="module")
def unplanned() -> Trained:
    return train(tiny_llama)


@pytest.fixture(scope="module")
def saved(unplanned: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, str]:
    """A training whose planner wrote its plan into a file, and the text of that file."""
    path = tmp_path_factory.mktemp("saved") / "plans" / "plan.json"
    first = train(tiny_llama, memory_of(unplanned, path))
    return first, path.read_text()


def memory_of(unplanned: Trained, path: Path) -> dict[str, Any]:
    return {"mode": "adaptive", "budget_gib": 0.6 * unplanned.peak_bytes / GIB, "plan_file": str(path)}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    ("mode", "share"), [pytest.param("adaptive", 0.8, marks=pytest.mark.slow), ("smart_swap", 0.6)]
)
def test_three_phases_hold_the_budget_and_change_no_number(
    mode: str, share: float, unplanned: Trained
) -> None:
    budget = int(unplanned.peak_bytes * share)
    found = train(tiny_llama, {"mode": mode, "budget_gib": budget / GIB, "search_steps": 8})
    assert found.phases[:3] == ["warm-up", "warm-up", "search"]
    assert "stable" in found.phases[:11]  # after at most 10 steps
    assert found.losses == unplanned.losses
    assert all(torch.equal(found.weights[name], weight) for name, weight in unplanned.weights.items())
    assert found.stable_peaks()
    assert max(found.stable_peaks()) <= budget
    assert found.plan_rows


def test_the_prediction_is_the_measurement(unplanned: Trained) -> None:
    found = train(tiny_llama, {"mode": "adaptive", "budget_gib": 0.7 * unplanned.peak_bytes / GIB})
    for trial in found.planner.trials:
        assert trial.prediction.peak_bytes == pytest.approx(trial.reserved_peak_bytes, rel=0.01)


def test_a_run_that_does_not_fit_survives_from_the_first_step(unplanned: Trained) -> None:
    limit = int(0.5 * unplanned.peak_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        train(tiny_llama, limit_bytes=limit)
    found = train(tiny_llama, {"mode": "adaptive"}, limit_bytes=limit)
    assert found.losses == unplanned.losses
    assert max(found.peaks) <= limit
    assert found.phases[-1] == "stable"


def test_what_cannot_fit_says_what_would(unplanned: Trained) -> None:
    limit = int(0.28 * unplanned.peak_bytes)
    with pytest.raises((BudgetError, torch.OutOfMemoryError), match=r"at least|The least") as caught:
        train(tiny_llama, {"mode": "adaptive"}, limit_bytes=limit)
    assert str(caught.value)


@pytest.mark.slow
def test_a_reduction_is_reached_or_the_largest_is_named(unplanned: Trained) -> None:
    wanted = 0.4 * unplanned.peak_bytes
    found = train(tiny_llama, {"mode": "smart_swap", "reduce_by_gib": wanted / GIB})
    assert max(found.stable_peaks()) <= 1.001 * (unplanned.peak_bytes - wanted)
    with pytest.raises(BudgetError, match=r"reduce_by_gib: expected at most 0\.00\d+ GiB") as caught:
        train(tiny_llama, {"mode": "smart_swap", "reduce_by_gib": 0.8 * unplanned.peak_bytes / GIB})
    most = float(str(caught.value).split("at most ")[1].split(" GiB")[0])
    again = train(tiny_llama, {"mode": "smart_swap", "reduce_by_gib": most * 0.999})
    assert again.phases[-1] == "stable"


def test_a_planner_that_gives_up_leaves_the_process_as_it_was() -> None:
    """Its guard would reject what the next training allocates, and a notebook may have lost the planner."""
    model = tiny_llama().train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    apply(model, {"memory": {"mode": "adaptive", "reduce_by_gib": 100}}, optimizer=optimizer)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(BudgetError, match="less than the peak without a plan"):
        optimizer.step()
    assert not _get_current_dispatch_mode_stack()
    apply(model, {"recompute_config": {"recompute": True}}).remove()


def test_memory_enough_means_nothing_is_done(unplanned: Trained) -> None:
    found = train(tiny_llama, {"mode": "adaptive", "budget_gib": 2 * unplanned.peak_bytes / GIB})
    assert found.plan_rows == ()
    assert found.phases[4] == "stable"  # one trial, nothing faster can be
    assert found.losses == unplanned.losses


def test_after_a_trial_of_one_step_the_next_is_guarded_too(unplanned: Trained) -> None:
    memory = {"mode": "adaptive", "budget_gib": 2 * unplanned.peak_bytes / GIB, "search_steps": 1}
    for steps, guarded in ((3, True), (4, False)):
        found = train(tiny_llama, memory, steps=steps)
        assert found.phases[:3] == ["warm-up", "warm-up", "search"]
        assert (found.planner.phase, found.guarded) == ("stable", guarded)


def test_fates_written_by_hand_stay(unplanned: Trained) -> None:
    written = {"recompute_config": {"select_recompute": {"feed_forward": [2]}}}
    found = train(
        tiny_llama, {"mode": "smart_swap", "budget_gib": 0.7 * unplanned.peak_bytes / GIB}, **written
    )
    assert found.losses == unplanned.losses
    recomputed = {(row.scope, row.op_path) for row in found.plan_rows if row.fate == "recompute"}
    alone = apply(tiny_llama(), written)
    rows = {(row.scope, row.op_path, row.fate) for row in alone.plan.rows}
    alone.remove()
    assert rows <= {(row.scope, row.op_path, row.fate) for row in found.plan_rows}
    assert recomputed


def test_micro_batches(unplanned: Trained) -> None:
    plain = train(tiny_llama, micro_batches=2, steps=7)
    budget = int(0.7 * plain.peak_bytes)
    found = train(tiny_llama, {"mode": "smart_swap", "budget_gib": budget / GIB}, micro_batches=2, steps=7)
    assert found.losses == plain.losses
    assert max(found.stable_peaks()) <= budget


def test_forwards_that_share_a_backward(unplanned: Trained) -> None:
    """The last is recorded, in a step that is known to have several."""
    how: dict[str, Any] = {"micro_batches": 3, "together": True, "steps": 9}
    plain = train(tiny_llama, **how)
    budget = int(0.7 * plain.peak_bytes)
    memory = {"mode": "smart_swap", "budget_gib": budget / GIB, "warmup_steps": 1}
    found = train(tiny_llama, memory, **how)
    assert found.losses == plain.losses
    assert max(found.stable_peaks()) <= budget
    for trial in found.planner.trials:
        assert trial.prediction.peak_bytes == pytest.approx(trial.reserved_peak_bytes, rel=0.01)


def test_the_plan_file_spares_the_search(
    unplanned: Trained, saved: tuple[Trained, str], tmp_path: Path
) -> None:
    first, text = saved
    path = tmp_path / "plan.json"
    path.write_text(text)
    memory = memory_of(unplanned, path)
    plan = MemoryPlan.from_json(text)
    assert plan.rows == first.plan_rows
    assert plan.fingerprint == fingerprint_of(
        tiny_llama(), tuple(json.loads(text)["made_for"]["batch_shape"])
    )
    assert json.loads(text)["measured"]["predicted_peak_bytes"] > 0
    second = train(tiny_llama, memory, steps=4)
    assert second.phases == ["stable"] * 4
    assert second.plan_rows == first.plan_rows
    assert second.losses == unplanned.losses[:4]
    other = train(tiny_llama, {**memory, "mode": "smart_swap"}, steps=3)
    assert other.phases[0] == "warm-up"  # not made for that requested policy


def test_a_plan_file_on_a_full_disk(
    unplanned: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.json"
    (tmp_path / f".plan.json.{os.getpid()}").symlink_to("/dev/full")
    found = train(tiny_llama, memory_of(unplanned, path))
    assert found.losses == unplanned.losses
    assert found.phases[-1] == "stable"
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"the plan is on, but cannot be written to {path} (No space left on device)" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made_for", quick_first(["another model", "the CLI's", "nobody's"], 1))
def test_a_file_that_was_not_made_here_is_never_overwritten(
    unplanned: Trained,
    saved: tuple[Trained, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    made_for: str,
) -> None:
    path = tmp_path / "plan.json"
    memory, (first, text) = memory_of(unplanned, path), saved
    document = json.loads(text)
    if made_for == "another model":
        document["made_for"]["model"] = "gpt, 2 layers, 3 parameters"
    else:
        del document["made_for"]
    if made_for == "nobody's":
        document.update(rows=[], num_layers=1)
    path.write_text(json.dumps(document))
    before = path.read_bytes()
    again = train(tiny_llama, memory, steps=4 if made_for == "the CLI's" else 12)
    assert path.read_bytes() == before
    said = [record.getMessage() for record in caplog.records if "stays as it is" in record.getMessage()]
    if made_for == "the CLI's":  # no word of what it was made for, but it is a plan for this model
        assert again.phases == ["stable"] * 4
        assert again.plan_rows == first.plan_rows
        assert said == []
    else:
        assert (again.phases[0], again.phases[-1]) == ("warm-up", "stable")
        assert len(said) == 1


def test_no_file_that_is_no_plan_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"my": "notes"}')
    with pytest.raises(PlanError, match=r"hf_actswap\.plan"):
        train(tiny_llama, {"mode": "adaptive", "plan_file": str(path)}, steps=1)
    assert path.read_text() == '{"my": "notes"}'


def test_a_malformed_plan_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": "hf_actswap.plan", "format_version": 1, "num_layers": 2, "made_for": 3}')
    with pytest.raises(PlanError, match="made_for"):
        train(tiny_llama, {"mode": "adaptive", "plan_file": str(path)}, steps=1)


def test_longer_batches_are_survived_and_planned_for(unplanned: Trained) -> None:
    def shape(step: int) -> tuple[int, int]:
        return (4, 64) if step < 12 else (4, 128)

    plain = train(tiny_llama, shape=shape, steps=24)
    limit = int(0.6 * plain.peak_bytes)
    found = train(tiny_llama, {"mode": "adaptive"}, shape=shape, steps=24, limit_bytes=limit)
    assert found.losses == plain.losses
    assert [found.phases[step] for step in (11, 13, -1)] == ["stable", "warm-up", "stable"]
    assert max(found.peaks) <= limit


def test_it_needs_the_optimizer() -> None:
    with pytest.raises(PlanError, match="optimizer=optimizer"):
        apply(tiny_llama(), {"memory": {"mode": "adaptive"}})


def test_removed_in_the_middle_of_each_phase(unplanned: Trained) -> None:
    memory: dict[str, Any] = {"mode": "adaptive", "budget_gib": 0.7 * unplanned.peak_bytes / GIB}
    for steps in (1, 2, 3):
        found = train(tiny_llama, memory, steps=steps)
        assert found.losses == unplanned.losses[:steps]
