"""The Trainer with the callback leaves a record, and trains the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import Trainer

from hf_actswap.report.run_files import read_run
from hf_actswap.report.write_report import write_report

from .conftest import CASE_3, losses

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
    assert sum(copy.size_bytes for copy in run.timeline.copies if copy.way == "out") == of_a_step
    assert write_report(tmp_path / "out").page.is_file()


def test_a_second_training_in_the_same_folder(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(CASE_3, max_steps=6)
    trainer.train()
    trainer.train()
    assert len(read_run(tmp_path / "out").steps) == 6
