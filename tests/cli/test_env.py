"""``env`` on machines that are described here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_actswap.cli import env
from hf_actswap.engine import Link
from hf_actswap.version import __version__

from .conftest import Run


def test_what_is_here(run: Run) -> None:
    found = run("env", "--json").document
    assert found["ok"] is True
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["hf_actswap"] == __version__
    assert (
        found["host_per_rank_bytes"] is None or found["host_per_rank_bytes"] < found["host_available_bytes"]
    )
    text = run("env").out
    assert max(map(len, text.splitlines())) <= 80


def test_a_machine_with_a_device(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Properties:
        name = "NVIDIA H200"
        total_memory = 150 * 2**30

    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30 2025\nGCC version:\n"
    )
    link = Link(54.9e6, 55.1e6, 49.8e6, 49.7e6)
    measured: list[Any] = []
    monkeypatch.setattr(env, "_DRIVER", driver)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr(env, "node_of", lambda device: device.index)
    monkeypatch.setattr(env, "measure_link", lambda device: measured.append(device) or link)
    text = run("env").out
    assert measured == []
    assert "NVIDIA 570.133.20" in text
    assert "NVIDIA H200, 150.00 GiB, NUMA node 1" in text
    text = run("env", "--measure-link").out
    assert measured == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert text.count("54.9 GB/s out, 55.1 back, 49.8 and 49.7 at once") == 2
    assert run("env", "--measure-link", "--json").document["devices"][1]["link"]["in_bytes_per_ms"] == 55.1e6
