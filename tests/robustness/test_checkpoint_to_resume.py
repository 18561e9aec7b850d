"""`--resume_from_checkpoint last` takes the newest checkpoint that is whole, whatever a kill has left."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import TrainerControl, TrainerState, TrainingArguments

from tests.robustness.ranks import recipe_checkpoints as checkpoints


def write(folder: Path, step: int, ranks: int = 2) -> Path:
    """A checkpoint as `ActSwapTrainer` leaves it."""
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file({"a": torch.ones(64, 64), "b": torch.ones(3)}, place / "model.safetensors", {"format": "pt"})
    for name in ("optimizer", "scheduler"):
        torch.save({"state": torch.ones(100)}, place / f"{name}.pt")
    for rank in range(ranks):
        torch.save(
            {"cpu": torch.ones(9)}, place / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth")
        )
    (place / "parallel_layout.json").write_text(json.dumps({"processes": ranks, "tensor_parallel_size": 1}))
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    return place


def last(folder: Path) -> str | None:
    found: str | None = checkpoints.last_complete_checkpoint(folder)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_newest_whole_one(ranks: int, tmp_path: Path) -> None:
    for step in (5, 10, 100):
        write(tmp_path, step, ranks)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-200").touch()
    assert last(tmp_path) == str(tmp_path / "checkpoint-100")


def test_every_file_cut_off_anywhere_or_missing_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(0)
    older, newer = write(tmp_path, 10), write(tmp_path, 20)
    assert not list(checkpoints.faults_of(newer))
    for name in sorted(path.name for path in older.iterdir()):
        whole = (newer / name).read_bytes()
        for size in [None, 0, 1, len(whole) - 1, *(dice.randrange(len(whole)) for _ in range(20))]:
            if name == "parallel_layout.json":
                continue  # the Trainer's own checkpoints have none
            (newer / name).unlink() if size is None else (newer / name).write_bytes(whole[:size])
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="llama_swap"):
                assert last(tmp_path) == str(older), (name, size)
            assert "checkpoint-20 was not written to its end and is passed over" in caplog.text
            assert name in caplog.text or name == "model.safetensors"
        (newer / name).write_bytes(whole)
    assert last(tmp_path) == str(newer)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (lambda place: (place / "checkpoint-is-incomplete.txt").touch(), False),
        (lambda place: (place / "trainer_state.json").write_text('{"global_step": 19}'), False),
        (lambda place: (place / "trainer_state.json").write_text("[]"), False),
        (lambda place: (place / "parallel_layout.json").unlink(), True),
        (lambda place: [path.unlink() for path in place.glob("*.pt*")], True),  # save_only_model
        (lambda place: (place / "model.safetensors").rename(place / "adapter_model.safetensors"), True),
        (lambda place: (place / "optimizer.pt").rename(place / "optimizer.bin"), True),  # FSDP
    ],
)
def test_other_forms(change: Callable[[Path], object], taken: bool, tmp_path: Path) -> None:
    place = write(tmp_path, 20)
    change(place)
    assert (last(tmp_path) is not None) is taken


def test_none_where_none_is_whole(tmp_path: Path) -> None:
    assert last(tmp_path) is None
    (write(tmp_path, 10) / "trainer_state.json").unlink()
    assert last(tmp_path) is None


def test_a_folder_that_is_written_again_is_not_vouched_for(tmp_path: Path) -> None:
    """Catches an old `trainer_state.json` beside weights that a kill has cut off."""
    place = write(tmp_path, 20)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state, control = TrainerState(global_step=20), TrainerControl()
    for saves in (False, True):
        control.should_save = saves
        checkpoints.StateLast().on_step_end(args, state, control)
        assert (last(tmp_path) is None) is saves
    shutil.rmtree(place)
    checkpoints.StateLast().on_epoch_end(args, state, control)  # nothing there: nothing to do
