"""What each of two ranks runs where one of them has another configuration, or another checkpoint."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

import hf_actswap
from hf_actswap import ActSwapCallback, ActSwapTrainer, ActSwapTrainingArguments
from tests.integrations.conftest import Tokens, tiny_llama
from tests.robustness.ranks import join_log

RIGHT = {"swap_config": {"swap": True, "default_prefetch": 10}}
BAD = {"swap_config": {"swapp": True}}
DIVIDED = {"parallel_config": {"tensor_parallel_size": 2}}
OTHER = {"swap_config": {"swap": True, "default_prefetch": 11}}

Case = Callable[[bool, Path], object]
"""Gets whether this is the odd rank, and a folder of all."""


def arguments(actswap: Any, folder: Path, **more: Any) -> ActSwapTrainingArguments:
    settings = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
    }
    return ActSwapTrainingArguments(actswap=actswap, **{**settings, **more})


def trainer(kind: type[Trainer], args: TrainingArguments, *callbacks: Any) -> Trainer:
    return kind(model=tiny_llama(), args=args, train_dataset=Tokens(8), callbacks=list(callbacks))


def by_arguments(requested: Any) -> Case:
    """The training arguments name the configuration."""
    return lambda odd, folder: trainer(ActSwapTrainer, arguments(requested if odd else RIGHT, folder))


def by_callback(kind: type[Trainer], requested: Any, right: Any = RIGHT) -> Case:
    """The callback is given the configuration itself."""

    def run(odd: bool, folder: Path) -> None:
        trainer(kind, arguments(None, folder), ActSwapCallback(requested if odd else right))

    return run


def by_prepare(requested: Any, right: Any = RIGHT) -> Case:
    def run(odd: bool, _: Path) -> None:
        hf_actswap.prepare(Accelerator(cpu=True), tiny_llama(), requested if odd else right)

    return run


def resumed(kind: type[Trainer], requested: Any, **more: Any) -> Case:
    """Goes on from a checkpoint that the odd rank has not."""

    def run(odd: bool, folder: Path) -> None:
        saved = folder / "checkpoint-1"
        if not odd:
            saved.mkdir(exist_ok=True)
            (saved / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": []}))
        args = arguments(None, folder / "odd" if odd else folder, **more)
        asked = True if more else str(folder / "none" if odd else saved)
        trainer(kind, args, ActSwapCallback(requested)).train(resume_from_checkpoint=asked)

    return run


def nothing_wrong(odd: bool, folder: Path) -> float:
    """After all the errors the same ranks train together."""
    own = folder / f"trained_{odd}"
    found: float = trainer(ActSwapTrainer, arguments(RIGHT, own)).train().training_loss
    return found


FRESH: dict[str, Case] = {
    "arguments, malformed": by_arguments(BAD),
    "arguments, no such file": by_arguments("none.yaml"),
    "arguments, another size": by_arguments(DIVIDED),
    "callback, malformed": by_callback(Trainer, BAD),
}
"""Each ahead of any process group."""

TOGETHER: dict[str, Case] = {
    "Trainer, malformed": by_callback(Trainer, BAD),
    "Trainer, another size": by_callback(Trainer, DIVIDED),
    "Trainer, no configuration": by_callback(Trainer, None),
    "ActSwapTrainer, malformed": by_callback(ActSwapTrainer, "none.yaml"),
    "ActSwapTrainer, both divided, another swap": by_callback(ActSwapTrainer, {**DIVIDED, **OTHER}, DIVIDED),
    "prepare, malformed": by_prepare(BAD),
    "prepare, no such file": by_prepare("none.yaml"),
    "prepare, another size": by_prepare(DIVIDED),
    "prepare, another size on the first": by_prepare(RIGHT, DIVIDED),
    "Trainer, no such checkpoint": resumed(Trainer, RIGHT),
    "ActSwapTrainer, no last checkpoint": resumed(ActSwapTrainer, RIGHT, seed=3),
    "ActSwapTrainer, divided, no such checkpoint": resumed(ActSwapTrainer, DIVIDED),
    "nothing wrong": nothing_wrong,
}
"""One after the other in the same two processes."""


def run_cases(
    names: list[str], folder: str, store: dict[str, str], environment: dict[str, str], log: str, report: str
) -> None:
    """Run cases on one rank; leave in ``report`` what each raised, and after how long."""
    join_log({**environment, **store}, log)
    rank, found = int(os.environ["RANK"]), {}
    for name in names:
        begin = monotonic()
        try:
            said: object = {**FRESH, **TOGETHER}[name](rank == 1, Path(folder))
        except Exception as error:  # told to the test
            said = f"{type(error).__name__}: {error}"
        found[name] = said if isinstance(said, str | float) else "nothing was raised", monotonic() - begin
        Path(report).write_text(json.dumps(found))
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(0)
