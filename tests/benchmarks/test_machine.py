"""What is recorded of the machine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.records import hardware, link_gb_per_s
from hf_actswap.engine import Link


def test_the_rates_of_a_link_in_gb_per_s() -> None:
    link = Link(54.9e6, 55.1e6, 49.8e6, 49.5e6, latency_ms=0.5)
    assert link_gb_per_s(link) == pytest.approx(
        {"out": 54.9, "in": 55.1, "out_beside_in": 49.8, "in_beside_out": 49.5}
    )


def test_a_cpu_has_no_link() -> None:
    found = hardware(torch.device("cpu"))
    assert "link_gb_per_s" not in found
    assert found["memory_bytes"] > 2**20
    assert found["name"]


@pytest.mark.gpu
def test_an_accelerator_tells_its_link() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    found = hardware(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    assert set(found["link_gb_per_s"]) == {"out", "in", "out_beside_in", "in_beside_out"}
    assert min(found["link_gb_per_s"].values()) > 0.1
