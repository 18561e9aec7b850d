"""An error that lists problems comes with the user's own frames: not with ours, nor with the Trainer's."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback

import hf_actswap
from hf_actswap import ActSwapCallback, ActSwapTrainer, ActSwapTrainingArguments
from hf_actswap.errors import ActSwapError
from hf_actswap.plan import load_plan

from .conftest import CASE_1, Tokens, tiny_llama

BAD = "swap_config: {swapp: true}\n"
NO_YAML = "swap_config: [\n"
NO_OP = {
    "swap_config": {"swap": True, "op_swap": [{"op_name": "nothing", "backward_prefetch": 1, "layers": True}]}
}
TOO_LITTLE = {"memory": {"mode": "adaptive", "warmup_steps": 1, "search_steps": 2, "reduce_by_gib": 1.0}}
TWO_RANKS = {"parallel_config": {"tensor_parallel_size": 2}}
OURS, LIBRARIES = "hf_actswap", ("transformers", "accelerate", "torch", "yaml")


def arguments(actswap: Any, folder: Path) -> ActSwapTrainingArguments:
    return ActSwapTrainingArguments(
        str(folder), actswap=actswap, max_steps=4, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip


def trained(kind: type[Trainer], requested: Any, folder: Path) -> None:
    args = arguments(None, folder)
    kind(tiny_llama(), args, train_dataset=Tokens(8), callbacks=[ActSwapCallback(requested)]).train()


def own_loop(folder: Path) -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf_actswap.apply(model, TOO_LITTLE, optimizer=optimizer):
        for _ in range(4):
            ids = Tokens(1)[0]["input_ids"][None]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()


def inside_a_callback(folder: Path) -> None:
    """What the user does wrong in a callback of his own is not hidden."""

    class Own(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            hf_actswap.load_config(BAD)

    args = arguments(CASE_1, folder)
    Trainer(tiny_llama(), args, train_dataset=Tokens(8), callbacks=[ActSwapCallback(args), Own()]).train()


CASES: dict[str, tuple[Callable[[Path], object], int, int]] = {
    "load_config": (lambda _: hf_actswap.load_config(BAD), 2, 0),
    "no YAML": (lambda _: hf_actswap.load_config(NO_YAML), 2, 0),
    "no file": (lambda _: hf_actswap.load_config("none.yaml"), 2, 0),
    "load_plan": (lambda _: load_plan("none.json"), 2, 0),
    "apply": (lambda _: hf_actswap.apply(tiny_llama(), NO_OP), 2, 0),
    "apply, malformed": (lambda _: hf_actswap.apply(tiny_llama(), BAD), 2, 0),
    "prepare": (lambda _: hf_actswap.prepare(Accelerator(cpu=True), tiny_llama(), NO_OP), 2, 0),
    "arguments": (lambda folder: arguments(NO_YAML, folder), 3, 0),
    "callback": (lambda _: ActSwapCallback(BAD), 2, 0),
    "Trainer, train": (lambda folder: trained(Trainer, NO_OP, folder), 3, 0),
    "ActSwapTrainer, train": (lambda folder: trained(ActSwapTrainer, NO_OP, folder), 3, 0),
    "Trainer, budget": (lambda folder: trained(Trainer, TOO_LITTLE, folder), 3, 0),
    "own loop, budget": (own_loop, 2, 2),
    "in a callback": (inside_a_callback, 3, 0),
    "ActSwapTrainer, init": (lambda folder: trained(ActSwapTrainer, TWO_RANKS, folder), 3, 0),
    "Trainer, init": (lambda folder: trained(Trainer, TWO_RANKS, folder), 3, 4),
}  # fmt: skip
"""What is done; the user's frames with the one of the test, and those of libraries at most."""


@pytest.mark.parametrize("case", CASES)
def test_the_users_frames(case: str, tmp_path: Path) -> None:
    act, own, of_libraries = CASES[case]
    with pytest.raises(ActSwapError) as caught:
        act(tmp_path)
    error = caught.value
    names = [
        frame.f_globals["__name__"].partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    libraries = [name for name in names if name in LIBRARIES]
    assert names.count(OURS) <= 2  # the public function, and what ends its traceback
    assert len(libraries) <= of_libraries
    assert len(names) - names.count(OURS) - len(libraries) == own
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback (most recent call last)") == 1
    assert shown.rstrip().endswith(str(error))
