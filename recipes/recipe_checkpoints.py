"""Which checkpoint a run goes on from: the newest that was written to its end.

The Trainer writes weights, optimizer, scheduler and random states (every rank its own), and
``trainer_state.json`` last, none of them at once. Whoever is killed meanwhile leaves a folder that looks like
the newest checkpoint; going on from it fails, or begins without what is missing. So the folder's files are
looked at, not its name alone.
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
"""With ``enable_jit_checkpoint`` the Trainer itself says so."""
_NEEDED = {
    "weights": ("*.safetensors", "pytorch_model*", "global_step*"),
    "optimizer.pt": ("optimizer*", "global_step*"),
    "scheduler.pt": ("scheduler.pt",),
}
"""What a checkpoint with an optimizer has, as the Trainer alone, with FSDP, or with DeepSpeed names it."""
_NAME = re.compile(r"checkpoint-(\d+)")


def last_complete_checkpoint(folder: Path) -> str | None:
    """Return the path of the newest checkpoint below ``folder`` that is whole, or ``None``.

    What is passed over is logged with what is wrong with it, and stays where it is.
    """
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    for path in sorted(found, key=_step, reverse=True):
        faults = list(faults_of(path))
        if not faults:
            return str(path)
        logger.warning("%s was not written to its end and is passed over: %s.", path, "; ".join(faults))
    return None


def faults_of(checkpoint: Path) -> Iterator[str]:
    """Yield what shows that a checkpoint was not written to its end.

    Or that it was not deleted to its end. With ``save_only_model`` weights and state are all. A random state
    that a further rank did not write shows only where the checkpoint says how many ranks there were
    (`LAYOUT_FILE`, which `ActSwapTrainer` writes).
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
    """Takes away the ``trainer_state.json`` of a folder that is about to be written again.

    Else one that an earlier run left would vouch for files that a kill has cut off since.
    """

    def _clear(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if control.should_save and args.should_save:
            stale = Path(args.output_dir or ".", f"checkpoint-{state.global_step}", STATE_FILE)
            stale.unlink(missing_ok=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """After the Trainer's own callback has decided whether to save."""
        self._clear(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """As at the end of a step."""
        self._clear(args, state, control)


def _step(checkpoint: Path) -> int:
    found = _NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found else -1


def _json_of(path: Path) -> dict[str, int]:
    """The whole numbers of the mapping in a file; empty if there is no file or no whole document."""
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
