"""The comparison with transformers' own tensor parallelism counts both alike, and its two claims hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import parallel_peer
from benchmarks.parallel_peer import (
    PEER,
    Collectives,
    Logits,
    SavedBytes,
    Shape,
    cases_of,
    kind_of,
    ring_bytes,
)
from hf_actswap.planner import CountingMeter

SHAPE = Shape(hidden=64, inner=96, heads=4, kv_heads=2, layers=2, vocabulary=320, length=32)
TINY = [part for name, value in vars(SHAPE).items() for part in (f"--{name}", str(value))]
HIDDEN_BYTES = SHAPE.batch * SHAPE.length * SHAPE.hidden * 4
"""A hidden state of the whole sequence in float32."""

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one small run of the command wrote."""
    path = tmp_path_factory.mktemp("peer") / "peer.json"
    told = ["--rounds", "1", "--warmup", "1", "--out", str(path), *TINY]
    assert parallel_peer.main(told) == 0
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def row_of(rows: Rows, case: str, dtype: str = "float32") -> dict[str, Any]:
    (found,) = (row for row in rows if (row["case"], row["dtype"], row["rank"]) == (case, dtype, 0))
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_claims_hold_and_every_row_is_there(document: dict[str, Any]) -> None:
    assert document["failures"] == []
    rows = document["rows"]
    names = [(case.name, kind) for kind in ("float32", "bfloat16") for case in cases_of(getattr(torch, kind))]
    assert [(row["case"], row["dtype"]) for row in rows] == 2 * names
    peer = row_of(rows, PEER)
    assert peer["calls"]["forward all_reduce"] == 2 * SHAPE.layers + 1  # DTensor's are seen
    assert peer["whole_bytes"]["forward all_reduce"] == (2 * SHAPE.layers + 1) * HIDDEN_BYTES
    ours = row_of(rows, "hf_actswap tp + sp")
    assert ours["calls"]["backward re-gather"] == 2 * SHAPE.layers + 1
    assert ours["regathered_bytes"] == (2 * SHAPE.layers + 1) * HIDDEN_BYTES // 2
    logits_bytes = SHAPE.batch * SHAPE.length * SHAPE.vocabulary * 4
    assert peer["peak_logits_bytes"] >= 2 * logits_bytes
    assert ours["peak_logits_bytes"] <= 2 * logits_bytes


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "words"),
    [("saved_bytes", "saves"), ("sent_bytes", "sends"), ("loss", "loss"), ("grad_norm", "norm")],
)
def test_a_row_that_is_not_as_claimed_is_told(document: dict[str, Any], key: str, words: str) -> None:
    rows = [dict(row) for row in document["rows"]]
    row_of(rows, "hf_actswap tp + sp")[key] *= 10
    (told,) = parallel_peer.failures(rows)
    assert told.startswith("hf_actswap tp + sp, float32, rank 0")
    assert words in told


def test_a_ring() -> None:
    assert ring_bytes("all_gather", 800, 8) == ring_bytes("reduce_scatter", 800, 8) == 700
    assert ring_bytes("all_reduce", 800, 8) == 1400


def test_which_operators_are_collectives() -> None:
    kinds = {
        torch.ops._c10d_functional.all_reduce.default: "all_reduce",
        torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
        torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
        torch.ops.c10d.allreduce_.default: "all_reduce",
        torch.ops.c10d._allgather_base_.default: "all_gather",
        torch.ops.c10d._reduce_scatter_base_.default: "reduce_scatter",
        torch.ops._c10d_functional.wait_tensor.default: None,
        torch.ops.aten.mm.default: None,
    }
    assert {operator: kind_of(operator) for operator in kinds} == kinds


def test_saved_and_peak_bytes_of_a_product() -> None:
    """A storage counts once, a parameter not at all; what died counts no more."""
    weight = torch.nn.Parameter(torch.ones(8, 16))
    saved, x = SavedBytes([weight]), torch.ones(4, 8, requires_grad=True)
    with saved.hooks(), CountingMeter() as meter, Logits({16}) as logits, Collectives() as none:
        y = x @ weight
        z = (y * y).sum()
    assert saved.total_bytes() == x.nbytes + y.nbytes
    assert logits.meter.peak_bytes() == 2 * y.nbytes
    assert meter.peak_bytes() == 2 * y.nbytes + z.nbytes
    assert not none.calls
