"""The same promises on an accelerator: streams, events, device memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.exactness import deterministic
from hf_actswap import MemoryPlan
from hf_actswap.engine.verify import Verifier
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    assert_bitwise_equal,
    gradients,
    on,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.rehearsed import on_gpu, skip_times

pytestmark = pytest.mark.gpu

BATCH, LENGTH, HIDDEN, INNER = on_gpu((4, 512, 256, 512), (2, 128, 128, 256))
PLANS: dict[str, MemoryPlan | str] = {
    **CASES,
    "everything swapped": swap_everything(20),
    "no lead": swap_everything(0),
    "functions recomputed": plan_of(
        *recompute_rows(["mlp.mul", "mlp.act_fn.silu", "self_attn.flash_attention"], range(NUM_LAYERS))
    ),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))


@pytest.fixture(autouse=True)
def _deterministic() -> object:
    with deterministic():
        yield


def device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def small_llama() -> nn.Module:
    """A Llama of 4 layers, hidden 256, bf16, on the accelerator."""
    return tiny_llama(torch.bfloat16, hidden_size=HIDDEN, intermediate_size=INNER).to(device())


def forward(model: nn.Module, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (BATCH, LENGTH), generator=generator).to(device())
    return model(input_ids=ids, labels=ids).loss


def gradients_of(model: nn.Module, step: int = 0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    forward(model, step).backward()
    return gradients(model)


@every_plan
def test_gradients_are_bitwise_equal(plan: MemoryPlan | str) -> None:
    model = small_llama()
    bare = [gradients_of(model, step) for step in range(3)]
    with on(model, plan) as applied:
        for step in range(3):
            assert_bitwise_equal(gradients_of(model, step), bare[step])
        stats = applied.stats()
        assert stats.offloaded_bytes == stats.prefetched_bytes
        assert (stats.live_swaps, stats.host_bytes) == (0, 0)


@every_plan
def test_two_backwards_over_one_graph(plan: MemoryPlan | str) -> None:
    model = small_llama()
    bare = gradients_of(model)
    on(model, plan)
    model.zero_grad()
    loss = forward(model)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_bitwise_equal(gradients(model), {name: grad + grad for name, grad in bare.items()})


def bytes_between(plan: MemoryPlan | None) -> tuple[int, int]:
    """Device bytes in use that a forward leaves behind, and those copied out; of a second step."""
    model = small_llama()
    applied = on(model, plan) if plan is not None else None
    gradients_of(model)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    loss = forward(model)
    torch.accelerator.synchronize()
    held = torch.accelerator.memory_allocated() - before
    offloaded = applied.stats().offloaded_bytes // 2 if applied is not None else 0
    loss.backward()
    return held, offloaded


@pytest.mark.parametrize(
    "plan", [plan_of(*swap_rows(["self_attn.flash_attention"], range(NUM_LAYERS))), swap_everything()]
)
def test_device_memory_falls_by_what_was_copied_out(plan: MemoryPlan) -> None:
    bare, _ = bytes_between(None)
    held, _ = bytes_between(plan)
    model = small_llama()
    applied = on(model, plan)
    gradients_of(model)
    offloaded = applied.stats().offloaded_bytes
    assert offloaded > 0
    assert bare - held == pytest.approx(offloaded, rel=0.05)  # the allocator rounds each block up


def test_waits_are_counted_as_stalls() -> None:
    skip_times()
    model = small_llama()
    applied = on(model, swap_everything(0))
    for step in range(3):
        gradients_of(model, step)
    torch.accelerator.synchronize()
    stats = applied.stats()
    least = on_gpu(1, 0)  # a rehearsal's host may be slower than the device
    assert least <= stats.stalls <= stats.offloads + stats.prefetches
    assert (stats.stall_ms > 0) == (stats.stalls > 0)


def test_blocks_of_a_graph_that_died_are_not_written_afterwards() -> None:
    """A reload still on its way when its graph dies must not land in somebody else's block."""
    model = small_llama()
    bare = gradients_of(model, 1)
    applied = on(model, swap_everything(100_000))
    for _ in range(5):
        loss = forward(model)
        last = model.model.layers[-1].mlp.down_proj.weight
        torch.autograd.grad(loss, last)  # everything is on its way back, little of it is read
        del loss
        assert_bitwise_equal(gradients_of(model, 1), bare)
    stats = applied.stats()
    assert (stats.live_swaps, stats.host_bytes) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_checksums_need_no_copy_of_a_tensor(dtype: torch.dtype) -> None:
    """The first step under a plan makes them where the plan has given the memory away."""
    whole = torch.zeros(2, 1024, 8192, dtype=dtype, device=device())
    for tensor in (whole, whole.unflatten(2, (8, 1024)).transpose(1, 2), whole[:, :, 4096:]):
        verifier = Verifier("first")
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        verifier.checksum(tensor)
        needed = torch.accelerator.max_memory_allocated() - before
        assert needed < tensor.nbytes / 8, (tensor.shape, needed)
