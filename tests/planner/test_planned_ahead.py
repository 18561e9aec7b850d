"""``adaptive`` on a device whose rates are known: a plan from shapes is on from the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_actswap import apply
from hf_actswap.engine import frozen_weights, host_budget
from hf_actswap.engine.host_pool import PageableSlabs
from hf_actswap.engine.transfer import BlockingTransfer
from hf_actswap.engine.verify import Verifier
from hf_actswap.plan.actions import OpCall
from hf_actswap.planner import BudgetError, Planner
from hf_actswap.planner.phases import planner as leading
from hf_actswap.report.run_files import saving_of
from tests.engine.simulated_transfer import Clock
from tests.engine.tiny_models import tiny_llama
from tests.planner.simulated_device import Trained, make_device_known, on_device, train
from tests.planner.test_states_in_training import ClockedTransfer

GIB = 2**30


@pytest.fixture(autouse=True)
def _known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    make_device_known(monkeypatch)


@pytest.fixture(scope="module")
def unplanned() -> Trained:
    return train(tiny_llama)


def memory_of(share: float, unplanned: Trained) -> dict[str, object]:
    return {"mode": "adaptive", "budget_gib": share * unplanned.peak_bytes / GIB, "search_steps": 8}


def test_no_step_exceeds_the_budget_and_the_third_is_stable(unplanned: Trained) -> None:
    memory = memory_of(0.7, unplanned)
    found = train(tiny_llama, memory, steps=6)
    assert found.phases == ["warm-up", "search", *["stable"] * 4], "before the first forward nothing is known"
    assert max(found.peaks) <= 0.7 * unplanned.peak_bytes
    assert found.planner is not None
    assert found.planner.evicted_bytes == 0
    assert len(found.planner.trials) == 1
    (trial,) = found.planner.trials
    assert trial.prediction.peak_bytes == pytest.approx(trial.reserved_peak_bytes, rel=0.01)
    assert found.losses == unplanned.losses[:6]


def test_what_others_hold_on_the_device_is_counted(unplanned: Trained) -> None:
    """DDP's buckets, a reference model, tensors of the user."""
    held: list[torch.Tensor] = []

    def shape(_: int) -> tuple[int, int]:
        if not held:
            held.append(torch.zeros(unplanned.peak_bytes // 3, dtype=torch.uint8))
        return 4, 128

    found = train(tiny_llama, memory_of(0.7 + 1 / 3, unplanned), steps=4, shape=shape)
    assert found.phases == ["warm-up", "search", "stable", "stable"]
    assert max(found.peaks) <= (0.7 + 1 / 3) * unplanned.peak_bytes
    assert found.planner is not None
    (trial,) = found.planner.trials
    assert trial.prediction.peak_bytes == pytest.approx(trial.reserved_peak_bytes, rel=0.01)


def assert_predicted_within(share: float, plain: Trained, found: Trained) -> None:
    """One plan has kept all steps within a share of the peak without one, as predicted."""
    assert max(found.peaks) <= share * plain.peak_bytes
    assert found.planner is not None
    (trial,) = found.planner.trials
    assert trial.prediction.peak_bytes == pytest.approx(found.peaks[-1], rel=0.01)
    assert found.planner.evicted_bytes == 0
    assert found.losses == plain.losses


@pytest.mark.parametrize("late", [False, True], ids=["accumulated", "of the last step"])
def test_gradients_that_are_there_in_forward_are_counted(
    late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop does not say beforehand that it accumulates, or that it calls zero_grad after the forward."""

    def model() -> torch.nn.Module:
        return tiny_llama(hidden_size=128)

    how: dict[str, Any] = {"zeroes_late": True} if late else {"micro_batches": 3}
    plain = train(model, steps=5, **how)
    with caplog.at_level("INFO"):
        found = train(model, memory_of(0.8, plain), steps=5, **how)
    assert found.phases == ["warm-up", "search", *["search"] * late, *["stable"] * (3 - late)]
    assert_predicted_within(0.8, plain, found)
    assert ("gradients of the last step" in caplog.text) is late


def test_a_loss_that_the_loop_computes_of_the_logits_is_counted() -> None:
    """Models without labels return logits, here most of the memory."""

    def model() -> torch.nn.Module:
        return tiny_llama(vocab_size=2048)

    plain = train(model, steps=4, own_loss=True)
    found = train(model, memory_of(0.9, plain), steps=4, own_loss=True)
    assert found.phases == ["warm-up", "search", "stable", "stable"]
    assert_predicted_within(0.9, plain, found)


def test_a_batch_that_is_given_by_position_is_planned_for() -> None:
    plain = train(tiny_llama, steps=4, by_position=True)
    found = train(tiny_llama, memory_of(0.7, plain), steps=4, by_position=True)
    assert found.phases == ["warm-up", "search", "stable", "stable"]
    assert_predicted_within(0.7, plain, found)


@pytest.mark.parametrize("share", [0.6, 1.2])
def test_forwards_that_share_a_backward_are_counted(share: float, caplog: pytest.LogCaptureFixture) -> None:
    """Losses of embedding models call the model for each column of a batch; the first step shows it."""
    how: dict[str, Any] = {"micro_batches": 3, "together": True}
    plain = train(tiny_llama, steps=6, **how)
    with caplog.at_level("INFO"):
        found = train(tiny_llama, memory_of(share, plain), steps=6, **how)
    assert found.phases == ["warm-up", "warm-up", "search", "stable", "stable", "stable"]
    assert found.losses == plain.losses
    assert max(found.peaks[1:]) <= share * plain.peak_bytes
    assert found.planner is not None
    (trial,) = found.planner.trials
    assert trial.prediction.peak_bytes == pytest.approx(found.peaks[-1], rel=0.01)
    assert bool(found.plan_rows) is (share < 1)
    assert "a step runs 3 forwards ahead of its backward" in caplog.text


def test_autocast_around_the_call_of_the_model_is_that_of_the_step_on_paper() -> None:
    """Casts of weights, here most of the memory, are not held by autocast in backward."""

    def model() -> torch.nn.Module:
        return tiny_llama(hidden_size=256)

    plain = train(model, steps=4, autocast=True, shape=(1, 32))
    found = train(model, memory_of(1.5, plain), steps=4, autocast=True, shape=(1, 32))
    assert found.phases == ["warm-up", "search", "stable", "stable"]
    assert found.planner is not None
    assert found.planner.task is not None
    assert found.planner.task.unplanned.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)
    assert found.losses == plain.losses


def test_the_outcome_compares_with_the_step_without_a_plan(unplanned: Trained) -> None:
    found = train(tiny_llama, memory_of(0.7, unplanned), steps=6)
    assert found.planner is not None
    outcome = found.planner.outcome
    assert outcome is not None
    assert outcome.source == "predicted from shapes"
    assert outcome.without_peak_bytes == pytest.approx(unplanned.peak_bytes, rel=0.01)
    assert outcome.peak_bytes <= 0.7 * unplanned.peak_bytes


def test_a_larger_batch_is_planned_for_from_shapes_too() -> None:
    def shape(step: int) -> tuple[int, int]:
        return (4, 128) if step < 4 else (8, 128)

    plain = train(tiny_llama, steps=9, shape=shape)
    found = train(tiny_llama, memory_of(0.75, plain), steps=9, shape=shape)
    assert found.phases[4:] == ["stable", "search", "stable", "stable", "stable"]
    assert max(found.peaks) <= 0.75 * plain.peak_bytes
    assert found.planner is not None
    assert found.planner.evicted_bytes == 0
    assert found.losses == plain.losses


def test_what_gave_other_numbers_is_not_run_again_by_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel of each layer has results that depend on timing: that of the first op that is compared."""
    verify, differ = Verifier.differing, []

    def differing(verifier: Verifier) -> tuple[OpCall, ...]:
        compared = dict.fromkeys(call for call, *_ in verifier._compared)
        paths = [path for _, path, _ in (*differ, *compared)]
        found = [call for call in compared if call[1] == paths[0]]
        differ.extend(found)
        return (*verify(verifier), *found)

    def shape(step: int) -> tuple[int, int]:
        return (4, 128) if step < 5 else (8, 128)

    plain = train(tiny_llama, steps=6, shape=shape)
    monkeypatch.setattr(Verifier, "differing", differing)
    found = train(tiny_llama, {**memory_of(0.5, plain), "verify": "first"}, steps=9, shape=shape)
    assert "search" in found.phases[5:], "no second plan"
    assert differ, "nothing was compared"
    assert len(differ) == len(set(differ)), "found once, it ran again"
    fates = {(row.scope, row.op_path, row.ordinal): row.fate for row in found.rows[-1]}
    assert {fates[call] for call in differ} == {"keep"}


@pytest.mark.parametrize("outgrown", ["search", "stable"])
def test_a_larger_micro_batch_is_planned_for_ahead_of_its_forward(outgrown: str) -> None:
    """Gradients of the smaller ones are there, and nothing is evicted."""
    last = {"search": 1, "stable": 4}[outgrown]

    def model() -> torch.nn.Module:
        return tiny_llama(hidden_size=128)

    def shape(step: int) -> list[tuple[int, int]]:
        return [(2, 128), (2, 128), (4, 128) if step == last else (2, 128)]

    plain = train(model, steps=7, shape=shape)
    found = train(model, memory_of(0.85, plain), steps=7, shape=shape)
    assert found.phases[last] == outgrown
    assert max(found.peaks) <= 0.85 * plain.peak_bytes
    assert found.planner is not None
    assert found.planner.evicted_bytes == 0
    assert found.phases[-1] == "stable"
    assert found.losses == plain.losses


def test_a_step_scaled_to_a_larger_batch_counts_the_states_once() -> None:
    """The plan for the larger batch is made at the next one, which is small, when Adam's states are there."""

    def shape(step: int) -> tuple[int, int]:
        return (8, 128) if step == 4 else (4, 128)

    plain = train(tiny_llama, steps=2, shape=lambda _: (8, 128))
    scaled = train(tiny_llama, memory_of(0.75, plain), steps=7, shape=shape).planner
    whole = train(tiny_llama, memory_of(0.75, plain), steps=3, shape=lambda _: (8, 128)).planner
    assert scaled is not None
    assert whole is not None
    assert scaled.task is not None
    assert whole.task is not None
    assert scaled.task.size == whole.task.size
    assert scaled.task.unplanned.peak_bytes == pytest.approx(whole.task.unplanned.peak_bytes, rel=0.002)


def test_what_fits_in_tiles_alone_runs_in_them_from_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """No step is recorded under the guard: logits of 2,048 words are most of the memory."""

    def model() -> torch.nn.Module:
        return tiny_llama(vocab_size=2048)

    def shape(_: int) -> tuple[int, int]:
        return 4, 1024

    plain = train(model, steps=1, shape=shape)
    found = train(model, memory_of(0.36, plain), steps=3, shape=shape)
    assert found.planner is not None
    assert "tile_config head: asked nothing, got tiles" in caplog.text
    assert found.phases == ["warm-up", "search", "stable"]
    assert max(found.peaks) <= 0.36 * plain.peak_bytes
    assert found.planner.evicted_bytes == 0


def test_a_batch_that_outgrows_the_search_is_planned_for_in_tiles(caplog: pytest.LogCaptureFixture) -> None:
    """The first batch needs no tiles, and the second comes before its plan is stable."""

    def model() -> torch.nn.Module:
        return tiny_llama(vocab_size=2048)

    def shape(step: int) -> tuple[int, int]:
        return (4, 1024) if step else (1, 1024)

    plain = train(model, steps=1, shape=lambda _: (4, 1024))
    found = train(model, memory_of(0.5, plain), steps=6, shape=shape)
    assert found.phases[1] == "search"
    assert "for a batch of" not in caplog.text
    assert "tile_config head: asked nothing, got tiles" in caplog.text
    assert found.phases[-1] == "stable"
    assert max(found.peaks[2:]) <= 0.5 * plain.peak_bytes


def test_a_forward_that_does_not_fit_beside_the_first_plan_runs_again_in_tiles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loop takes memory in the trial of that plan, and moving what is idle makes too little room."""
    held: list[torch.Tensor] = []

    def model() -> torch.nn.Module:
        return tiny_llama(vocab_size=2048)

    plain = train(model, steps=1, shape=lambda _: (2, 1280))
    limit_bytes = plain.peak_bytes

    def shape(step: int) -> tuple[int, int]:
        if step == 1:
            held.append(torch.zeros(limit_bytes // 2, dtype=torch.uint8))
        return 2, 1280

    found = train(model, {"mode": "adaptive"}, steps=5, limit_bytes=limit_bytes, shape=shape)
    assert "forward ran out of memory" in caplog.text
    assert "tile_config head: asked nothing, got tiles" in caplog.text
    assert found.phases[-1] == "stable"


class _Overlapping(BlockingTransfer):
    overlaps = True


@pytest.mark.parametrize("preference", ["auto", "performance"])
def test_frozen_weights_move_ahead_of_the_first_step_where_nothing_fits_otherwise(
    preference: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody wrote anything of weights: ``preference: performance`` leaves them on the device."""
    for module in (frozen_weights, host_budget):
        monkeypatch.setattr(module, "slab_source", lambda *_: PageableSlabs())

    def lora() -> torch.nn.Module:
        torch.manual_seed(1)
        model = tiny_llama(hidden_size=256, num_hidden_layers=6)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).train()

    plain = train(lora, steps=3, shape=(2, 32))
    budget = int(0.7 * plain.peak_bytes)
    memory = {"mode": "adaptive", "budget_gib": budget / GIB, "preference": preference}

    def planned() -> Trained:
        return train(lora, memory, steps=3, shape=(2, 32), transfer=_Overlapping(torch.device("cpu")))

    if preference == "performance":
        with pytest.raises(BudgetError, match=r"`memory\.weights: auto` moves"):
            planned()
        return
    with caplog.at_level("INFO", "hf_actswap"):
        found = planned()
    assert "frozen weights of the layers wait on the host: nothing fits" in caplog.text
    assert "tiles" not in caplog.text
    assert found.phases == ["warm-up", "search", "stable"], "no step was recorded"
    assert isinstance(found.planner, Planner)
    assert found.planner.weights is not None
    assert_predicted_within(0.7, plain, found)
    assert found.planner.outcome is not None
    assert found.planner.outcome.without_peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)


def test_a_budget_that_nothing_fits_is_an_error(unplanned: Trained) -> None:
    with pytest.raises(BudgetError, match="at least"):
        train(tiny_llama, memory_of(0.02, unplanned))


def test_smart_swap_keeps_its_three_phases(unplanned: Trained) -> None:
    memory = {**memory_of(0.8, unplanned), "mode": "smart_swap"}
    found = train(tiny_llama, memory, steps=6)
    assert found.phases[:3] == ["warm-up", "warm-up", "search"]
    assert torch.equal(torch.tensor(found.losses), torch.tensor(unplanned.losses[:6]))


def test_a_step_begins_before_its_first_forward_with_gradients() -> None:
    """Preference trainings compute what a reference says first; the plan has no part in that time."""
    model, clock = tiny_llama().train(), Clock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.zeros(2, 64, dtype=torch.long)
    with on_device(model) as device:
        config = {"memory": {"mode": "adaptive", "search_steps": 1}}
        transfer = ClockedTransfer(clock)
        planner = apply(model, config, optimizer=optimizer, meter=device, transfer=transfer)
        assert isinstance(planner, leading.Planner)
        with planner:
            for _ in range(4):
                planner.step_begins()
                clock.advance(700.0)
                model(input_ids=ids, labels=ids).loss.backward()
                clock.advance(40.0)
                optimizer.step()
                optimizer.zero_grad()
            outcome, saving = planner.outcome, saving_of(planner)
    assert outcome is not None
    assert (outcome.step_ms, planner.outside_ms) == (40, 700)
    assert (saving.step_ms, saving.without_step_ms) == (740, 700 + outcome.without_step_ms)
