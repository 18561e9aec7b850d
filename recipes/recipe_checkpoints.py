"""Finds the checkpoint from which a run resumes: the newest that was written completely.

The Trainer writes weights, optimizer, scheduler and random states (every rank its own), and then
``trainer_state.json``, none of them atomically. A run that is killed meanwhile leaves a folder that looks
like the newest checkpoint; resuming from it fails, or starts without the missing parts. So the folder's files
are checked, not its name alone.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_actswap.integrations.parallel_checkpoint import LAYOUT_FILE, STATE_FILE

logger = logging.getLogger("llama_swap")

INCOMPLETE_FILE = "checkpoint-is-incomplete.txt"
"""File by which the Trainer itself marks an incomplete checkpoint (``enable_jit_checkpoint``)."""
_NEEDED = {
    "weights": ("*.safetensors", "pytorch_model*", "global_step*"),
    "optimizer.pt": ("optimizer*", "global_step*"),
    "scheduler.pt": ("scheduler.pt",),
}
"""Files of a checkpoint with an optimizer, by the names that the Trainer, FSDP and DeepSpeed give them."""
_NAME = re.compile(r"checkpoint-(\d+)")


def last_complete_checkpoint(folder: Path) -> str | None:
    """Return the path of the newest complete checkpoint below ``folder``, or ``None``.

    Newer ones that are incomplete are logged with their faults, and left in place.
    """
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    for path in sorted(found, key=_step, reverse=True):
        faults = list(faults_of(path))
        if not faults:
            return str(path)
        logger.warning("%s was not written to its end and is passed over: %s.", path, "; ".join(faults))
    return None


def faults_of(checkpoint: Path) -> Iterator[str]:
    """Yield the signs that a checkpoint was not written, or not deleted, completely.

    With ``save_only_model`` only weights and state are expected. The random states of all ranks are expected
    if the checkpoint says how many ranks there were (`LAYOUT_FILE`, which `ActSwapTrainer` writes).
    """
    if (checkpoint / INCOMPLETE_FILE).exists():
        yield f"it has {INCOMPLETE_FILE}"
    step = _json_of(checkpoint / STATE_FILE).get("global_step")
    if step is None or (_NAME.fullmatch(checkpoint.name) and step != _step(checkpoint)):
        yield f"no whole {STATE_FILE}"
    weights = sorted(checkpoint.glob("*.safetensors"))
    yield from (f"{path.name} ends too early" for path in weights if not _is_whole_safetensors(path))
    archives = sorted([*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")])
    yield from (f"{path.name} ends too early" for path in archives if not zipfile.is_zipfile(path))
    if archives:
        ranks = _json_of(checkpoint / LAYOUT_FILE).get("processes", 1)
        states = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state*.pth"]
        for name, patterns in {**_NEEDED, **{name: (name,) for name in states}}.items():
            if not any(any(checkpoint.glob(pattern)) for pattern in patterns):
                yield f"no {name}"


class StateLast(TrainerCallback):
    """Deletes an old ``trainer_state.json`` in a checkpoint's folder before the folder is written again.

    If the run is killed while it writes, the old file would make an incomplete checkpoint look complete.
    """

    def _clear(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if control.should_save and args.should_save:
            stale = Path(args.output_dir or ".", f"checkpoint-{state.global_step}", STATE_FILE)
            stale.unlink(missing_ok=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Delete the file, after the Trainer's own callback has decided whether to save."""
        self._clear(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Delete the file, as at the end of a step."""
        self._clear(args, state, control)


def _step(checkpoint: Path) -> int:
    found = _NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found else -1


def _json_of(path: Path) -> dict[str, int]:
    """Return the integers of the JSON mapping in a file; empty if there is no file or no whole document."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    items = document.items() if isinstance(document, dict) else ()
    return {name: value for name, value in items if type(value) is int}


def _is_whole_safetensors(path: Path) -> bool:
    """Whether the file is as long as its header says: 8 bytes of length, JSON with offsets, the tensors.

    The format: https://github.com/huggingface/safetensors#format
    """
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return False
        header_bytes = struct.unpack("<Q", start)[0]
        if 8 + header_bytes > path.stat().st_size:
            return False
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return path.stat().st_size == 8 + header_bytes + max(ends, default=0)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return False
