"""What ``auto`` decides between steps reaches the logs; host memory that is made ready has its bar."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import hf_actswap
from hf_actswap.engine import Link, PageableSlabs, Resources, host_budget, install
from hf_actswap.integrations import callback as callback_module
from hf_actswap.report import PinningBar
from tests.engine.simulated_transfer import Clock, SimulatedTransfer

from .conftest import CASE_2, Tokens, losses, tiny_llama

Make = Callable[..., Trainer]
AUTO = {
    "log": "full",
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": "auto", "layers": True}]},
    "memory": {"min_tensor_mib": 0.0001},
}
BYTES_PER_MS = 4000.0
"""Of the simulated link: slow enough that a part of the bytes must stay."""


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose plan, when the callback applies it, gets copies that run beside compute."""
    clock, model = Clock(), tiny_llama()
    clock.drive(model)
    link = Link(BYTES_PER_MS, BYTES_PER_MS, BYTES_PER_MS, BYTES_PER_MS, latency_ms=0.01)
    transfer = SimulatedTransfer(clock, link, free_bytes=2**40)
    put = callback_module.apply_plan

    def with_transfer(model: Any, plan: Any, shape: Any, resources: Resources, *others: Any) -> Any:
        return put(model, plan, shape, replace(resources, transfer=transfer), *others)

    monkeypatch.setattr(callback_module, "apply_plan", with_transfer)
    monkeypatch.setattr(host_budget, "PinnedSlabs", lambda *_: PageableSlabs())
    return model


def worker_lines(folder: Path) -> list[str]:
    return (folder / "out" / "worker_0.log").read_text(encoding="utf-8").splitlines()


def messages(caplog: pytest.LogCaptureFixture, beginning: str) -> list[str]:
    found = (record.getMessage() for record in caplog.records)
    return [message for message in found if message.startswith(beginning)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_decisions_are_logged_once_when_they_are_made(
    make_trainer: Make,
    overlapping: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    accumulation: int,
) -> None:
    caplog.set_level(logging.INFO)
    settings = {"max_steps": 5, "gradient_accumulation_steps": accumulation}
    trainer = make_trainer(AUTO, model=overlapping, **settings)
    trainer.train()
    (said,) = messages(caplog, "Decided in step ")
    step = 3 if accumulation == 1 else 2  # the third forward
    first, *lines = said.splitlines()
    assert first == f"Decided in step {step}:"
    shown = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    assert any(": asked swap, backward_prefetch auto, got swap " in line for line in shown)
    assert any(": asked swap, backward_prefetch auto, got keep " in line for line in shown)
    log = worker_lines(tmp_path)
    assert log[-len(shown) :] == [f"-INFO - {line}" for line in shown]
    assert [line for line in log[: -len(shown)] if ": asked " in line] == []
    assert log[-len(shown) - 1].startswith("-INFO - Set layer swap at layer 3")
    assert messages(caplog, "swap_config") == shown
    (summary,) = messages(caplog, "auto has measured: it swaps ")
    assert summary.endswith("; see applied.plan.adjustments")
    (before,) = messages(caplog, "\nActivation plan: 4 llama layers")
    assert "│ 0-3    │ everything │ swap │           auto │          auto │" in before
    plain = make_trainer(None, callback=False, **settings)
    plain.train()
    assert losses(trainer) == losses(plain)


def test_the_bar_hears_when_host_memory_is_ready(
    make_trainer: Make, overlapping: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_trainer(AUTO, model=overlapping, max_steps=4).train()
    (ready,) = [record for record in caplog.records if "of host memory ready after" in record.getMessage()]
    assert ready.name == "hf_actswap.report.console"


def test_on_the_cpu_the_first_step_decides(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_trainer(AUTO, max_steps=3).train()
    (said,) = messages(caplog, "Decided in step ")
    assert said.startswith("Decided in step 1:")
    adjustment = (
        "swap_config: asked backward_prefetch auto, got 1: copies on this device do not overlap compute, so "
        "nothing is measured (1 is the reference's Auto)"
    )
    assert f"  - {adjustment}" in said.splitlines()
    assert worker_lines(tmp_path)[-1] == f"-INFO - {adjustment}"
    assert messages(caplog, "swap_config: ") == [adjustment]


def test_a_plan_that_does_not_change_is_logged_once(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_trainer(CASE_2, max_steps=3).train()
    assert messages(caplog, "Decided in step ") == []
    assert worker_lines(tmp_path)[-1] == "-INFO - Set layer swap at layer 3 and value is: 20"


def test_a_second_training_starts_a_fresh_worker_log(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(AUTO, max_steps=2)
    trainer.train()
    once = worker_lines(tmp_path)
    trainer.train()
    assert worker_lines(tmp_path) == once


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_shows_a_bar(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    given: list[Any] = []

    def listen(*args: Any) -> Any:
        given.append(args[3].progress)
        return install(*args)

    monkeypatch.setitem(callback_module.apply_plan.__globals__, "install", listen)
    hf_actswap.apply(tiny_llama(), CASE_2).remove()
    assert [type(progress) for progress in given] == [PinningBar if rank == 0 else type(None)]


def test_apply_passes_progress_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(), tiny_llama()
    clock.drive(model)
    link = Link(BYTES_PER_MS, BYTES_PER_MS, BYTES_PER_MS, BYTES_PER_MS, latency_ms=0.01)
    monkeypatch.setattr(host_budget, "PinnedSlabs", lambda *_: PageableSlabs())
    heard: list[tuple[int, int]] = []
    transfer = SimulatedTransfer(clock, link, free_bytes=2**40)
    ids = Tokens(2).ids
    with hf_actswap.apply(
        model, AUTO, transfer=transfer, progress=lambda done, total: heard.append((done, total))
    ):
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
    assert heard
    assert heard[-1][0] == heard[-1][1] > 0
