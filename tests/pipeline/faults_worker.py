"""What each process runs when something is wrong or unusual: trainings of stages that end by themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_actswap.parallel import rank_agreement
from hf_actswap.parallel.rank_agreement import LostRanks
from tests.integrations.parallel_runs import Rows, told
from tests.pipeline.staged_worker import VOCABULARY
from tests.pipeline.trainer_worker import trainer_of
from tests.processes import run_trainers_in_fork


def tied_gpt2() -> GPT2LMHeadModel:
    """Of three layers; the first and the last stage share its embedding, and all of them its positions."""
    torch.manual_seed(0)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, **rates)
    )


def losses(trainer: Any) -> list[float]:
    """Train; the losses of the log."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def groups(folder: Path) -> Any:
    """Two trainings after a group that one rank has made alone, and such a group after them."""
    rank = dist.get_rank()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    settings = {"model": tied_gpt2(), "max_steps": 1, "gradient_accumulation_steps": 3}
    found = []
    for name in ("first", "second"):
        settings["model"] = tied_gpt2()
        found.append(losses(trainer_of(folder / name, 3, **settings)))
    if rank == 0:
        return found
    own = dist.new_group([1, 2], use_local_synchronization=True)
    total = torch.tensor(rank)
    dist.all_reduce(total, group=own)
    return [*found, int(total)]


def none_lost(_folder: Path) -> str:
    """An error that sounds like a lost rank's, while all ranks are there."""

    store = dist.distributed_c10d._get_default_store()

    def fails() -> None:
        with LostRanks().named():
            dist.barrier()
            if dist.get_rank() == 0:
                raise RuntimeError("DataLoader timed out after 3 seconds")
            store.wait(["rank 0 has failed"])

    said = told(fails)
    store.set("rank 0 has failed", "")
    return said


class Stream(IterableDataset):  # type: ignore[type-arg]
    """So many rows, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = Rows(self.count)
        return iter([rows[index] for index in range(self.count)])


def lengths(folder: Path) -> dict[str, str]:
    """What is said where the ranks have datasets of other lengths."""
    rank = dist.get_rank() % 2

    def trainer(**settings: Any) -> Any:
        given = {"gradient_accumulation_steps": 3, "max_steps": 4, **settings}
        return trainer_of(folder / "lengths", 3, model=tied_gpt2(), **given)

    return {
        "training": told(trainer(data=Rows(18 + 6 * rank)).train),
        "stream": told(trainer(data=Stream(18 + 6 * rank)).train),
        "evaluation": told(lambda: trainer().evaluate(Rows(7 + rank))),
        "evaluation of a stream": told(lambda: trainer().evaluate(Stream(6 + 3 * rank))),
    }


def stream_trained(folder: Path, stages: int = 3) -> list[tuple[float, float]]:
    """Losses and norms where each epoch ends in the middle of a step, with gradients that stages share."""
    settings = {"data": Stream(8), "gradient_accumulation_steps": 3, "max_steps": 3}
    trainer = trainer_of(folder / f"stream {stages}", stages, model=tied_gpt2(), **settings)
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def stream_evaluated(folder: Path) -> list[float]:
    """The loss of rows with and without a length, the last batch of which is not full."""
    trainer = trainer_of(folder / "evaluated", 3, model=tied_gpt2())
    return [trainer.evaluate(data)["eval_loss"] for data in (Rows(7), Stream(7))]


def cut_before(folder: Path) -> str:
    """What is said of a model that another training has cut."""
    model = tied_gpt2()
    trainer_of(folder / "cut", 3, model=model)
    return told(lambda: trainer_of(folder / "cut", 3, model=model))


THREE: dict[str, Any] = {
    "cut before": cut_before,
    "groups": groups,
    "none lost": none_lost,
    "lengths": lengths,
    "stream trained": stream_trained,
    "stream evaluated": stream_evaluated,
}
"""Three stages."""


class EndsRank(TrainerCallback):
    """After the second step one rank ends as it is told."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how, self.since = rank, how, 0.0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """End it."""
        if state.global_step != 2:
            return
        self.since = monotonic()
        if dist.get_rank() == self.rank:
            if self.how == "killed":
                os._exit(1)
            raise KeyboardInterrupt if self.how == "interrupted" else ValueError("of this rank\nalone")


ENDS = {"killed": 2, "raised": 1, "interrupted": 1, "killed first": 0}
"""How a rank ends, and which."""
QUICK = ("killed",)
LIMIT_S = 2.0
"""How long the others wait for its answer."""


def lose_ranks(slow: bool, rank: int, folder: str) -> None:
    """Let a rank end in each way, every rank in a process of its own."""
    rank_agreement.ANSWER_LIMIT_S = LIMIT_S
    for how in ENDS if slow else QUICK:
        run_trainers_in_fork(f"{__name__}:LOSING", 3, rank, Path(folder, how))


def loses_rank(folder: Path) -> None:
    """Train until a rank ends; write what is said, and how long it took."""
    ends = EndsRank(ENDS[folder.name], folder.name.split()[0])
    trainer = trainer_of(folder / "lost", 3, model=tied_gpt2(), gradient_accumulation_steps=3)
    trainer.add_callback(ends)
    try:
        said = told(trainer.train)
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
    torch.save((said, monotonic() - ends.since), folder / f"said.{dist.get_rank()}.pt")
    os._exit(0)


LOSING: dict[str, Any] = {"lost": loses_rank}
