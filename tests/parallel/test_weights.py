"""How parameters are divided, without processes: golden cases G7 and T16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_actswap.parallel import Partition


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(32, 4, 8), (32, 4, 16), (32, 4, 32), (32, 8, 4), (8, 1, 2)]
)
def test_query_heads_stand_beside_their_kv_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """T16: NxD permutes query heads to its order of replicas; here they stay, and kv heads follow."""
    replicas = max(1, ranks // kv_heads)
    query = Partition.of(0, heads, ranks)
    kv = Partition.of(0, kv_heads, ranks, replicas=replicas)
    for rank in range(ranks):
        own = query.part(torch.arange(heads), rank).tolist()
        assert own == list(range(rank * heads // ranks, (rank + 1) * heads // ranks))
        groups = [head // (heads // kv_heads) for head in own]  # as `repeat_kv` has it
        held = kv.part(torch.arange(kv_heads), rank).tolist()
        local = [held[number // (len(own) // len(held))] for number in range(len(own))]
        assert local == groups


def test_stride() -> None:
    partition = Partition.of(0, 12, 2, stride=3)
    rows = torch.arange(12)
    assert partition.part(rows, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert partition.part(rows, 1).tolist() == [2, 3, 6, 7, 10, 11]


@given(
    sections=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ranks=st.sampled_from([1, 2, 3, 4, 6]),
    dim=st.sampled_from([0, 1]),
    data=st.data(),
)
def test_whole_undoes_part(sections: list[int], ranks: int, dim: int, data: st.DataObject) -> None:
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    replicas = tuple(data.draw(st.sampled_from(divisors)) for _ in sections)
    partition = Partition(dim, tuple(sections), ranks, replicas, padded=True)
    full = torch.arange(2 * sum(sections)).view(2, -1)
    full = full if dim == 1 else full.t()
    parts = [partition.part(full, rank) for rank in range(ranks)]
    assert {part.shape[dim] for part in parts} == {partition.local_size}
    assert torch.equal(partition.whole(parts), full)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 10, "ranks": 4}, r"10 in dim 0 does not divide into 4 parts"),
        ({"size": 10, "ranks": 2, "stride": 3}, r"stride=3 does not divide 10"),
        ({"size": 12, "ranks": 4, "replicas": 3}, r"3 replicas do not divide 4"),
        ({"size": 12, "ranks": 4, "sections": (8, 5)}, r"add up to 13, not to 12"),
        ({"size": 12, "ranks": 4, "sections": (8, 4), "replicas": (1,)}, r"2 sections have 1"),
    ],
)
def test_rejected(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition.of(0, **arguments)
