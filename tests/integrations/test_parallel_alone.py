"""In one process, for a model of several ranks: launcher traps, and which Trainer's methods are ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from hf_actswap import ActSwapTrainer, ActSwapTrainerMixin
from hf_actswap.integrations import parallel_limits
from hf_actswap.integrations.parallel_checkpoint import checkpoint_folder
from hf_actswap.releases import is_since, loss_is_scaled_by_data_ranks
from tests.integrations.parallel_runs import OrderedStockTrainer, make


@pytest.mark.skipif(not loss_is_scaled_by_data_ranks(), reason="it needs transformers 5.16")
def test_the_launcher_started_one_process(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="expected a process group, found none") as caught:
        make({"parallel_config": {"tensor_parallel_size": 2}}, tmp_path)
    assert "accelerate launch --multi_gpu --num_processes 2 " in str(caught.value)


@pytest.mark.parametrize("kind", [OrderedStockTrainer, ActSwapTrainer])
def test_the_launcher_started_independent_trainings(
    kind: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(None, tmp_path, kind)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Exception, match="2 independent trainings of one process each"):
        trainer.callback_handler.on_init_end(trainer.args, trainer.state, trainer.control)


def test_a_release_that_scales_the_loss_by_all_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(None, tmp_path)
    for known, named in ((True, False), (False, True)):
        monkeypatch.setattr(parallel_limits, "loss_is_scaled_by_data_ranks", lambda known=known: known)
        found = [problem.where for problem in parallel_limits.problems_of_trainer(trainer)]
        assert ("transformers" in found) is named


def test_what_we_override_is_there() -> None:
    """A release of transformers or Accelerate that renames one of these fails here first."""
    old = () if is_since("transformers", "5.6") else ("_track_num_input_tokens",)
    for name in vars(ActSwapTrainerMixin):
        if callable(getattr(ActSwapTrainerMixin, name)) and not name.startswith("__"):
            assert hasattr(Trainer, name) or name in ("_declared", "_predicted", "_whole_model", *old), name
    assert hasattr(Accelerator, "_prepare_device_mesh")
    assert hasattr(torch.nn.parallel.DistributedDataParallel, "_get_active_ddp_module")


@pytest.mark.parametrize("written", [str, Path])
def test_the_checkpoint_that_is_named_is_meant_not_the_last(tmp_path: Path, written: type) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    named = tmp_path / "checkpoint-2"
    assert checkpoint_folder(written(named), str(tmp_path)) == str(named)
    assert checkpoint_folder(True, str(tmp_path)) == str(tmp_path / "checkpoint-4")
    assert checkpoint_folder(None, str(tmp_path)) is None
