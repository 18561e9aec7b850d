"""The Trainer with the callback leaves a record, and trains the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Trainer

from hf_actswap.config.sizes import GIB, gib, gib_text
from hf_actswap.report.run_files import read_run
from hf_actswap.report.write_report import write_report

from .conftest import CASE_3, CASE_4, Tokens, losses

Make = Callable[..., Trainer]


def test_the_record_of_a_training(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(
        CASE_3,
        max_steps=8,
        logging_steps=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=3,
    )
    trainer.train()
    run = read_run(tmp_path / "out")
    assert [line["step"] for line in run.steps] == [2, 4, 6, 8]
    assert [line["loss"] for line in run.steps] == losses(trainer)
    assert run.about["config"].startswith("swap_config:")
    assert run.timeline is not None
    assert run.memory is not None
    forwards = [part.layer for part in run.timeline.compute if part.phase == "forward"]
    assert [layer for layer in forwards if layer is not None] == [*range(4), *range(4)]  # two micro-batches
    assert run.timeline.compute[-1].phase == "outside"
    of_a_step = run.steps[-1]["stats"]["offloaded_bytes"] / 2
    assert sum(copy.size_bytes for copy in run.timeline.copies if copy.direction == "out") == of_a_step
    assert write_report(tmp_path / "out").page.is_file()


def test_a_second_training_in_the_same_folder(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(CASE_3, max_steps=6)
    trainer.train()
    trainer.train()
    assert len(read_run(tmp_path / "out").steps) == 6


def test_how_much_a_written_plan_saves(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_trainer({}, max_steps=6)  # everything is kept, and followed for its memory
    plain.train()
    most = plain.state.log_history[-1]["actswap_peak_gib"]
    trainer = make_trainer(CASE_4, max_steps=6)
    with caplog.at_level("INFO", logger="hf_actswap"):
        metrics = trainer.train().metrics
    peak, saved = metrics["actswap_peak_gib"], metrics["actswap_saved_gib"]
    assert peak < most <= peak + saved < 1.1 * most
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["actswap_saved_gib"] == saved for entry in lines)
    known = ["actswap_peak_gib" in entry for entry in lines]
    assert known == [False, False, False, False, True, True]  # the fifth is followed
    said = caplog.records[-1].getMessage()
    assert said.startswith(f"Peak memory {gib_text(peak * GIB)[:6]}")
    assert "at most" in said
    assert "counted: what it swaps and recomputes" in said
    assert " ms" in said
    facts = write_report(tmp_path / "out").facts
    assert facts.saving is not None
    assert gib(facts.saving.saved_bytes) == saved
    assert "without a plan, counted" in (tmp_path / "out" / "actswap" / "report.html").read_text()


def test_how_much_the_planner_saves(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_trainer({}, max_steps=6)
    plain.train()
    most = plain.state.log_history[-1]["actswap_peak_gib"]
    memory = {"mode": "adaptive", "reduce_by_gib": 0.1 * most, "plan_file": str(tmp_path / "plan.json")}
    trainer = make_trainer({"memory": {**memory, "search_steps": 2}}, max_steps=7)
    with caplog.at_level("INFO", logger="hf_actswap"):
        metrics = trainer.train().metrics
    peak, saved = metrics["actswap_peak_gib"], metrics["actswap_saved_gib"]
    assert peak + saved == pytest.approx(most, rel=0.01)
    assert 0.1 * most <= saved < 0.2 * most
    said = caplog.records[-1].getMessage()
    assert "measured in warm-up" in said
    assert "ms without a plan (predicted)" in said
    assert not any(" bytes" in record.getMessage() for record in caplog.records)
    again = make_trainer({"memory": {**memory, "search_steps": 2}}, max_steps=1)
    with caplog.at_level("INFO", logger="hf_actswap"):
        assert again.train().metrics["actswap_saved_gib"] == saved
    assert "as the plan file says" in caplog.records[-1].getMessage()


def test_a_training_that_fails_says_nothing_of_a_saving(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(CASE_3, data=Tokens(fail_at=11))
    with caplog.at_level("INFO", logger="hf_actswap"), pytest.raises(OSError, match="data loader"):
        trainer.train()
    assert not any("without a plan" in record.getMessage() for record in caplog.records)


def test_whole_layers_that_are_recomputed_are_counted(make_trainer: Make) -> None:
    """The run on fake tensors that counts them must not go through their checkpoints."""
    plain = make_trainer({}, max_steps=6)
    plain.train()
    most = plain.state.log_history[-1]["actswap_peak_gib"]
    trainer = make_trainer({"recompute_config": {"recompute": True}}, max_steps=6)
    metrics = trainer.train().metrics
    peak, saved = metrics["actswap_peak_gib"], metrics["actswap_saved_gib"]
    assert peak < most <= peak + saved < 1.2 * most
