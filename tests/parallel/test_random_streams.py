"""Masks: other ones on every shard, the same on replicas, the same again in recompute."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_actswap.parallel.block_hooks import model_parallel_seed, rank_stream
from tests.parallel.random_streams_worker import SEED, WORLD_SIZE, draw, run_on_rank
from tests.processes import launched, of_ranks, result

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
