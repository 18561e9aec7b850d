"""``adaptive`` runs parts of the model in tiles where no mix of keep, swap and recompute fits the budget."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_actswap import MemoryPlan, apply
from hf_actswap.planner import BudgetError, Planner, oom_guard
from hf_actswap.planner.phases import planner as leading
from hf_actswap.planner.plan_file import Trial
from tests.engine.tiny_models import tiny_llama
from tests.planner.simulated_device import Trained, on_device, train
from tests.quick_cases import quick_first

GIB = 2**30
SHAPE = (1, 2560)
wordy = partial(tiny_llama, vocab_size=1024, num_hidden_layers=2)
trained = partial(train, wordy, shape=SHAPE)


@pytest.fixture(scope="module")
def unplanned() -> Trained:
    return trained(steps=9)


@pytest.fixture(scope="module")
def least_gib(unplanned: Trained) -> float:
    """What ``smart_swap``, which chooses no tiles, needs at least."""
    with pytest.raises(BudgetError, match="the least that any plan reaches, found") as caught:
        trained({"mode": "smart_swap", "budget_gib": 0.4 * unplanned.peak_bytes / GIB})
    return caught.value.least_bytes / GIB


def paths(plan: MemoryPlan) -> list[str]:
    return [tile.op_path or str(tile.scope) for tile in plan.tiles]


def test_the_loss_runs_in_tiles_where_nothing_else_fits(
    unplanned: Trained, least_gib: float, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    budget_gib = 0.9 * least_gib
    memory = {"mode": "adaptive", "budget_gib": budget_gib, "plan_file": str(path)}
    found = trained(memory, steps=9)
    assert found.phases == ["warm-up"] * 4 + ["search"] * 2 + ["stable"] * 3
    assert found.losses == pytest.approx(unplanned.losses, rel=1e-5)
    assert max(found.stable_peaks()) <= budget_gib * GIB
    assert found.planner.outcome.without_peak_bytes == pytest.approx(unplanned.peak_bytes, rel=0.01)
    plan = MemoryPlan.from_json(path.read_text())
    assert paths(plan) == ["head"]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "asked nothing, got tiles: no mix of keep, swap and recompute keeps within the budget" in said
    assert "equal up to rounding (1e-6 in fp32) and not bitwise" in plan.adjustments[-1].reason
    again = trained(memory, steps=2)  # by the file, tiles and all
    assert again.phases == ["stable"] * 2
    assert max(again.peaks) <= budget_gib * GIB
    assert again.losses == pytest.approx(unplanned.losses[:2], rel=1e-5)


@pytest.mark.parametrize(
    ("where", "limit_bytes"), quick_first([("forward", 22_000_000), ("backward", 24_000_000)], 1)
)
def test_a_warm_up_that_runs_out_of_memory_goes_on_in_tiles(
    where: str, limit_bytes: int, unplanned: Trained
) -> None:
    """In ``micro_batch``; a forward in any loop."""
    torch.manual_seed(0)
    model = wordy().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(0), []

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    with on_device(model, limit_bytes) as device:
        planner = apply(model, {"memory": {"mode": "adaptive"}}, optimizer=optimizer, meter=device)
        assert isinstance(planner, Planner)
        for _ in range(3):
            assert planner.phase == "warm-up" or len(losses) == 2
            ids = torch.randint(0, model.config.vocab_size, SHAPE, generator=generator)
            losses.append(step() if where == "forward" else planner.micro_batch(step))
            optimizer.step()
            optimizer.zero_grad()
        assert planner.phase == "search"
        assert paths(planner.plan) == ["head"]
        planner.remove()
    assert losses == pytest.approx(unplanned.losses[:3], rel=1e-5)
    assert not any("forward" in vars(module) or "_call_impl" in vars(module) for module in model.modules())


def test_of_several_ranks_none_tiles_alone_and_the_error_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oom_guard, "world_size", lambda: 2)
    model = wordy().train()
    ids = torch.zeros(SHAPE, dtype=torch.long)
    with on_device(model, 21_000_000) as device:
        optimizer = torch.optim.AdamW(model.parameters())
        planner = apply(model, {"memory": {"mode": "adaptive"}}, optimizer=optimizer, meter=device)
        with pytest.raises(torch.OutOfMemoryError, match="cannot be run again: a rank cannot") as caught:
            model(input_ids=ids, labels=ids)
        planner.remove()
    assert "`tile_config: {loss: auto, tile: {op_name: feed_forward}}`" in str(caught.value)
    assert planner.plan.tiles == ()


def test_several_ranks_choose_tiles_ahead_of_a_first_forward_that_no_plan_fits(
    unplanned: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On real ranks: `test_ranks.test_tiles_are_chosen_on_all_ranks`."""
    for module in (leading, oom_guard):
        monkeypatch.setattr(module, "world_size", lambda: 2)
    torch.manual_seed(0)
    model = wordy().train()
    ids = torch.randint(0, model.config.vocab_size, SHAPE, generator=torch.Generator().manual_seed(0))
    with on_device(model, 22_000_000) as device:
        optimizer = torch.optim.AdamW(model.parameters())
        planner = apply(model, {"memory": {"mode": "adaptive"}}, optimizer=optimizer, meter=device)
        assert isinstance(planner, Planner)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert paths(planner.plan) == ["head"]
        planner.remove()
    assert loss.item() == pytest.approx(unplanned.losses[0], rel=1e-5)


@pytest.mark.slow
def test_what_tiles_cannot_do_either_is_named(unplanned: Trained, least_gib: float) -> None:
    with pytest.raises(
        BudgetError, match=r"least that any plan reaches, with head[\w, ]* in tiles"
    ) as caught:
        trained({"mode": "adaptive", "budget_gib": 0.3 * unplanned.peak_bytes / GIB})
    assert 0.3 * unplanned.peak_bytes < caught.value.least_bytes < 0.7 * least_gib * GIB


@pytest.mark.slow
def test_plans_that_miss_the_budget_give_way_to_tiles(
    unplanned: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "fits", lambda self, _: bool(self.plan.tiles))
    found = trained({"mode": "adaptive", "budget_gib": unplanned.peak_bytes / GIB})
    assert found.phases.count("warm-up") == 4
    assert found.phases[-1] == "stable"
    *missed, last = [paths(trial.plan) for trial in found.planner.trials]
    assert missed in ([[]], [[], []])  # a second one only if by the measured times it could be faster
    assert last == ["head"]
    assert not found.planner._run.guarded
