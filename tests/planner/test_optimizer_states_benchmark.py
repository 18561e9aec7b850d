"""The benchmark runs where there is no accelerator, and its cases train to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.optimizer_states import CASES, PLAIN, SHARES, SYNCHRONOUS, main


def test_on_the_cpu(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        out = tmp_path / "result.json"
        assert main(["--device", "cpu", "--steps", "2", "--micro-batches", "2", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(before)
    rows = json.loads(out.read_text())
    assert [row["case"] for row in rows] == list(CASES)
    for row in rows:
        assert row["step_ms"] > row["optimizer_ms"] > 0
        assert row["state_bytes"] > 0
        if row["case"] in SHARES:
            assert row["moved_bytes"] >= 1.8 * row["state_bytes"]
            assert row["stall_ms"] > 0
        assert row["freed_share"] == {PLAIN: 0.0, SYNCHRONOUS: 1.0}.get(row["case"], row["freed_share"])
        assert row["case"] == PLAIN or row["freed_share"] >= 0.9
