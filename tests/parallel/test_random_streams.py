"""Masks: other ones on every shard, the same on replicas, the same again in recompute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_actswap.parallel import tensor_parallel_group
from hf_actswap.parallel.block_hooks import model_parallel_seed, rank_stream
from tests.processes import launched, of_ranks, result, run_cases

WORLD_SIZE = 4
SEED = 3


def draw() -> torch.Tensor:
    return torch.rand(64)


def streams(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """What a rank draws, inside and outside, in one order."""
    torch.manual_seed(SEED)
    found = {"before": draw()}
    with rank_stream(group):
        found["inside"] = draw()
    found["between"] = draw()
    with rank_stream(group):
        found["again"] = draw()
        with rank_stream(group):
            found["nested"] = draw()
        found["after nested"] = draw()
    found["after"] = draw()
    return found


def amounts(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The outer stream after blocks that drew nothing, little, much, reseeded, or raised."""

    def outer(inside: Callable[[], object]) -> torch.Tensor:
        torch.manual_seed(SEED)
        try:
            with tensor_parallel_group(group), rank_stream():
                inside()
        except ZeroDivisionError:
            pass
        return draw()

    return {
        "nothing": outer(lambda: None),
        "little": outer(draw),
        "much": outer(lambda: torch.randn(100_003)),
        "reseeded": outer(lambda: torch.manual_seed(99)),
        "raised": outer(lambda: 1 // 0),
    }


class Toy(nn.Module):
    """Dropout on a replicated tensor, then on shards of it; both show in the gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.first = nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8))
        self.second = nn.Parameter(torch.linspace(1, 2, 48).view(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replicated = functional.dropout(x * self.first, 0.5)
        with rank_stream(self.group):
            sharded = functional.dropout(replicated * self.second, 0.5)
        with rank_stream(self.group):
            return functional.dropout(sharded.sin(), 0.5)


Run = Callable[[Toy, torch.Tensor], torch.Tensor]


def recomputed(group: dist.ProcessGroup) -> dict[str, list[torch.Tensor]]:
    """Gradients without and with recompute (both kinds, and outside in), and what is drawn afterwards."""

    def gradients(
        run: Callable[[Toy, torch.Tensor], torch.Tensor], outside: bool = False
    ) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        toy, x = Toy(group), torch.ones(6, 8, requires_grad=True)
        with rank_stream(group) if outside else nullcontext():
            output = run(toy, run(toy, x))
        drawn = draw()
        output.square().sum().backward()
        found = [x.grad, toy.first.grad, toy.second.grad, drawn, output.detach()]
        return [tensor for tensor in found if tensor is not None]

    return {
        "plain": gradients(lambda toy, x: toy(x)),
        "checkpoint": gradients(lambda toy, x: checkpoint(toy, x, use_reentrant=False)),
        "reentrant": gradients(lambda toy, x: checkpoint(toy, x, use_reentrant=True)),
        "plain inside": gradients(lambda toy, x: toy(x), outside=True),
        "checkpoint inside": gradients(lambda toy, x: checkpoint(toy, x, use_reentrant=False), outside=True),
        "not restored": gradients(
            lambda toy, x: checkpoint(toy, x, use_reentrant=False, preserve_rng_state=False)
        ),
    }


CASES = {"streams": streams, "amounts": amounts, "recomputed": recomputed, "alone": streams}
CASE_GROUPS = {
    "streams": [[0, 1, 2, 3]],
    "amounts": [[0, 1], [2, 3]],
    "recomputed": [[0, 1], [2, 3]],
    "alone": [[0], [1]],
}


def run_on_rank(rank: int, folder: str) -> None:
    run_cases(rank, folder, WORLD_SIZE, CASES, CASE_GROUPS)


folder = launched(run_on_rank, WORLD_SIZE, 150)


OUTSIDE, INSIDE = ("before", "between", "after"), ("inside", "again", "nested", "after nested")


@pytest.mark.dist
def test_ranks_differ_inside_and_agree_outside(folder: Path) -> None:
    found = of_ranks(folder, "streams")
    for of_rank in found:
        for name in OUTSIDE:
            assert torch.equal(of_rank[name], found[0][name])
    everything = [of_rank[name] for of_rank in found for name in INSIDE]
    everything += [found[0][name] for name in OUTSIDE]
    for one, other in combinations(everything, 2):
        assert not torch.isin(one, other).any()


@pytest.mark.dist
def test_a_group_of_one_draws_as_without(folder: Path) -> None:
    torch.manual_seed(SEED)
    for name in ("before", "inside", "between", "again", "nested", "after nested", "after"):
        assert torch.equal(result(folder, "alone", 0)[name], draw())


@pytest.mark.dist
def test_the_outer_stream_does_not_depend_on_what_happens_inside(folder: Path) -> None:
    torch.manual_seed(SEED)
    unmoved = draw()
    for found in of_ranks(folder, "amounts"):
        for name in found:
            assert torch.equal(found[name], found["nothing"])
            assert not torch.equal(found[name], unmoved)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plain"),
    [("checkpoint", "plain"), ("reentrant", "plain"), ("checkpoint inside", "plain inside")],
)
def test_masks_repeat_in_recompute(name: str, plain: str, folder: Path) -> None:
    """Spec: golden case G9; bitwise."""
    for rank in range(WORLD_SIZE):
        found = result(folder, "recomputed", rank)
        for one, other in zip(found[name], found[plain], strict=True):
            assert torch.equal(one, other)


@pytest.mark.dist
def test_masks_differ_where_the_state_is_not_restored(folder: Path) -> None:
    """The control: without it the test above would prove nothing."""
    for rank in range(WORLD_SIZE):
        found = result(folder, "recomputed", rank)
        assert torch.equal(found["not restored"][-1], found["plain"][-1])
        assert not torch.equal(found["not restored"][1], found["plain"][1])


@pytest.mark.dist
def test_shards_differ_between_ranks(folder: Path) -> None:
    one, other = (result(folder, "recomputed", rank)["plain"] for rank in (0, 1))
    assert not torch.equal(one[-1], other[-1])
    assert torch.equal(one[3], other[3])


def test_model_parallel_seed() -> None:
    assert [model_parallel_seed(7, rank) for rank in range(3)] == [2725, 2726, 2727]


@pytest.mark.gpu
def test_on_an_accelerator(pair_alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process plays both ranks: inside they differ, outside they agree; no host synchronisation."""
    device = torch.accelerator.current_accelerator()
    drawn = []
    for rank in (0, 1):
        monkeypatch.setattr(_Pair, "number", rank)
        torch.manual_seed(SEED)
        before = torch.rand(8, device=device)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        with rank_stream(pair_alone):
            inside = torch.rand(8, device=device)
        torch.cuda.set_sync_debug_mode("default")
        after = torch.rand(8, device=device)
        torch.manual_seed(SEED)
        torch.rand(8, device=device)
        assert not torch.equal(after, torch.rand(8, device=device))
        drawn.append((before, inside, after))
    for place, alike in ((0, True), (1, False), (2, True)):
        assert torch.equal(drawn[0][place], drawn[1][place]) is alike


class _Pair:
    """As much of a group as `rank_stream` asks for."""

    number = 0

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self.number


@pytest.fixture
def pair_alone() -> _Pair:
    return _Pair()
