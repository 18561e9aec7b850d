"""The overhead benchmark measures what it says: every case saves and swaps what its name promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.overhead import (
    CASES,
    IDENTITY,
    LAYERS,
    NOTHING,
    OPS_PER_MODULE,
    Row,
    compare_chains,
    main,
    measure,
)

CHAIN_TENSORS = 2 * LAYERS * OPS_PER_MODULE


def test_each_case_saves_the_same_and_swaps_what_it_says() -> None:
    """Nothing without gradients; and ratios are to identity hooks, but where noise makes them negative."""
    chain = {row.case: row for row in measure("chain", 2, torch.device("cpu"))}
    assert list(chain) == [case.name for case in CASES]
    assert {(row.saved_tensors, row.passes_in_no_grad) for row in chain.values()} == {(CHAIN_TENSORS, 0)}
    assert (chain[NOTHING].us, chain[NOTHING].ratio_to_identity) == (0, None)
    assert chain[IDENTITY].ratio_to_identity in (1, None)
    for name, row in chain.items():
        # all but the first, which comes from outside the layers
        assert row.offloads == (CHAIN_TENSORS - 1 if name.startswith("swap") else 0), name
        if row.ratio_to_identity is not None:
            assert row.us_at_reference == pytest.approx(row.us_lowest / chain[IDENTITY].us_lowest * 0.9)


def test_what_the_calls_of_layers_take_is_not_in_what_further_tensors_take() -> None:
    def rows(workload: str, tensors: int) -> list[Row]:
        calls_us, tensor_us = {IDENTITY: 0.0, "keep": 60.0}, {IDENTITY: 0.45, "keep": 0.8}
        return [
            Row(workload, case, tensors, us_lowest=calls_us[case] / tensors + tensor_us[case])
            for case in calls_us
        ]

    found = [*rows("chain", 100), *rows("long chain", 300), *rows("llama", 50)]
    compare_chains(found)
    further = [row.further_us for row in found]
    assert further == [None, None, pytest.approx(0.9), pytest.approx(1.6), None, None]


def test_the_command_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert main(["--workload", "llama", "--rounds", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert [row["case"] for row in rows] == [case.name for case in CASES]
    assert all(row["device"] == "cpu" and row["environment"]["versions"]["torch"] for row in rows)
    assert "llama: " in capsys.readouterr().out
