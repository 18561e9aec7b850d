"""Two processes under DDP: each rank's numbers are those of whole sequences, reduced once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hf_actswap import apply
from tests.processes import join_group, launch
from tests.stream.streamed_models import LENGTH, STREAMED, TOKENS, data, gradients, made

WORLD_SIZE = 2
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def steps(kind: str, streamed: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Train two steps, of two micro-batches each; return losses, gradients, and buckets reduced."""
    rank, reduced = dist.get_rank(), [0]
    model = made("qwen3, tied")
    wrapped = DistributedDataParallel(model, **KINDS[kind])

    def counted(group: Any, bucket: Any) -> Any:
        reduced[0] += 1
        return allreduce_hook(group, bucket)

    counted.__annotations__.clear()  # DDP compares them with its types, and these are texts here
    wrapped.register_comm_hook(dist.group.WORLD, counted)
    applied = apply(wrapped, STREAMED if streamed else {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(2):
        optimizer.zero_grad()
        micro_batches = 1 if kind == "static" else 2
        for part in range(micro_batches):
            given = {name: item.roll(4 * number + 2 * part + rank, 1) for name, item in data().items()}
            last = part == micro_batches - 1
            with nullcontext() if last else wrapped.no_sync():
                loss = wrapped(**given).loss
                (loss / micro_batches).backward()
            losses.append(loss.item())
        optimizer.step()
    found = {name: one.clone() for name, one in gradients(model).items()}
    applied.remove()
    return losses, found, reduced[0]


def rows_of_chosen_plan() -> list[int]:
    """Layers that each rank recomputes whose plan is chosen in a first step that only rank 0 streams."""
    rank, model = dist.get_rank(), made()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**STREAMED, "memory": {"mode": "adaptive", "budget_gib": 0.1}}
    with apply(wrapped, config, optimizer=optimizer) as applied:
        before = len(applied.plan.rows)
        length = LENGTH if rank == 0 else TOKENS - 1
        wrapped(**{name: item[:, :length] for name, item in data().items()}).loss.backward()
        return [before, len(applied.plan.rows)]


def train_on_rank(rank: int, folder: str) -> None:
    """Write ``<kind>.<streamed>.<rank>.pt``."""
    torch.set_num_threads(1)
    join_group(rank, folder, WORLD_SIZE, limit_s=60)
    try:
        for kind in KINDS:
            for streamed in (False, True):
                torch.save(steps(kind, streamed), Path(folder, f"{kind}.{streamed}.{rank}.pt"))
        torch.save(rows_of_chosen_plan(), Path(folder, f"chosen.{rank}.pt"))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each rank wrote; all in one launch."""
    return launch(train_on_rank, tmp_path_factory.mktemp("streamed"), WORLD_SIZE, 250)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_has_the_numbers_of_whole_sequences(kind: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        whole, streamed = (torch.load(results / f"{kind}.{on}.{rank}.pt") for on in (False, True))
        assert streamed[0] == pytest.approx(whole[0], rel=1e-6)
        assert streamed[1].keys() == whole[1].keys()
        for name, one in whole[1].items():
            assert float((streamed[1][name] - one).norm()) <= 1e-6 * float(one.norm()), name
        assert streamed[2] == whole[2] == 2, "one reduction a step, for all chunks"


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_choose_together_what_is_kept_whatever_their_lengths(results: Path) -> None:
    assert [torch.load(results / f"chosen.{rank}.pt") for rank in range(WORLD_SIZE)] == [[3, 0], [3, 0]]
