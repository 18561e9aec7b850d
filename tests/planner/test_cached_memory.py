"""An allocator holds what was freed: one plan's need must not be the next one's peak."""

from __future__ import annotations

from typing import Any

import torch

from hf_actswap import apply
from tests.engine.tiny_models import tiny_llama
from tests.planner.simulated_device import SimulatedDevice, train

GIB = 2**30


class CachingDevice(SimulatedDevice):
    """Holds as much as was ever in use, until it is told to give it back."""

    def __init__(self) -> None:
        super().__init__()
        self._held_bytes = 0

    def reserved_peak_bytes(self) -> int:
        return max(self._held_bytes, self.peak_bytes())

    def reset_peak(self) -> None:
        self._held_bytes = self.reserved_peak_bytes()
        super().reset_peak()

    def give_back(self) -> None:
        super().reset_peak()
        self._held_bytes = self.allocated_bytes()


def planned_steps(steps: int, evaluated_tokens: int = 0) -> Any:
    """Train under a budget on a caching device, from the fifth step on with an evaluation after each step.

    Returns:
        The planner, taken off, its phases as ``seen``.
    """
    budget = int(0.6 * train(tiny_llama, steps=2).peak_bytes)
    torch.manual_seed(0)
    model = tiny_llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = CachingDevice()
    device.on(model)
    config = {"memory": {"mode": "adaptive", "budget_gib": budget / GIB, "search_steps": 2}}
    planner: Any = apply(model, config, optimizer=optimizer, meter=device)
    planner.seen = []
    try:
        for step in range(steps):
            ids = torch.randint(0, model.config.vocab_size, (4, 128))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            planner.seen.append(planner.phase)
            if evaluated_tokens and step >= 4:
                with torch.no_grad():
                    model(input_ids=torch.zeros(8, evaluated_tokens // 8, dtype=torch.long))
                assert device.reserved_peak_bytes() > budget, "the evaluation is too small to prove anything"
    finally:
        planner.remove()
        device.off()
    assert [trial.fits(budget) for trial in planner.trials] == [True]
    return planner


def test_what_warm_up_held_does_not_spoil_the_trials() -> None:
    assert planned_steps(6).seen[-1] == "stable"


def test_what_an_evaluation_held_is_no_miss_of_the_budget() -> None:
    """Catches a plan that is thrown away because of memory that no training step used."""
    assert planned_steps(9, evaluated_tokens=8192).seen[4:] == ["stable"] * 5
