"""Available host memory and processors next to a device, read from made-up /proc, cgroup and /sys trees."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_actswap.engine.host_memory import (
    available_bytes,
    bind,
    bind_rank,
    bound_to,
    budget_bytes,
    cpus_of,
    forecast,
    locked_memory_limit,
    margin_bytes,
    node_of,
    parse_cpulist,
    ranks_on_this_machine,
    room_beyond,
    usable_cpus,
)

GIB = 2**30
SIZES = st.integers(0, 2**50)


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def proc_of(tmp_path: Path, available_kib: int, cgroup: str) -> Path:
    written(
        tmp_path / "proc" / "meminfo", f"MemTotal:  99 kB\nMemAvailable:   {available_kib} kB\nCached: 1 kB\n"
    )
    written(tmp_path / "proc" / "self" / "cgroup", cgroup)
    return tmp_path / "proc"


def version_2(folder: Path, limit: str, current: int, inactive_file: int) -> None:
    written(folder / "memory.max", f"{limit}\n")
    written(folder / "memory.current", f"{current}\n")
    written(folder / "memory.stat", f"anon 5\ninactive_file {inactive_file}\nactive_file 9\n")


def version_1(folder: Path, limit: int, usage: int, inactive_file: int) -> None:
    written(folder / "memory.limit_in_bytes", f"{limit}\n")
    written(folder / "memory.usage_in_bytes", f"{usage}\n")
    written(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_the_machine_alone(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, 1000, "0::/\n")
    assert available_bytes(proc, tmp_path / "cgroup") == 1000 * 1024


def test_nothing_tells(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("leaf", "parent", "expected"),
    [
        (("700000", 300000, 0), ("max", 0, 0), 400000),
        (("700000", 300000, 50000), ("max", 0, 0), 450000),
        (("max", 300000, 0), ("500000", 300000, 1000), 201000),
        (("700000", 300000, 0), ("500000", 300000, 0), 200000),
        (("700000", 800000, 0), ("max", 0, 0), 0),
        (("max", 1, 1), ("max", 1, 1), 1000 * 1024),
    ],
)
def test_cgroup_version_2_and_its_ancestors(
    tmp_path: Path, leaf: tuple[str, int, int], parent: tuple[str, int, int], expected: int
) -> None:
    proc = proc_of(tmp_path, 1000, "0::/jobs/mine\n")
    version_2(tmp_path / "cgroup" / "jobs" / "mine", *leaf)
    version_2(tmp_path / "cgroup" / "jobs", *parent)
    assert available_bytes(proc, tmp_path / "cgroup") == expected


def test_in_a_container_the_mount_itself_is_our_cgroup(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, 1000, "0::/../../elsewhere\n")
    version_2(tmp_path / "cgroup", "9000", 4000, 0)
    assert available_bytes(proc, tmp_path / "cgroup") == 5000


@pytest.mark.parametrize("path", ["/docker/abc", "/not/mounted"])
def test_cgroup_version_1(tmp_path: Path, path: str) -> None:
    proc = proc_of(tmp_path, 1000, f"5:cpu,cpuacct:{path}\n4:hugetlb,memory:{path}\n0::/\n")
    version_1(tmp_path / "cgroup" / "memory", 9223372036854771712, 7, 0)
    assert available_bytes(proc, tmp_path / "cgroup") == 1000 * 1024
    version_1(tmp_path / "cgroup" / "memory" / "docker" / "abc", 6000, 2000, 100)
    assert available_bytes(proc, tmp_path / "cgroup") == (4100 if path == "/docker/abc" else 1000 * 1024)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_this_machine() -> None:
    available = available_bytes()
    assert available is not None
    assert 0 < available < 2**50


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [({}, 1), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"LOCAL_WORLD_SIZE": "0"}, 1), ({"LOCAL_WORLD_SIZE": "x"}, 1)],
)
def test_ranks(environment: dict[str, str], ranks: int) -> None:
    assert ranks_on_this_machine(environment) == ranks


@pytest.mark.parametrize(
    ("cap", "ranks", "available", "expected"),
    [
        (None, 1, 1000, 900),
        (None, 4, 1000, 225),
        (100, 4, 1000, 100),
        (500, 4, 1000, 225),
        (500, 4, None, 500),
        (None, 4, None, None),
    ],
)
def test_budget(cap: int | None, ranks: int, available: int | None, expected: int | None) -> None:
    assert budget_bytes(cap, ranks, available) == expected


@given(SIZES, st.none() | SIZES, st.integers(1, 16), SIZES)
def test_what_fits_leaves_the_margin(need: int, cap: int | None, ranks: int, available: int) -> None:
    fits, _ = forecast(need, cap, ranks, available)
    within = ranks * need <= available - margin_bytes(available)
    assert fits == (within and (cap is None or need <= cap))


@pytest.mark.parametrize(
    ("need", "cap", "ranks", "available", "fits", "message"),
    [
        (
            7 * GIB,
            None,
            1,
            9 * GIB,
            True,
            "Swap needs 1 rank x 7.0 GiB of host memory; the machine has 9.0 GiB free.",
        ),
        (7 * GIB, 8 * GIB, 2, None, True, "Swap needs 2 ranks x 7.0 GiB = 14.0 GiB of host memory."),
        (
            7 * GIB,
            4 * GIB,
            8,
            100 * GIB,
            False,
            "Swap needs 8 ranks x 7.0 GiB = 56.0 GiB of host memory, and a rank may take 4.0 GiB "
            "(host_memory_gib; the machine has 100.0 GiB free). Raise host_memory_gib or swap fewer layers.",
        ),
        (
            30 * GIB,
            60 * GIB,
            8,
            200 * GIB,
            False,
            "Swap needs 8 ranks x 30.0 GiB = 240.0 GiB of host memory, and a rank may take 22.5 GiB "
            "(200.0 GiB free on the machine, 10% of it left to others). Swap fewer layers, or start fewer "
            "ranks on this machine; host_memory_gib cannot exceed this.",
        ),
    ],
)
def test_forecast(
    need: int, cap: int | None, ranks: int, available: int | None, fits: bool, message: str
) -> None:
    assert forecast(need, cap, ranks, available) == (fits, message)


def test_room_is_read_again_each_time() -> None:
    readings = [100, 30, None]
    room = room_beyond(40, lambda: readings.pop(0))
    assert [room(), room(), room()] == [60, -10, sys.maxsize]


def test_limit_of_locked_memory_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 * 1024, -1))
    assert locked_memory_limit() == "RLIMIT_MEMLOCK is 64 KiB"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, -1))
    assert locked_memory_limit() == "RLIMIT_MEMLOCK is unlimited"


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
    [
        *[("", set()), ("3\n", {3}), ("0-2,8", {0, 1, 2, 8}), ("0-1,4-5,7\n", {0, 1, 4, 5, 7})],
        *[("a", None), ("-3", None), ("0x3", None)],
    ],
)
def test_cpulist(text: str, expected: set[int] | None) -> None:
    if expected is not None:
        assert parse_cpulist(text) == expected
        return
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
