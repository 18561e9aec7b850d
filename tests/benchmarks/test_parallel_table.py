"""The paper table's formulas give the bytes that small patched models really hold and communicate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import parallel_table
from benchmarks.parallel_peer import REGATHER, ring_bytes
from benchmarks.parallel_table import (
    LLAMA_3_70B,
    Setting,
    parameters_of_rank,
    saved_bytes_of_layer,
    tensor_axis_bytes,
)
from tests.benchmarks.parallel_table_worker import CASES, RANKS, Counted, run_on_rank
from tests.processes import launched, result

LIMIT_S = 150
PARAMETERS_OF_LLAMA_3_70B = 70_553_706_496
"""As Hugging Face's page of the model counts its safetensors."""


counted = launched(run_on_rank, RANKS, LIMIT_S)


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_formulas_are_what_is_counted(name: str, counted: Path) -> None:
    model, setting = CASES[name].model, CASES[name].setting
    for rank in range(RANKS):
        found: Counted = result(counted, name, rank)
        assert found.parameters == sum(parameters_of_rank(model, setting))
        assert found.layer_bytes == saved_bytes_of_layer(model, setting)
        assert found.collective_bytes == tensor_axis_bytes(model, setting)


def test_parameters_of_the_real_model() -> None:
    """All ranks together hold it once, norms as often as there are ranks."""
    assert sum(parameters_of_rank(LLAMA_3_70B, Setting(1))) == PARAMETERS_OF_LLAMA_3_70B
    parts, whole = parameters_of_rank(LLAMA_3_70B, Setting(8))
    assert 8 * parts + whole == PARAMETERS_OF_LLAMA_3_70B


def test_saved_shards_are_worth_what_the_gathered_inputs_have_more() -> None:
    setting = Setting(8)
    more = saved_bytes_of_layer(LLAMA_3_70B, setting, False) - saved_bytes_of_layer(LLAMA_3_70B, setting)
    assert more == 2 * setting.tokens * LLAMA_3_70B.hidden * setting.size_bytes * 7 // 8


def test_a_ring_of_the_two_kinds_is_an_all_reduce() -> None:
    """Sequence parallelism sends what tensor parallelism sends, but for the re-gather and the wider sums."""
    lean = Setting(8, reduce_bytes=2)
    for setting in (lean, replace(lean, sequence_parallel=False)):
        moved = tensor_axis_bytes(LLAMA_3_70B, setting)
        sums = sum(ring_bytes(kind, size, 8) for (_, kind), size in moved.items() if kind != REGATHER)
        layer = 4 * ring_bytes("all_reduce", setting.tokens * LLAMA_3_70B.hidden * 2, 8)
        assert sums == pytest.approx(LLAMA_3_70B.layers * layer, rel=0.02)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    assert parallel_table.main(["--out", str(path)]) == 0
    parts = json.loads(path.read_text(encoding="utf-8"))["gib"]
    assert "64 ranks on 8 nodes: tp 8, dp 8" in capsys.readouterr().out
    whole, sharded = (parts[name]["together"] for name in list(parts)[:2])
    assert whole == pytest.approx(8 * sharded)
    with pytest.raises(SystemExit):
        parallel_table.main(["--tensor_parallel_size", "3"])
