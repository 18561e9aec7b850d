"""Pitfalls 3 to 7: several nodes on one storage, views, reused addresses, and who else holds the memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engine.pitfalls.odd_layers import INNER, PassThrough, llama_saving, llama_with, same_gradients
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.spies import WatchingTransfer
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    forward,
    gradients,
    gradients_of_step,
    on,
    one_step,
    plan_of,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.quick_cases import each_value_once

MLP = plan_of(*swap_rows(["mlp"], [1], 5))
WIDE = 2 * 16 * INNER * 4
"""Bytes of what stands between an MLP's linears, fp32."""


@pytest.mark.parametrize("prefetch_ops", [0, 7, 1000])
def test_pitfall_03_one_storage_saved_by_five_nodes_moves_once(prefetch_ops: int) -> None:
    """Catches a copy per node, and a device copy that is dropped at its first reader."""

    def five_readers(x: torch.Tensor) -> torch.Tensor:
        shared = x.exp()  # saved by itself and by each of the functions
        return shared.sin() + shared.cos() * shared + shared.square()

    plan = plan_of(*swap_rows(["mlp.exp"], [1], prefetch_ops))
    stats = same_gradients(lambda: llama_with(five_readers, [1]), plan, steps=1)
    assert (stats.offloads, stats.prefetches) == (1, 1)
    assert stats.offloaded_bytes == WIDE


def test_pitfall_03_the_device_copy_lives_until_its_last_consumer_and_no_longer() -> None:
    """Catches a block freed early (NaN) as well as one that stays for the rest of backward."""
    transfer = WatchingTransfer()
    alive: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        shared = x.exp()
        between = shared.sin()
        between.register_hook(lambda _: _count_alive(transfer, alive))
        shared.register_hook(lambda _: _count_alive(transfer, alive))
        return between * shared

    model = llama_with(function, [1])
    bare = gradients_of_step(model)
    alive.clear()
    on(model, plan_of(*swap_rows(["mlp.exp"], [1], 0)), transfer)
    assert_bitwise_equal(gradients_of_step(model), bare)
    model.model.layers[0].register_full_backward_pre_hook(lambda *_: _count_alive(transfer, alive))
    alive.clear()
    one_step(model)
    assert alive[0] == 1  # the product has read it, sine and exp have not
    assert alive[-1] == 0


def _count_alive(transfer: WatchingTransfer, into: list[int]) -> None:
    into.append(sum(not block.expired() for block in transfer.blocks))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same address, other shape": lambda x: x.flatten(),
    "same address, shorter": lambda x: x[:1],
    "same address, other strides": lambda x: x.as_strided((2, 3), (5, 1)),
    "transposed": lambda x: x.transpose(0, 2),
    "expanded": lambda x: x[:, :1].expand(-1, 16, -1),
    "other dtype": lambda x: x.view(torch.int32),
    "complex": lambda x: torch.view_as_complex(x.unflatten(-1, (24, 2))),
    "last element": lambda x: x.flatten()[-1:],
    "a number": lambda x: x[1, 2, 3],
    "nothing": lambda x: x[:0],
    "every second": lambda x: x[:, ::2],
}


@each_value_once
@pytest.mark.parametrize("prefetch_ops", [0, 1000])
@pytest.mark.parametrize("name", VIEWS)
def test_pitfall_04_a_view_comes_back_with_its_own_geometry(name: str, prefetch_ops: int) -> None:
    """Catches a key of address alone: the whole and its view are saved one after the other."""
    seen: list[torch.Tensor | None] = []
    saved: list[torch.Tensor] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        saved.append(VIEWS[name](x))
        return saved[-1]

    model = llama_saving(make, seen.append)
    mlp = model.model.layers[1].mlp
    inner = mlp.function
    mlp.function = lambda x: inner(x.exp())  # saves the whole of the same storage first
    on(model, plan_of(*swap_rows(["mlp"], [1], prefetch_ops)), RecordingTransfer())
    one_step(model)
    (found,), expected = seen, saved[-1]  # the first are of recordings on fake tensors
    assert found is not expected
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(found, expected)


def test_pitfall_04_a_union_of_views_moves_its_storage_once() -> None:
    """Catches a copy for each of q, k and v where they are thirds of one product."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        first, second, third = x.exp().chunk(3, dim=-1)
        return torch.cat([first * second, second * third, third * first], dim=-1)

    stats = same_gradients(lambda: llama_with(gated, [1]), plan_of(*swap_rows(["mlp.exp"], [1], 5)), steps=1)
    assert (stats.offloads, stats.offloaded_bytes) == (1, WIDE)


def test_pitfall_04_a_lone_slice_takes_its_storage_along() -> None:
    """Catches a ticket that keeps the slice's tensor: swapping it would free nothing."""
    storages: list[StorageWeakRef] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        large = torch.ones(1000, 8)
        storages.append(StorageWeakRef(large.untyped_storage()))
        return large[10:20]

    model, transfer = llama_saving(make, lambda _: None), WatchingTransfer()
    on(model, MLP, transfer)
    loss = forward(model)
    assert storages[-1].expired()  # the first are of recordings on fake tensors
    assert min(transfer.sizes_bytes) < 1000  # 320 bytes and what aligns them, not 32,000
    loss.backward()


def test_pitfall_05_reused_addresses_are_other_tensors() -> None:
    """Catches a map from address to copy that outlives the tensor at the address."""
    transfer = WatchingTransfer()
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    on(model, swap_everything(0), transfer)
    for _ in range(3):
        assert_bitwise_equal(gradients_of_step(model), bare)
    assert len(set(transfer.addresses)) < len(transfer.addresses)


def test_pitfall_05_one_address_eight_times_within_one_op() -> None:
    """Catches the same within a layer: each tensor is dead before the next one takes its address."""
    memory = numpy.zeros(4096, dtype=numpy.float32)
    seen: list[float] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        memory[:] += not isinstance(x, FakeTensor)  # in recordings
        return torch.from_numpy(memory)

    def eight_times(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = PassThrough.apply(x, make, lambda tensor: seen.append(float(tensor[0])))
        return x

    model = llama_with(eight_times, [1])
    on(model, plan_of(*swap_rows(["mlp"], [1], 0)))  # copies are complete at once
    one_step(model)
    assert seen == [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def test_pitfall_06_what_somebody_else_holds_stays_readable() -> None:
    """Catches a release that resizes the storage to nothing instead of dropping a reference."""
    outputs: list[list[torch.Tensor]] = []
    for plan in (None, swap_everything(0)):
        model, held = tiny_llama(), []
        on(model, plan)
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _m, args, out, held=held: held.extend((args[0], out)))
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, args, held=held: held.append(args[0]))
        one_step(model)
        outputs.append([tensor.detach() for tensor in held])
    assert len(outputs[1]) == 3 * NUM_LAYERS
    for found, expected in zip(outputs[1], outputs[0], strict=True):
        assert torch.equal(found, expected)
        assert found.untyped_storage().nbytes() >= expected.numel() * 4


@pytest.mark.parametrize("prefetch_ops", [0, 1000])
def test_pitfall_06_storages_that_cannot_be_resized_are_swapped(prefetch_ops: int) -> None:
    """Catches the same on memory that is not PyTorch's own (CUDA graphs' outputs are like that)."""
    seen: list[torch.Tensor | None] = []
    memory = numpy.arange(4096, dtype=numpy.float32)
    borrowed = torch.from_numpy(memory)
    assert not borrowed.untyped_storage().resizable()
    model = llama_saving(lambda _: torch.from_numpy(memory), seen.append)
    applied = on(model, plan_of(*swap_rows(["mlp"], [1], prefetch_ops)), RecordingTransfer())
    one_step(model)
    assert applied.stats().offloaded_bytes >= memory.nbytes
    assert seen[0].data_ptr() != borrowed.data_ptr()
    assert torch.equal(seen[0], torch.arange(4096.0))


def test_pitfall_07_hidden_states_that_the_caller_asked_for() -> None:
    """Catches an engine that frees or changes what the caller holds; swapping them frees nothing."""

    def hidden_states(model: nn.Module) -> list[torch.Tensor]:
        ids = batch(0)
        model.zero_grad()
        out = model(input_ids=ids, labels=ids, output_hidden_states=True)
        (out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)).backward()
        return [hidden.detach() for hidden in out.hidden_states]

    bare = tiny_llama()
    expected = hidden_states(bare)
    model = tiny_llama()
    on(model, swap_everything(3), RecordingTransfer())
    found = hidden_states(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert_bitwise_equal(gradients(model), gradients(bare))


def test_pitfall_07_nothing_of_ours_holds_what_was_released() -> None:
    """Catches a reference of the engine's own (frames, closures, output hooks) to a swapped tensor."""
    model, transfer = tiny_llama(), WatchingTransfer()
    on(model, swap_everything(0), transfer)
    gc.disable()
    try:
        alive: list[int] = []
        model.model.norm.register_forward_pre_hook(
            lambda *_: alive.append(sum(not source.expired() for source in transfer.sources))
        )
        one_step(model)
    finally:
        gc.enable()
    assert len(transfer.sources) > 16 * NUM_LAYERS
    assert alive[0] <= 2  # the last layer's sum, which the norm is about to read, and what made it
