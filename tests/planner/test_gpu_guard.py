"""Out-of-memory survived where the accelerator's own allocator rejects: the first step of a stack."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.exactness import deterministic
from hf_actswap.engine import EvictableTensors, HostPool, PinnedSlabs
from hf_actswap.engine.tickets import restore
from hf_actswap.planner import AllocatorMeter, OomGuard
from hf_actswap.planner.oom_guard import guard_compiled
from tests.engine.gpu_stress import SEGMENT_BYTES
from tests.rehearsed import on_gpu, skip_compiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
DEPTH, WIDTH, TOKENS = on_gpu((24, 4096, 16384), (12, 4096, 16384))
BEYOND_BYTES = on_gpu(0, SEGMENT_BYTES)
"""With half of the layers the limit falls inside of a segment, which the allocator takes whole."""
DEVICE = torch.device("cuda", 0)


class Block(nn.Module):
    """A product and an activation, as much saved as computed."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(nn.functional.silu(self.linear(x)))


def stack(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    with DEVICE:
        return nn.Sequential(*[Block(dropout) for _ in range(DEPTH)]).to(torch.bfloat16)


def tokens() -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(TOKENS, WIDTH, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def step(model: nn.Module, x: torch.Tensor, idle: EvictableTensors | None) -> list[torch.Tensor]:
    """Return the gradients, on the host."""
    torch.manual_seed(3)
    saving = nullcontext() if idle is None else saved_tensors_hooks(lambda t: idle.keep(t.detach()), restore)
    with saving:
        loss = model(x).float().pow(2).mean()
    loss.backward()
    return [item.grad.cpu() for item in model.parameters() if item.grad is not None]


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with deterministic(fill=False):
        yield
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    gc.collect()
    torch.cuda.empty_cache()


def free_step(dropout: float) -> tuple[list[torch.Tensor], int]:
    model, x = stack(dropout), tokens()
    expected = step(model, x, None)
    return expected, torch.cuda.max_memory_reserved(DEVICE)


def limit_to(limit_bytes: float) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _, total_bytes = torch.cuda.mem_get_info(DEVICE)
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, DEVICE)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_first_step_survives(dropout: float, pinned: bool) -> None:
    expected, peak = free_step(dropout)
    pool = HostPool(PinnedSlabs(DEVICE)) if pinned else None
    for fraction in (0.8, 0.6, 0.5):
        limit_to(fraction * peak)
        model, x = stack(dropout), tokens()
        meter, idle = AllocatorMeter(DEVICE), EvictableTensors(DEVICE, pool)
        assert meter.limit_bytes() <= fraction * peak
        guard = OomGuard(meter, idle)
        guard.start()
        try:
            found = step(model, x, idle)
        finally:
            guard.stop()
        assert all(map(torch.equal, found, expected))
        assert len(found) == DEPTH
        assert guard.caught > 0
        assert torch.cuda.max_memory_reserved(DEVICE) <= fraction * peak + BEYOND_BYTES
        assert idle.evicted_bytes > 0
        assert not idle._known
        del model, x, found
    if pool is not None:
        assert pool.used_bytes == 0
        pool.close()


def test_the_plain_step_fails() -> None:
    """The limit means something."""
    _, peak = free_step(0.0)
    limit_to(0.8 * peak)
    model, x = stack(0.0), tokens()
    with pytest.raises(torch.OutOfMemoryError):
        step(model, x, None)


def test_where_nothing_helps_the_error_says_so() -> None:
    _, peak = free_step(0.0)
    limit_to(0.3 * peak)
    model, x = stack(0.0), tokens()
    idle = EvictableTensors(DEVICE)
    guard = OomGuard(AllocatorMeter(DEVICE), idle)
    guard.start()
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Nothing idle is left to evict"):
            step(model, x, idle)
    finally:
        guard.stop()
    assert 0.3 * peak < guard.least_budget_bytes < peak
    del model


def test_compiled_layers_survive() -> None:
    skip_compiled()

    def make() -> nn.Sequential:
        model = stack(0.0)
        for block in model:
            block.compile()
        return model

    model, x = make(), tokens()
    expected = step(model, x, None)
    peak = torch.cuda.max_memory_reserved(DEVICE)
    del model, x
    limit_to(0.7 * peak)
    model, x = make(), tokens()
    idle = EvictableTensors(DEVICE)
    guard = OomGuard(AllocatorMeter(DEVICE), idle)
    undo = guard_compiled(guard, model)
    guard.start()
    try:
        found = step(model, x, idle)
    finally:
        guard.stop()
        for undone in undo:
            undone()
    assert all(map(torch.equal, found, expected))
    assert guard.caught + guard.made_room > 0
