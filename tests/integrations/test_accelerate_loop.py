"""A hand-written Accelerate loop: before or after `prepare`, `accumulate`, `save_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import hf_actswap

from .conftest import CASE_4, Tokens, tiny_llama


def train(
    config: Any, order: str, folder: Path | None = None, load: Path | None = None, steps: int = 6
) -> list[float]:
    """Train with accumulation 2; save after the third step; return the loss of each micro-batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
    applied = hf_actswap.apply(model, config) if order == "before" else None
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    applied = applied or hf_actswap.apply(model, config)
    if load is not None:
        accelerator.load_state(str(load))
    losses = []
    for step, batch in zip(range(2 * steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if folder is not None and step == 5:
            accelerator.save_state(str(folder))
    assert (applied.stats().offloaded_bytes > 0) == bool(config)
    applied.remove()
    return losses


@pytest.mark.parametrize("order", ["before", "after"])
def test_same_losses_before_and_after_prepare(order: str) -> None:
    assert train(CASE_4, order) == train(None, "after")


def test_save_state_and_load_state(tmp_path: Path) -> None:
    with_plan = train(CASE_4, "before", folder=tmp_path / "state")
    without = train(None, "after", folder=tmp_path / "plain")
    assert with_plan == without
    resumed = train(CASE_4, "after", load=tmp_path / "state", steps=2)
    assert resumed == train(None, "after", load=tmp_path / "plain", steps=2)
