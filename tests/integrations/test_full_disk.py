"""A full disk, or a folder that cannot be written: the record of a run ends, and the training goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from hf_actswap.report.run_files import FOLDER, PLAN, RUN, STEPS, TIMELINE, read_run
from hf_actswap.report.write_report import write_report
from tests.quick_cases import quick_first

from .conftest import CASE_3, losses

Make = Callable[..., Trainer]

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in said if "cannot be written" in line]


@pytest.fixture
def undisturbed(make_trainer: Make) -> list[float]:
    trainer = make_trainer(CASE_3, max_steps=6)
    trainer.train()
    return losses(trainer)


class Fills(TrainerCallback):
    """From a step on, a file is the full device."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.path.unlink(missing_ok=True)
            self.path.symlink_to("/dev/full")


def draft(folder: Path, name: str) -> Path:
    """Where a file is written before it takes its place."""
    return folder / f".{name}.{os.getpid()}"


def test_nothing_can_be_written(
    make_trainer: Make, undisturbed: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / FOLDER).write_text("in the way")
    (folder / "worker_0.log").symlink_to("/dev/full")
    trainer = make_trainer(CASE_3, max_steps=6, output_dir=str(folder))
    caplog.clear()
    trainer.train()
    assert losses(trainer) == undisturbed
    record, worker = sorted(warnings_of(caplog), key=lambda line: "worker_0" in line)
    assert f"{folder / FOLDER} cannot be written" in record
    assert "The training goes on" in record
    assert "worker_0.log cannot be written (No space left on device)" in worker


@pytest.mark.parametrize("name", quick_first([STEPS, TIMELINE, PLAN, RUN], 2))
def test_the_disk_is_full_from_some_moment_on(
    name: str,
    make_trainer: Make,
    undisturbed: list[float],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "out" / FOLDER
    target = folder / name if name == STEPS else draft(folder, name)
    trainer = make_trainer(CASE_3, max_steps=6)
    if name == RUN:
        folder.mkdir(exist_ok=True)
        target.symlink_to("/dev/full")
    else:
        trainer.add_callback(Fills(target, 0 if name == PLAN else 2))
    caplog.clear()
    trainer.train()
    assert losses(trainer) == undisturbed
    (warning,) = warnings_of(caplog)
    assert "(No space left on device)" in warning
    assert not target.is_symlink() or name == STEPS
    if name != RUN:
        read = read_run(folder)
        assert read.plan is None or name != PLAN
        assert len(read.steps) == {PLAN: 1, TIMELINE: 3, STEPS: 0}[name]
        write_report(folder)


def test_what_others_log_is_written_as_text(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(CASE_3, max_steps=2)

    class Logs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.log({"loss": 1.0, "note": Path("somewhere")})  # type: ignore[dict-item]

    trainer.add_callback(Logs())
    trainer.train()
    assert [line.get("note") for line in read_run(tmp_path / "out").steps] == ["somewhere"] * 2
