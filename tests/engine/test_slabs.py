"""Page-locking, driven by a runtime that does what the test says."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch

from hf_actswap.engine import HostPool, PageableSlabs, PinnedSlabs
from hf_actswap.engine.host_memory import locked_memory_limit, usable_cpus
from hf_actswap.engine.host_pool import mapped

MIB = 2**20
CPU = torch.device("cpu")


class FakeCudart:
    """Locks memory in a table.

    Args:
        fails_at: number of the call that fails.
        raises: it fails by an exception, not by a code.
    """

    def __init__(self, fails_at: int | None = None, raises: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.calls = 0
        self.unlock_code = 0
        self._fails_at, self._raises = fails_at, raises

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.calls += 1
        self.threads.add(threading.get_ident())
        if self.calls - 1 == self._fails_at:
            if self._raises:
                raise RuntimeError("CUDA error: out of memory\nand much more")
            return 2
        assert flags == 0
        self.locked[pointer] = size
        self.events.append(f"lock {size}")
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.events.append(f"unlock {self.locked.pop(pointer)}")
        return self.unlock_code

    def synchronize(self) -> None:
        self.events.append("synchronize")


def pinned(cudart: FakeCudart) -> PinnedSlabs:
    return PinnedSlabs(CPU, usable_cpus(), cudart, cudart.synchronize)


def test_pageable() -> None:
    source = PageableSlabs()
    slab = source.allocate(1001)
    assert (slab.dtype, slab.shape, source.pinned) == (torch.uint8, (1001,), False)
    source.free(slab)


@pytest.mark.parametrize("size_bytes", [1, 4096, 5 * MIB + 3, 33 * MIB])
def test_exact_sizes_are_locked_and_start_on_a_page(size_bytes: int) -> None:
    cudart = FakeCudart()
    slab = pinned(cudart).allocate(size_bytes)
    assert (slab.dtype, slab.shape) == (torch.uint8, (size_bytes,))
    assert cudart.locked == {slab.data_ptr(): size_bytes}
    assert slab.data_ptr() % 4096 == 0
    assert int(slab.count_nonzero()) == 0


def test_locking_runs_on_another_thread() -> None:
    """Where a failure would leave its error code."""
    cudart = FakeCudart()
    pinned(cudart).allocate(MIB)
    assert cudart.threads
    assert threading.get_ident() not in cudart.threads


def test_every_page_is_touched_before_it_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    slab = torch.full((50 * MIB + 7,), 0xA5, dtype=torch.uint8)
    nonzero: list[int] = []
    monkeypatch.setattr("hf_actswap.engine.host_pool.mapped", lambda size_bytes: slab[:size_bytes])
    register = cudart.cudaHostRegister

    def watched(pointer: int, size: int, flags: int) -> int:
        nonzero.append(int(slab[:size].count_nonzero()))
        return register(pointer, size, flags)

    monkeypatch.setattr(cudart, "cudaHostRegister", watched)
    pinned(cudart).allocate(50 * MIB)
    assert nonzero == [0]
    assert slab[50 * MIB :].tolist() == [0xA5] * 7


def test_memory_is_unlocked_after_the_device_has_finished() -> None:
    cudart = FakeCudart()
    source = pinned(cudart)
    source.free(source.allocate(MIB))
    assert cudart.events == [f"lock {MIB}", "synchronize", f"unlock {MIB}"]


def test_memory_that_cannot_be_unlocked_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    cudart = FakeCudart()
    cudart.unlock_code = 1
    source = pinned(cudart)
    source.free(source.allocate(MIB))
    assert [record.getMessage() for record in caplog.records] == [
        f"Could not unlock {MIB} bytes of host memory (error 1)."
    ]


@pytest.mark.parametrize(
    ("raises", "reason"),
    [(False, "cudaHostRegister failed with error 2"), (True, "CUDA error: out of memory")],
)
def test_pageable_memory_once_no_more_can_be_locked(
    raises: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = FakeCudart(fails_at=1, raises=raises)
    source = pinned(cudart)
    with caplog.at_level(logging.WARNING):
        slabs = [source.allocate(MIB) for _ in range(4)]
    assert not source.pinned
    assert cudart.calls == 2
    assert cudart.locked == {slabs[0].data_ptr(): MIB}
    assert [record.getMessage() for record in caplog.records] == [
        f"No more page-locked host memory ({reason}; {locked_memory_limit()}): swapped tensors go to "
        "pageable memory, whose copies do not overlap compute."
    ]
    assert [slab.shape for slab in slabs] == [(MIB,)] * 4
    for slab in slabs:
        slab.fill_(7)
        source.free(slab)
    assert cudart.locked == {}
    assert cudart.events == [f"lock {MIB}", "synchronize", f"unlock {MIB}", *["synchronize"] * 3]


def test_the_pool_frees_locked_memory_with_its_last_block() -> None:
    cudart = FakeCudart()
    pool = HostPool(pinned(cudart), slab_bytes=2 * MIB)
    buffers = [pool.take(MIB) for _ in range(3)]
    assert list(cudart.locked.values()) == [2 * MIB, 2 * MIB]
    pool.close()
    assert len(cudart.locked) == 2
    for buffer in buffers:
        assert buffer is not None
        pool.give_back(buffer)
    assert cudart.locked == {}


def test_a_reservation_that_can_lock_only_half(caplog: pytest.LogCaptureFixture) -> None:
    cudart = FakeCudart(fails_at=2)
    pool = HostPool(pinned(cudart), slab_bytes=MIB)
    pool.reserve(4 * MIB)
    pool.wait_reserved()
    assert (len(cudart.locked), pool.held_bytes) == (2, 4 * MIB)
    assert len(caplog.records) == 1
    buffer = pool.take(4 * MIB)
    for piece in buffer.pieces:
        piece.fill_(1)
    pool.give_back(buffer)
    pool.close()
    assert cudart.locked == {}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pinned memory can be had here")
def test_an_accelerator_without_cudart_asks_torch_and_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    source = PinnedSlabs(torch.device("xpu", 0), synchronize=lambda: None)
    slab = source.allocate(1000)
    assert slab.shape == (1000,)
    assert not source.pinned
    source.free(slab)
    assert source.allocate(10).shape == (10,)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("No more page-locked host memory (")


def test_mapped_memory_lives_as_long_as_a_slice_of_it() -> None:
    piece = mapped(3 * MIB)[MIB : MIB + 10]
    gc.collect()
    piece.fill_(3)
    assert piece.tolist() == [3] * 10


@pytest.mark.gpu
def test_locked_on_a_real_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if device.type != torch.accelerator.current_accelerator().type:  # type: ignore[union-attr]
        pytest.skip("no CUDA runtime")
    source = PinnedSlabs(device)
    slab = source.allocate(3 * MIB + 5)
    assert source.pinned
    assert slab.is_pinned()
    there = torch.arange(251, dtype=torch.uint8, device=device).repeat(100)
    slab[: there.numel()].copy_(there, non_blocking=True)
    torch.accelerator.synchronize(device)
    assert torch.equal(slab[: there.numel()], there.cpu())
    source.free(slab)
    assert not slab.is_pinned()


@pytest.mark.gpu
def test_what_cannot_be_locked_leaves_no_error_behind() -> None:
    """The failed call's code must not surface in the next kernel launch."""
    if torch.accelerator.current_accelerator().type != "cuda":  # type: ignore[union-attr]
        pytest.skip("no CUDA runtime")

    class Rejects:
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> object:
            return torch.cuda.cudart().cudaHostRegister(0, size, flags)

        def cudaHostUnregister(self, pointer: int) -> object:
            return torch.cuda.cudart().cudaHostUnregister(pointer)

    device = torch.device("cuda", torch.cuda.current_device())
    source = PinnedSlabs(device, cudart=Rejects())
    source.allocate(MIB)
    assert not source.pinned
    assert float(torch.ones(10, device=device).sum()) == 10
