"""Short pieces of training on the rehearsal's device; each returns how many of its results are wrong.

Together they use every wait and every lifetime of the library's copies: swap with all lives of graphs,
several streams, blocks of host memory that are cut up, chunks of a sequence, optimizer states, evictions,
passes of a pipeline. `mutations` leaves out one of these at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hf_actswap import MemoryPlan, apply
from hf_actswap.apply import apply_plan
from hf_actswap.engine import (
    Copy,
    EvictableTensors,
    HostBuffer,
    HostPool,
    PinnedSlabs,
    Resources,
    StreamTransfer,
)
from hf_actswap.engine.frozen_weights import LayerWeights
from hf_actswap.engine.schedule import Pass, PassOrder
from hf_actswap.engine.stats import Counters
from hf_actswap.engine.tickets import Ticket, restore
from hf_actswap.plan import PlanRow, Windows, model_structure
from hf_actswap.plan.actions import whole_layers_again
from hf_actswap.planner import OptimizerStates
from hf_actswap.planner.phases import planner as leading
from hf_actswap.planner.planning import StatesInPassing
from hf_actswap.planner.run import Run
from hf_actswap.stream.host_sequence import HostSequence
from tests.engine.gpu_stress import PLANS, Stress, small_llama
from tests.engine.tiny_models import (
    VOCABULARY,
    gradients,
    on,
    plan_of,
    recompute_rows,
    swap_everything,
    tiny_llama,
)
from tests.plan.stacked_models import IDS, tiny, without_cache

MIB = 2**20


def device() -> torch.device:
    return torch.device("cuda", 0)


def give_back() -> None:
    """Free what earlier trainings have left: garbage, cuBLAS' memory of each stream, and the cache."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def pinned(slab_bytes: int, room_bytes: int | None = None) -> HostPool:
    return HostPool(PinnedSlabs(device(), frozenset()), room_bytes, slab_bytes=slab_bytes)


def noise(number: int, elements: int = 4096) -> torch.Tensor:
    """Values on the device, the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    return torch.rand(elements, generator=generator).to(device())


def wrong(found: torch.Tensor, expected: torch.Tensor) -> int:
    return int(not torch.equal(found, expected))


def reuse_memory(elements: int = 4096) -> None:
    """Write into whatever the allocator has of blocks of this size: who still uses one is found."""
    taken = [torch.zeros(elements, device=device()) for _ in range(512)]
    del taken


@cache
def learned_stress() -> Stress:
    """A tiny Llama with the gradients that it has without a plan."""
    stress = Stress(small_llama(device(), hidden=32), (2, 16))
    stress.learn()
    return stress


def swapped(steps: int = 7, prefetch_ops: int = 5) -> int:
    """Every life of graphs, everything swapped."""
    stress = learned_stress()
    applied = on(stress.model, swap_everything(prefetch_ops), StreamTransfer(device()))
    assert applied is not None
    with applied:
        return stress.wrong_bits(steps)


def swapped_for_auto_windows() -> int:
    """Windows that the engine chooses itself."""
    stress = learned_stress()
    plan = plan_of(*(PlanRow(layer, "", "swap") for layer in range(4)))
    applied = on(stress.model, plan, StreamTransfer(device()))
    assert applied is not None
    with applied:
        return stress.wrong_bits(7)


def mixed() -> int:
    """Some ops swapped, some recomputed, in one layer."""
    stress = learned_stress()
    applied = on(stress.model, PLANS["swapped and recomputed"], StreamTransfer(device()))
    assert applied is not None
    with applied:
        return stress.wrong_bits(7)


def _unfrozen(model: torch.nn.Module, frozen: bool) -> list[torch.nn.Parameter]:
    """Return what is trained of a Llama: all, or what is no product of a layer; the rest is frozen then."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "layers" not in name or "norm" in name)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@cache
def _frozen_stress() -> Stress:
    """A Llama of which the norms and what is around the layers is trained: its products are frozen."""
    model = small_llama(device(), hidden=32)
    _unfrozen(model, True)
    stress = Stress(model, (2, 16))
    stress.learn()
    return stress


def frozen_weights(plan: MemoryPlan, steps: int = 7) -> int:
    """Every life of graphs, with the frozen weights on the host, beside swap or recomputation."""
    stress = _frozen_stress()
    applied = on(stress.model, replace(plan, weights="host"), StreamTransfer(device()))
    assert applied is not None
    assert applied.weights is not None
    with applied:
        assert all(not one.is_cuda for layer in applied.weights.layers for one in tensors_of(layer))
        found = stress.wrong_bits(steps)
        with torch.no_grad():
            stress.forward(0)
        found += stress.wrong_bits(1)
        assert applied.weights.stats().prefetched_bytes > 2 * applied.weights.step_bytes
    assert all(one.is_cuda for layer in applied.weights.layers for one in tensors_of(layer))
    return found


def frozen_weights_dropped() -> int:
    """A layer that was fetched ahead is not called, and compute takes its memory."""
    applied = on(_frozen_stress().model, plan_of(weights="host"), StreamTransfer(device()))
    assert applied is not None
    assert applied.weights is not None
    found = 0
    for layer in applied.weights.layers:
        layer.fetch(late=False)
        layer.drop()
        taken = [torch.zeros(layer.size_bytes, dtype=torch.uint8, device=device()) for _ in range(8)]
        torch.accelerator.synchronize()
        found += sum(int(one.any()) for one in taken)
    applied.remove()
    return found


def tensors_of(layer: LayerWeights) -> list[torch.Tensor]:
    return [weight.tensor for weight in layer.held]


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "tiles": {
        "tile_config": {
            "tile": {"op_name": ["feed_forward", "attention_norm", "ffn_norm", "final_norm"]},
            "loss": 5,
        },
        "recompute_config": {"recompute": True},
        "swap_config": {"swap": True, "layer_swap": [], "recompute_input": True, "default_prefetch": 1},
        "memory": {"min_tensor_mib": 1e-6},
    },
    "stream": {"stream_config": {"tokens": 16}, "tile_config": {"loss": 3}},
    "stream beside frozen weights": {"stream_config": {"tokens": 16}, "memory": {"weights": "host"}},
}
NEAR = 1e-5
"""Sums in tiles and chunks have another order: so far may weights be from those without a plan."""


def _losses(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, tokens: int
) -> list[torch.Tensor]:
    losses = []
    for number in range(steps):
        ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=ids.to(device()), labels=ids.to(device())).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _trained(config: Mapping[str, Any] | None, frozen: bool) -> list[torch.Tensor]:
    """Train a tiny Llama for some steps, or what is not frozen of it; return its losses and weights."""
    model = tiny_llama(use_cache=False).to(device())
    optimizer = torch.optim.SGD(_unfrozen(model, frozen), lr=0.1, momentum=0.9)
    applied = None if config is None else apply(model, dict(config), optimizer=optimizer)
    losses = _losses(model, optimizer, steps=2, tokens=40)
    if applied is not None:
        assert applied.stats().offloads > 0
        applied.remove()
    return [*losses, *(item.detach().clone() for item in model.parameters())]


@cache
def _first_of(name: str) -> list[torch.Tensor]:
    frozen = "frozen" in name
    found = _trained(CONFIGS[name], frozen)
    for mine, plain in zip(found, _trained(None, frozen), strict=True):
        torch.testing.assert_close(mine, plain, rtol=NEAR, atol=NEAR)
    return found


def configured(name: str) -> int:
    """Tiles of an op and of the loss, or a sequence in chunks: always the bits of the first time."""
    expected = _first_of(name)
    return sum(wrong(*pair) for pair in zip(_trained(CONFIGS[name], "frozen" in name), expected, strict=True))


PLANNED_STEPS, SHARE = 7, 0.85
"""Steps of a planned training, and its memory of what a plain one takes: a third of that cannot be moved."""


def _planned(memory: Mapping[str, Any] | None, frozen: bool = False) -> tuple[list[torch.Tensor], int]:
    """Train a Llama with a wide feed-forward; return its losses and weights, and what it had allocated.

    ``frozen``: the products of its layers are.
    """
    give_back()
    torch.cuda.reset_peak_memory_stats()
    model = tiny_llama(hidden_size=32, intermediate_size=2048, use_cache=False).to(device())
    optimizer = torch.optim.AdamW(_unfrozen(model, frozen), lr=1e-3, fused=True)
    planner: Any = None if memory is None else apply(model, {"memory": memory}, optimizer=optimizer)
    losses = _losses(model, optimizer, PLANNED_STEPS, tokens=512)
    peak_bytes = torch.cuda.max_memory_allocated()
    if planner is not None:
        assert planner.phase == "stable"
        assert (planner.weights is not None) == (memory.get("weights", "keep") != "keep")
        moved = planner.optimizer_states
        assert planner.stats().offloads > 0 or (moved is not None and moved.stats().offloads > 0)
        planner.remove()
    return [*losses, *(item.detach().clone() for item in model.parameters())], peak_bytes


@cache
def _unplanned(frozen: bool = False) -> tuple[list[torch.Tensor], int]:
    return _planned(None, frozen)


def planned_with_states_in_passing() -> int:
    """The planner is told that a step is faster with the optimizer's states on the host."""
    half = StatesInPassing(_unplanned()[1] // 20, 1.0, 2.0)
    with (
        patch.object(leading, "states_in_passing", return_value=(half, None)) as asked,
        patch.object(Run, "states_to_host", autospec=True, side_effect=Run.states_to_host) as moved,
    ):
        found = planned("adaptive", "auto")
    assert asked.call_count == moved.call_count == 1
    return found


def planned_while_frozen_weights_leave() -> int:
    """The planner is told that a step is faster with the frozen weights on the host."""
    with patch.object(leading, "weights_pay", return_value=("a test says so", None)) as asked:
        found = planned("smart_swap", weights="auto")
    assert asked.call_count == 1
    return found


def planned(mode: str, preference: str = "performance", weights: str = "keep") -> int:
    """The planner records, tries plans and keeps one, within less memory than the plain training takes."""
    expected, peak_bytes = _unplanned(weights != "keep")
    memory = {"mode": mode, "preference": preference, "warmup_steps": 1, "search_steps": 3}
    asked = {**memory, "weights": weights, "budget_gib": SHARE * peak_bytes / 2**30}
    found, _ = _planned(asked, weights != "keep")
    return sum(wrong(*pair) for pair in zip(found, expected, strict=True))


def host_block_is_used_again() -> int:
    """A block that is still read by a copy in is written by the next copy out."""
    transfer, host = StreamTransfer(device()), pinned_block(4096 * 4)
    first, second = noise(1), noise(2)
    out = transfer.offload(first, host)
    out.wait()
    block, back = transfer.reload(host, out)
    again = transfer.offload(second, host)
    back.wait()
    found = wrong(block, first)
    again.wait()
    block, back = transfer.reload(host, again)
    back.wait()
    return found + wrong(block, second)


def pinned_block(size_bytes: int) -> HostBuffer:
    found = HostBuffer(size_bytes, (torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True),), ())
    found.hold(torch.float32, torch.Size([size_bytes // 4]))
    return found


def on_its_way_back(
    tensor: torch.Tensor, transfer: StreamTransfer, pool: HostPool
) -> tuple[torch.Tensor, Copy]:
    """Copy a tensor out and start the copy back; its host memory is given back during the copy back."""
    host = pool.take(tensor.nbytes)
    assert host is not None
    host.hold(tensor.dtype, tensor.shape)
    out = transfer.offload(tensor, host)
    out.wait()
    block, back = transfer.reload(host, out)
    pool.give_back(host)
    return block, back


def host_memory_is_cut_up() -> int:
    """Half of a block that a copy in still reads is written by the copy of a smaller tensor."""
    transfer = StreamTransfer(device())
    pool = pinned(MIB, MIB)
    large = noise(1, MIB // 4)
    block, back = on_its_way_back(large, transfer, pool)
    small = noise(2, MIB // 8)
    half = pool.take(small.nbytes)
    assert half is not None
    half.hold(small.dtype, small.shape)
    transfer.offload(small, half).wait()
    back.wait()
    found = wrong(block, large)
    pool.give_back(half)
    torch.accelerator.synchronize()
    pool.close()
    return found


def reader_on_another_stream() -> int:
    """A block that was prefetched on one stream is read on another, then dropped."""
    transfer, host, source = StreamTransfer(device()), pinned_block(MIB), noise(1, MIB // 4)
    out = transfer.offload(source, host)
    out.wait()
    block, back = transfer.reload(host, out)
    other = torch.Stream(device())
    with other:
        back.wait()
        copy = block.clone()
    del block, back
    after = [torch.zeros(MIB // 4, device=device()) for _ in range(4)]
    torch.accelerator.current_stream().wait_stream(other)
    del after
    return wrong(copy, source)


def asked_on_another_stream() -> int:
    """What was offloaded on one stream is waited for, and freed, while another is current."""
    transfer, host, values = StreamTransfer(device()), pinned_block(MIB), noise(1, MIB // 4)
    source = values.clone()
    out = transfer.offload(source, host)
    with torch.Stream(device()):
        out.wait()
        del source
    after = [torch.zeros(MIB // 4, device=device()) for _ in range(4)]
    block, back = transfer.reload(host, out)
    back.wait()
    del after
    return wrong(block, values)


def sequence_on_the_host() -> int:
    """Chunks are stored, brought, changed, stored again; some are dropped while they come."""
    pool = pinned(MIB)
    host = HostSequence(pool, StreamTransfer(device()), Counters())
    found = 0
    for turn in range(2):
        for number in range(8):
            host.put(number, noise(number) * 1, noise(number + 100) * 1)
            reuse_memory()
        for number in range(8):
            host.prefetch(number)
            if number + 1 < 8:
                host.prefetch(number + 1)
            first, second = host.fetch(number)
            found += wrong(first, noise(number)) + wrong(second, noise(number + 100))
            host.put(number, first * 2, second * 2)
            del first, second
            reuse_memory()
        for number in range(8):
            host.prefetch(number)
            if number % 2 == turn:
                host.drop(number)
                reuse_memory()
        for number in range(8):
            if number in host:
                found += wrong(host.fetch(number)[0], noise(number) * 2)
    host.put("last", noise(1) * 1)
    host.drop("last")
    reuse_memory()
    host.close()
    torch.accelerator.synchronize()
    pool.close()
    return found


def _optimizer_steps(states_on_host: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    pool, states = pinned(MIB), None
    if states_on_host:
        states = OptimizerStates(
            optimizer,
            StreamTransfer(device()),
            pool,
            model=model,
            layers=layers,
            resident_bytes=100_000,
            min_tensor_bytes=1024,
        )
        states.attach()
    for number in range(4):
        model(noise(number, 64 * 64).view(64, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:  # the last ones are leaving; they stay after all, and are written
            for state in optimizer.state.values():
                state["exp_avg"].mul_(2).mul_(0.5)
        if number == 2:
            model(noise(7, 64 * 64).view(64, 64)).pow(2).mean().backward()
            if states is not None:
                states.send_all()  # turns back what was coming
                reuse_memory()
            optimizer.zero_grad()
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    if states is not None:
        states.remove()
    torch.accelerator.synchronize()
    pool.close()
    return [*(item.detach().clone() for item in model.parameters()), *moments]


@cache
def _plain_optimizer() -> list[torch.Tensor]:
    return _optimizer_steps(False)


def optimizer_states() -> int:
    """States go to the host and come back for each step."""
    return sum(wrong(*pair) for pair in zip(_optimizer_steps(True), _plain_optimizer(), strict=True))


def evicted() -> int:
    """Kept tensors leave when memory is short, into host memory that a transfer has used before."""
    transfer, pool = StreamTransfer(device()), pinned(MIB, MIB)
    large = noise(1, MIB // 4)
    block, back = on_its_way_back(large, transfer, pool)
    idle = EvictableTensors(device(), pool, min_tensor_bytes=512)
    ticket: Ticket = idle.keep((noise(2, MIB // 4) * 1).detach())
    assert idle.evict(MIB) == MIB
    after = torch.zeros(MIB // 4, device=device())
    back.wait()
    found = wrong(block, large) + wrong(restore(ticket), noise(2, MIB // 4))
    del ticket, after, block, back
    torch.accelerator.synchronize()
    pool.close()
    return found


ORDER = tuple(
    Pass(0, micro_batch, is_backward)
    for micro_batch, is_backward in (
        (0, False),
        (1, False),
        (2, False),
        (0, True),
        (3, False),
        (1, True),
        (2, True),
        (3, True),
    )
)


def _passes(swaps: bool, dropped: bool = False) -> dict[str, torch.Tensor]:
    model, passes = tiny_llama().to(device()), PassOrder()
    applied = None
    if swaps:
        rows = (PlanRow(layer, "", "swap", windows=Windows.of_prefetch(30)) for layer in range(4))
        resources = Resources(StreamTransfer(device()), passes=passes)
        applied = apply_plan(model, plan_of(*rows), model_structure(model), resources)
    for _ in range(3):
        model.zero_grad()
        losses: dict[int, torch.Tensor] = {}
        passes.begin(ORDER)
        for one in ORDER:
            if one.is_backward:
                losses.pop(one.micro_batch).backward()
                continue
            passes.forward_follows(one.chunk, one.micro_batch)
            generator = torch.Generator().manual_seed(one.micro_batch)
            ids = torch.randint(0, VOCABULARY, (2, 16), generator=generator).to(device())
            losses[one.micro_batch] = model(input_ids=ids, labels=ids).loss
        passes.end()
    found = {name: value.clone() for name, value in gradients(model).items()}
    if dropped:  # a graph dies before what it has swapped is released
        passes.begin(ORDER)
        passes.forward_follows(0, 0)
        ids = torch.zeros(2, 16, dtype=torch.long, device=device())
        loss = model(input_ids=ids, labels=ids).loss
        del loss
        for elements in (32, 256, 512, 1024, 2048, 4096, 8192):
            reuse_memory(elements)
        passes.end()
    if applied is not None:
        applied.remove()
    return found


@cache
def _plain_passes() -> dict[str, torch.Tensor]:
    return _passes(False)


def passes_of_a_pipeline() -> int:
    """Releases and copies back cross forwards and backwards of other micro-batches."""
    expected = _plain_passes()
    found = _passes(True)
    return sum(wrong(found[name], expected[name]) for name in expected)


def dropped_in_flight() -> int:
    """As above; at the end a forward's graph is dropped while its copies out are under way."""
    expected = _plain_passes()
    found = _passes(True, True)
    return sum(wrong(found[name], expected[name]) for name in expected)


def encoder_and_decoder() -> int:
    """Layers of both stacks of a T5 run again, and so do their tables of positions, some on the CPU."""
    model = without_cache(tiny("t5")).to(device())
    ids = IDS.to(device())

    def stepped() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        model(input_ids=ids, labels=ids).loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    expected = stepped()
    layers = model_structure(model).all_layers
    with apply(model, MemoryPlan(whole_layers_again(layer.index for layer in layers), 2, "t5")):
        found = stepped()
    return sum(map(wrong, found, expected))


TRAININGS: dict[str, Callable[[], int]] = {
    "encoder and decoder": encoder_and_decoder,
    "frozen weights": partial(frozen_weights, plan_of()),
    "frozen weights dropped": frozen_weights_dropped,
    "frozen weights, swapped": partial(frozen_weights, swap_everything(5)),
    "frozen weights, recomputed": partial(frozen_weights, plan_of(*recompute_rows([""], range(4)))),
    "frozen weights, regions": partial(frozen_weights, plan_of(*recompute_rows(["mlp"], range(4)))),
    "swapped": swapped,
    "fetched on use": lambda: swapped(prefetch_ops=0),
    "auto windows": swapped_for_auto_windows,
    "mixed": mixed,
    "tiles": partial(configured, "tiles"),
    "stream": partial(configured, "stream"),
    "stream beside frozen weights": partial(configured, "stream beside frozen weights"),
    "smart_swap": partial(planned, "smart_swap"),
    "adaptive": partial(planned, "adaptive"),
    "planned beside frozen weights": partial(planned, "smart_swap", weights="host"),
    "planned while frozen weights leave": planned_while_frozen_weights_leave,
    "planned with states": partial(planned, "smart_swap", "memory_saving"),
    "planned with states in passing": planned_with_states_in_passing,
    "host block used again": host_block_is_used_again,
    "host memory cut up": host_memory_is_cut_up,
    "reader on another stream": reader_on_another_stream,
    "asked on another stream": asked_on_another_stream,
    "sequence": sequence_on_the_host,
    "optimizer states": optimizer_states,
    "evicted": evicted,
    "passes": passes_of_a_pipeline,
    "dropped in flight": dropped_in_flight,
}
