"""Memory runs out in warm-up, and nothing helps: the error names the least budget that would do."""

from __future__ import annotations

import re
import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_actswap import MemoryPlan, apply, model_structure
from hf_actswap.config import MemoryConfig
from hf_actswap.planner import BudgetError, PlannedTraining, on_paper
from hf_actswap.planner.on_paper import StepOnPaper
from tests.engine.tiny_models import tiny_llama, tiny_neox
from tests.planner.simulated_device import on_device, train
from tests.quick_cases import quick_first

GIB = 2**30
SHARE = 0.2


@pytest.fixture(scope="module")
def peak_bytes() -> int:
    return train(tiny_llama, steps=3).peak_bytes


def problem(peak_bytes: int) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tiny_llama, {"mode": "adaptive"}, limit_bytes=int(SHARE * peak_bytes))
    text = str(caught.value)
    assert "Nothing idle is left to evict" in text
    assert "a counted limit" in text  # the error of the device is still there
    return text


def named_bytes(text: str) -> int:
    named = re.search(
        r"The least budget that would do for a batch of \(\d+, \d+\) is about ([\d.]+) GiB", text
    )
    assert named is not None, text
    return int(float(named[1]) * GIB)


@pytest.mark.parametrize("share", quick_first([0.3, 3.5, 2.5], 2))
def test_it_is_the_same_at_every_depth(share: float) -> None:
    """Not enough for the weights, for the gradients, for the states that the first step makes."""

    def named(share: float) -> float:
        """In weights."""
        torch.manual_seed(0)
        model, ids = tiny_llama(), torch.zeros(1, 16, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters())
        weights = sum(weight.nbytes for weight in model.parameters())
        memory = {"mode": "adaptive", "budget_gib": share * weights / GIB}

        def steps() -> None:
            for _ in range(3):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()

        planner = apply(model, {"memory": memory}, optimizer=optimizer)
        with planner, pytest.raises(BudgetError, match=r"memory\.budget_gib: expected at least") as caught:
            steps()
        assert all(weight.grad is None for weight in model.parameters())  # ahead of the first backward
        assert len(traceback.extract_tb(caught.value.__traceback__)) < 8
        return caught.value.least_bytes / weights

    assert named(share) == pytest.approx(named(0.9), rel=2e-3)
    assert named(share) > 4


def test_a_budget_that_a_first_forward_exceeds_is_a_budget_error() -> None:
    """Weights, gradients and states fit; on a CPU the budget is the limit of the device that is counted."""
    torch.manual_seed(0)
    model, ids = tiny_llama(), torch.zeros(8, 512, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    budget_gib = 5 * sum(weight.nbytes for weight in model.parameters()) / GIB
    planner = apply(model, {"memory": {"mode": "smart_swap", "budget_gib": budget_gib}}, optimizer=optimizer)
    with pytest.raises(BudgetError, match=r"`tile_config: \{loss: auto\}`, or `mode: adaptive`") as caught:
        model(input_ids=ids, labels=ids)
    planner.remove()
    assert caught.value.least_bytes > budget_gib * GIB


def test_the_least_budget_counts_tiles_and_says_how_to_get_them() -> None:
    """In a loop of the user's own a backward cannot be run again, so the planner adds no tiles by itself."""
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=1024, num_hidden_layers=2).train()
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.zeros(1, 2560, dtype=torch.long)
    with on_device(model, 24_000_000) as device:
        planner = apply(model, {"memory": {"mode": "adaptive"}}, optimizer=optimizer, meter=device)
        loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(torch.OutOfMemoryError) as caught:
            loss.backward()
        planner.remove()
    text = str(caught.value)
    tiled = re.search(r"With head, mlp, .* in tiles ([\d.]+) GiB would do", text)
    assert tiled is not None, text
    assert float(tiled[1]) * GIB < 0.7 * named_bytes(text)
    assert "`tile_config: {loss: auto, tile: {op_name: feed_forward}}`" in text
    assert "`Planner.micro_batch`" in text


def test_the_budget_that_is_named_would_do(peak_bytes: int) -> None:
    text = problem(peak_bytes)
    least = named_bytes(text)
    assert text.startswith("The least budget")
    assert "optimizer states included" in text
    assert 2 * SHARE * peak_bytes > least > SHARE * peak_bytes
    enough = int(1.05 * least)
    found = train(tiny_llama, {"mode": "adaptive", "budget_gib": enough / GIB}, steps=6, limit_bytes=enough)
    assert found.phases[-1] == "stable"
    assert max(found.stable_peaks()) <= enough


def test_what_goes_wrong_hides_nothing(peak_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("a model that does not run on fake tensors")

    monkeypatch.setattr(on_paper, "profile_from_shapes", fails)
    text = problem(peak_bytes)
    assert "The least budget" not in text
    assert "fake tensors" not in text


def known(model: Any, *, sharded: bool = False, autocast: bool = False, **settings: Any) -> str:
    shape = replace(model_structure(model), sharded=sharded)
    optimizer = torch.optim.AdamW(model.parameters())
    memory = MemoryConfig(mode="adaptive", **settings)
    fixed = MemoryPlan((), len(shape.layers))
    found = StepOnPaper(
        PlannedTraining(model, shape, fixed, memory, optimizer), lambda: fixed, torch.device("cpu")
    )
    ids = torch.zeros(2, 16, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found.forward_starts(model, (), {"input_ids": ids, "labels": ids})
    return found.in_words(10)


def test_where_it_is_not_known_it_says_nothing() -> None:
    model = tiny_neox()
    before = torch.get_rng_state()
    assert "(2, 16)" in known(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert known(model, sharded=True) == ""
    assert "(2, 16)" in known(model, autocast=True)


@pytest.mark.slow
def test_states_that_move_away_do_not_count() -> None:
    model = tiny_llama()
    sizes = [
        named_bytes(known(model, preference=preference)) for preference in ("performance", "memory_saving")
    ]
    weights = sum(weight.nbytes for weight in model.parameters())
    assert sizes[0] - sizes[1] == pytest.approx(2 * weights, rel=0.02)
