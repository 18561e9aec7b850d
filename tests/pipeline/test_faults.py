"""Trainings of stages in which something is wrong or unusual: none waits for ever, errors name the cause."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_actswap.parallel.rank_agreement import LostRanks
from hf_actswap.releases import loss_is_scaled_by_data_ranks
from tests.integrations.parallel_runs import Rows
from tests.pipeline.staged_worker import VOCABULARY
from tests.pipeline.trainer_worker import trainer_of
from tests.processes import LOST_RANK_LIMIT_S, launch_trainers, launched_to_lose_ranks, result, told
from tests.quick_cases import slow_among


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


pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not loss_is_scaled_by_data_ranks(), reason="it needs transformers 5.16"),
]

WORKER = "tests.pipeline.test_faults"
LAUNCH_S = 60


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what three stages found."""
    return launch_trainers(f"{WORKER}:THREE", tmp_path_factory.mktemp("three"), 3, LAUNCH_S)


def test_groups_of_some_ranks_alone_stop_no_training(three: Path) -> None:
    """Before a training, within it (tied weights) and after it."""
    first = result(three, "groups", 0)
    assert len(first[0]) == 1
    assert first[0] == first[1]
    for rank in (1, 2):
        assert result(three, "groups", rank) == [*first, 3]


def test_an_error_that_no_lost_rank_causes_is_left_alone(three: Path) -> None:
    assert result(three, "none lost", 0) == "RuntimeError: DataLoader timed out after 3 seconds"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "training",
            "batches in an epoch: expected the same on all ranks, found 9 (18 samples) on ranks 0, 2; "
            "12 (24 samples) on rank 1.",
        ),
        (
            "stream",
            "micro-batches of this step: expected the same on all ranks, found 0 on ranks 0, 2; 3 on rank 1.",
        ),
        (
            "evaluation",
            "batches of the evaluation: expected the same on all ranks, found 3 (7 samples) on ranks 0, 2; "
            "3 (8 samples) on rank 1.",
        ),
        (
            "evaluation of a stream",
            "batches of the evaluation: expected the same on all ranks, found 2 on ranks 0, 2; 3 on rank 1.",
        ),
    ],
)
def test_ranks_with_datasets_of_other_lengths(name: str, said: str, three: Path) -> None:
    for rank in range(3):
        found = result(three, "lengths", rank)[name]
        assert found.startswith("RankAgreementError: ")
        assert said in found


def test_shared_gradients_are_summed_once_where_an_epoch_ends_in_mid_step(
    three: Path, tmp_path: Path
) -> None:
    expected = stream_trained(tmp_path, 1)
    assert len(expected) == 3
    for rank in range(3):
        for found, wanted in zip(result(three, "stream trained", rank), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)


def test_an_evaluation_of_a_stream_weighs_the_last_batch_by_its_samples(three: Path) -> None:
    for rank in range(3):
        sized, stream = result(three, "stream evaluated", rank)
        assert sized == stream


def test_a_model_that_is_cut_already_is_rejected(three: Path) -> None:
    for rank in range(3):
        said = result(three, "cut before", rank)
        assert "model: expected a whole model, found one that another training has cut into stages." in said


lost = launched_to_lose_ranks(f"{__name__}:LOSING", 3, LAUNCH_S, ENDS, QUICK)


@pytest.mark.parametrize("how", slow_among(ENDS, set(ENDS) - set(QUICK)))
def test_the_rank_that_has_ended_is_named_and_no_other(how: str, lost: Path) -> None:
    ended = ENDS[how]
    cause = {
        "raised": "Rank 1 has left the training: ValueError: of this rank alone. Look for",
        "interrupted": "Rank 1 has left the training: KeyboardInterrupt. Look for",
    }.get(how, f"answer. No sign within {LOST_RANK_LIMIT_S:g} s of: rank {ended}. Look for")
    for rank in {0, 1, 2} - {ended}:
        said, took_s = torch.load(lost / how / f"said.{rank}.pt", weights_only=False)
        assert said.startswith(f"LostRankError: rank {rank}: a collective of ranks [0, 1, 2] failed"), said
        assert cause in said, said
        assert took_s < 15
