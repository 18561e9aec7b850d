"""Many steps, and nothing grows: no tensor, no storage, no host memory, no ticket."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hf_actswap.engine import AppliedPlan
from hf_actswap.engine.forward_pass import CachedTrace, CachedTraces, Segment
from tests.engine.tiny_models import (
    NUM_LAYERS,
    batch,
    on,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.quick_cases import quick_first
from tests.rehearsed import on_gpu

MIB = 2**20
PLANS = {
    "swap, cached traces": swap_everything(5),
    "swap and recompute": plan_of(
        *recompute_rows(["mlp"], [0, 3]),
        *recompute_rows(["mlp.mul", "mlp.act_fn.silu"], [1]),
        *swap_rows(["self_attn", "output"], range(NUM_LAYERS), 5),
        *swap_rows(["mlp"], [2], 5),
    ),
    "layers recomputed, inputs swapped": plan_of(
        *recompute_rows([""], range(NUM_LAYERS)), *swap_rows(["output"], range(NUM_LAYERS), 5)
    ),
}


@dataclass(frozen=True)
class Memory:
    """What lives between two steps.

    Args:
        tensors: Python's.
        storages_bytes: distinct storages of these.
        pool_bytes: host memory held.
        live: swapped storages, and host bytes in use.
        device_bytes: what the device's allocator has handed out.
        objects: of the package, by the garbage collector's count.
        resident_bytes: of the process; noisy, hence not compared exactly.
    """

    tensors: int
    storages_bytes: int
    pool_bytes: int
    live: tuple[int, int]
    device_bytes: int
    objects: int
    resident_bytes: int


def measure(applied: AppliedPlan) -> Memory:
    """Measure, after a collection; asking for the statistics adds up the waits that are still listed."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        torch.accelerator.synchronize(accelerator)  # a copy that still runs holds its source
    stats = applied.stats()
    gc.collect()
    alive = gc.get_objects()
    real = (torch.Tensor, torch.nn.Parameter)  # other tests may have left fake ones, which have no memory
    found = [one for one in alive if type(one) in real]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}
    ours = sum(str(type(one).__module__).startswith("hf_actswap") for one in alive)
    return Memory(
        len(found),
        sum(storages.values()),
        stats.host_pool_bytes,
        (stats.live_swaps, stats.host_bytes),
        0 if accelerator is None else torch.accelerator.memory_allocated(),
        ours,
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def memory_over(steps: int, plan: str, device: torch.device) -> Iterator[Memory]:
    """Train, and yield what lives after the first tenth of the steps and after the last of them."""
    model = tiny_llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    applied = on(model, PLANS[plan])
    assert applied is not None
    try:
        for step in range(steps):
            ids = batch(step % 7).to(device)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 in (steps // 10, steps):
                del ids
                yield measure(applied)
        stats = applied.stats()
        assert stats.offloads % steps == 0 < stats.offloads
        if "recompute" in plan:
            assert stats.recomputes or plan.startswith("layers")
    finally:
        applied.remove()
    assert applied.stats().host_pool_bytes == 0


def nothing_grows(steps: int, plan: str, device: torch.device) -> None:
    early, late = memory_over(steps, plan, device)
    exact = ("tensors", "storages_bytes", "pool_bytes", "live", "device_bytes", "objects")
    assert {name: getattr(late, name) for name in exact} == {name: getattr(early, name) for name in exact}
    assert late.live == (0, 0)
    assert late.pool_bytes > 0
    # A leak of a byte for each byte swapped in a step would be several times as much.
    assert late.resident_bytes - early.resident_bytes < 8 * MIB, (early, late)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("plan", quick_first(PLANS, 1))
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_grows_over_the_steps(steps: int, plan: str) -> None:
    nothing_grows(steps, plan, torch.device("cpu"))


def test_a_device_is_waited_for_before_its_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _device: asked.append("synchronize"))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: asked.append("read") or 7)
    with on(tiny_llama(), swap_everything(5)) as applied:
        assert measure(applied).device_bytes == 7
    assert asked == ["synchronize", "read"]


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_grows_on_a_device(plan: str) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    nothing_grows(on_gpu(1000, 100), plan, device)


def test_cached_traces_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first plan would not try what its name says."""
    found: list[bool] = []
    look = CachedTraces.__getitem__

    def spy(traces: CachedTraces, segment: Segment) -> CachedTrace | None:
        trace = look(traces, segment)
        found.append(trace is not None)
        return trace

    monkeypatch.setattr(CachedTraces, "__getitem__", spy)
    tuple(memory_over(10, "swap, cached traces", torch.device("cpu")))
    assert found.count(True) > found.count(False)
