"""Processors next to a device, read from a made-up /sys."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_actswap.engine.host_memory import (
    bind,
    bind_rank,
    bound_to,
    cpus_of,
    node_of,
    parse_cpulist,
    usable_cpus,
)

GPU = torch.device("cuda", 1)
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
needs_two = pytest.mark.skipif(len(usable_cpus()) < 2, reason="needs two processors")


def properties(_device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)


def machine(root: Path, cpulists: list[str], node_of_gpu: str = "1") -> Path:
    for number, cpulist in enumerate(cpulists):
        node = root / "devices" / "system" / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpulist}\n")
    gpu = root / "bus" / "pci" / "devices" / "0000:c1:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{node_of_gpu}\n")
    return root


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", set()), ("3\n", {3}), ("0-2,8", {0, 1, 2, 8}), ("0-1,4-5,7\n", {0, 1, 4, 5, 7})],
)
def test_cpulist(text: str, expected: set[int]) -> None:
    assert parse_cpulist(text) == expected


@pytest.mark.parametrize("text", ["a", "-3", "0x3"])
def test_not_a_cpulist(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpulist(text)


@pytest.mark.parametrize(
    ("cpulists", "numa_node", "expected"),
    [(["0-1", "2-3"], "1", 1), (["0-1", "2-3"], "0", 0), (["0-1", "2-3"], "-1", None), (["0-3"], "0", None)],
)
def test_node_of_a_gpu(tmp_path: Path, cpulists: list[str], numa_node: str, expected: int | None) -> None:
    assert node_of(GPU, machine(tmp_path, cpulists, numa_node), properties) == expected


def test_node_is_unknown_without_an_address_or_a_file(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0", "1"])
    assert node_of(torch.device("cpu"), root, properties) is None
    assert node_of(torch.device("xpu", 0), root, properties) is None
    assert node_of(GPU, root, lambda _device: SimpleNamespace(name="old")) is None
    elsewhere = SimpleNamespace(pci_domain_id=1, pci_bus_id=2, pci_device_id=3)
    assert node_of(GPU, root, lambda _device: elsewhere) is None
    assert node_of(GPU, tmp_path / "nowhere", properties) is None


def test_cpus_are_those_we_may_use(tmp_path: Path) -> None:
    one = min(usable_cpus())
    root = machine(tmp_path, [f"{one},4000-4095", "4000", "nonsense"])
    assert cpus_of(0, root) == {one}
    assert cpus_of(1, root) == cpus_of(2, root) == cpus_of(3, root) == frozenset()


@needs_affinity
@needs_two
def test_bind_rank_and_undo(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, one = os.sched_getaffinity(0), min(usable_cpus())
    with caplog.at_level(logging.INFO):
        undo = bind_rank(GPU, machine(tmp_path, ["4000", str(one)]), properties)
    try:
        assert os.sched_getaffinity(0) == {one}
    finally:
        undo()
    assert os.sched_getaffinity(0) == before
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "INFO",
            "Bound to the 1 processors of NUMA node 1, next to cuda:1; "
            "memory: {bind_numa: false} switches it off.",
        )
    ]


@needs_affinity
@pytest.mark.parametrize(
    "cpulists",
    [["0-4095"], ["0", "4000"], ["4000", "0-4095"]],
    ids=["one node", "not ours", "all of ours"],
)
def test_bind_rank_does_nothing(
    tmp_path: Path, cpulists: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.INFO):
        bind_rank(GPU, machine(tmp_path, cpulists), properties)()
    assert os.sched_getaffinity(0) == before
    assert caplog.records == []


@needs_affinity
def test_undo_reaches_the_bound_thread_from_another() -> None:
    before, one = os.sched_getaffinity(0), frozenset({min(usable_cpus())})
    undo = bind(one)
    other = threading.Thread(target=undo)
    other.start()
    other.join()
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_processors_that_are_gone_bind_nothing() -> None:
    before = os.sched_getaffinity(0)
    bind(frozenset({4095}))()
    with bound_to(frozenset()):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_bound_to_ends_with_the_block_also_after_an_error() -> None:
    before, one = os.sched_getaffinity(0), frozenset({min(usable_cpus())})

    def fail() -> None:
        with bound_to(one):
            assert os.sched_getaffinity(0) == one
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.sched_getaffinity(0) == before
