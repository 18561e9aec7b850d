"""Checkpoints of a model that several ranks hold: whole on disk, whatever the number of ranks.

=============================== =========================================================================
file                            holds
=============================== =========================================================================
``model.safetensors``           the model, as a single process writes it
``optimizer.pt``                whole tensors (`optimizer_parameters`)
``rng_state_<rank>.pth``        random states; equal within a tensor-parallel group
``parallel_layout.json``        numbers of ranks, of tensor-parallel ranks, and of stages
=============================== =========================================================================

Random states are read by data rank. If the number of ranks per model has changed, a rank reads the state of
the first rank that trained on the same part of the data.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from annotated_types import Ge
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from ..config.documents import JsonDocument, read_text
from ..config.validation import Expected
from .parallel_limits import ParallelTrainingError

LAYOUT_FILE = "parallel_layout.json"
OPTIMIZER_FILE, SCHEDULER_FILE, STATE_FILE = "optimizer.pt", "scheduler.pt", "trainer_state.json"
"""The Trainer's names for these files."""

_MAX_LAYOUT_BYTES = 64 * 1024
_Size = Annotated[int, Ge(1), Expected("a whole number from 1 on")]


class _AnyLayout(TypedDict):
    processes: _Size
    tensor_parallel_size: _Size


class Layout(_AnyLayout, total=False):
    """Numbers of ranks, of ranks that hold a layer together, and of pipeline stages (1 if missing)."""

    pipeline_stage: _Size


def load_optimizer_and_scheduler(
    checkpoint: str,
    optimizer: Any,
    scheduler: Any,
    own_state: Callable[[torch.optim.Optimizer, Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Load this rank's part of an optimizer's whole state, and a scheduler's state.

    If one of the two files is missing, nothing is loaded. This replaces the Trainer's method, which would
    put the whole model's state onto every device.

    Args:
        checkpoint: the checkpoint's folder.
        optimizer: the optimizer in Accelerate's wrapper.
        scheduler: PyTorch's scheduler.
        own_state: takes an optimizer and its whole state, and returns this rank's part of the state.
    """
    files = Path(checkpoint, OPTIMIZER_FILE), Path(checkpoint, SCHEDULER_FILE)
    if not all(file.is_file() for file in files):
        return
    # Mapped, not read: the ranks of a machine share the file's pages in memory.
    full = torch.load(files[0], map_location="cpu", mmap=True, weights_only=True)
    optimizer.load_state_dict(own_state(optimizer.optimizer, full))
    scheduler.load_state_dict(torch.load(files[1], map_location="cpu", weights_only=True))


def checkpoint_fact(asked: str | bool | None, output_dir: str | None) -> str:
    """Return which checkpoint this rank would resume from, in words that ranks can compare.

    Args:
        asked: ``resume_from_checkpoint`` of ``Trainer.train``.
        output_dir: folder of the training; ``True`` means the last checkpoint in it.
    """
    if not asked:
        return "none"
    folder = output_dir or "."
    found = (
        asked if isinstance(asked, str) else get_last_checkpoint(folder) if os.path.isdir(folder) else None
    )
    if found is None:
        return "no checkpoint in output_dir"
    try:
        state = TrainerState.load_from_json(os.path.join(found, STATE_FILE))
    except (OSError, ValueError, TypeError):
        return f"no {STATE_FILE} in {os.path.basename(os.path.normpath(found))}"
    return f"the checkpoint of step {state.global_step}"


def write_layout(folder: str, layout: Layout) -> None:
    """Write the numbers of ranks and stages into a checkpoint's folder."""
    Path(folder, LAYOUT_FILE).write_text(json.dumps(layout) + "\n", encoding="utf-8")


@contextmanager
def random_states_by_data_rank(
    checkpoint: str, layout: Layout, process_index: int, data_rank: int
) -> Iterator[str]:
    """Yield a folder in which this rank finds its random states under the name that the Trainer reads.

    Args:
        checkpoint: the checkpoint's folder.
        layout: the layout of this training.
        process_index: this rank's index among all processes.
        data_rank: index of the part of the data that it trains on.

    Raises:
        ParallelTrainingError: ``parallel_layout.json`` is damaged.
    """
    folder = Path(checkpoint)
    written = _layout_of(folder)
    source = folder / _random_file(written["processes"], data_rank * written["tensor_parallel_size"])
    name = _random_file(layout["processes"], process_index)
    if layout.items() <= written.items() or not source.is_file():
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as place:
        shutil.copyfile(source, Path(place, name))
        yield place


def _layout_of(folder: Path) -> Layout:
    file = folder / LAYOUT_FILE
    if file.is_file():
        text = read_text(str(file), _MAX_LAYOUT_BYTES, ParallelTrainingError)
        document = JsonDocument(text, "layout", ParallelTrainingError, str(file))
        found: Layout = document.read(Layout)
        document.finish()
        return {"pipeline_stage": 1, **found}
    processes = max(1, len(list(folder.glob("rng_state_*.pth"))))
    return {"processes": processes, "tensor_parallel_size": 1, "pipeline_stage": 1}


def _random_file(processes: int, process_index: int) -> str:
    return "rng_state.pth" if processes <= 1 else f"rng_state_{process_index}.pth"
