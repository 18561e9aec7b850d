"""Predicted memory of real steps: the engine runs a plan on the CPU, every storage counted."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_actswap import MemoryPlan, apply, model_structure
from hf_actswap.engine import BlockingTransfer, Copy, HostBuffer, SwapStats
from hf_actswap.plan import PlanRow, Windows
from hf_actswap.planner import CountingMeter, DeviceClock, Simulator, StepRecorder
from hf_actswap.planner.cost.simulate import fates_of
from tests.engine.tiny_models import plan_of, recompute_rows, swap_rows, tiny_llama

CPU = torch.device("cpu")
LAYERS = range(4)
NORMS = ("input_layernorm", "post_attention_layernorm")
CORE = "self_attn.flash_attention"
CHEAP = ("mlp.mul", "mlp.act_fn", *NORMS)
TO_HOST = Windows.of_prefetch(10)

PLANS: dict[str, MemoryPlan] = {
    "keep": plan_of(),
    "swap everything": plan_of(*swap_rows([""], LAYERS)),
    "swap some ops": plan_of(*swap_rows(["self_attn", "mlp.down_proj"], [0, 1, 2])),
    "swap with short windows": plan_of(*swap_rows(["mlp"], LAYERS, 1)),
    "recompute norms": plan_of(*recompute_rows(NORMS, LAYERS)),
    "recompute functions": plan_of(*recompute_rows(["mlp.mul", "mlp.act_fn"], LAYERS)),
    "recompute a module": plan_of(*recompute_rows(["mlp"], LAYERS)),
    "recompute attention": plan_of(*recompute_rows(["self_attn"], [1, 3])),
    "recompute layers": plan_of(*recompute_rows([""], LAYERS)),
    "recompute the first layers": plan_of(*recompute_rows([""], [0, 1])),
    "recompute layers, swap inputs": plan_of(
        *recompute_rows([""], LAYERS),
        *swap_rows(["output"], LAYERS),
        PlanRow("embedding", "", "swap", windows=TO_HOST),
    ),
    "recompute layers, keep attention": plan_of(
        *recompute_rows([""], LAYERS), *(PlanRow(layer, CORE, "keep") for layer in LAYERS)
    ),
    "recompute layers, swap attention": plan_of(*recompute_rows([""], LAYERS), *swap_rows([CORE], LAYERS)),
    "a mix": plan_of(*recompute_rows(CHEAP, LAYERS), *swap_rows(["self_attn", "output"], LAYERS, 20)),
}


class MeteredTransfer(BlockingTransfer):
    """Host blocks are not counted; what comes back to the device is."""

    def __init__(self, meter: CountingMeter) -> None:
        super().__init__(CPU)
        self._meter = meter

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        with _disable_current_modes():
            return super().offload(source, host)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        with _disable_current_modes():
            block, copy = super().reload(host, after)
        self._meter.own([block])
        return block, copy


def run_step(model: torch.nn.Module) -> None:
    ids = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()


def metered(model: torch.nn.Module, meter: CountingMeter) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    meter.own([*model.parameters(), *model.buffers(), *gradients])
    meter.start()
    meter.reset_peak()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_llama(use_cache=False)


@pytest.fixture(scope="module")
def simulator(model: torch.nn.Module) -> Simulator:
    return recorded(model)


def recorded(model: torch.nn.Module) -> Simulator:
    meter = CountingMeter()
    metered(model, meter)
    recorder = StepRecorder(model, model_structure(model), meter, DeviceClock(BlockingTransfer(CPU)))
    with recorder:
        run_step(model)
    meter.stop()
    return Simulator(recorder.profile(device="cpu", device_bytes=2**40))


def counted(model: torch.nn.Module, plan: MemoryPlan) -> tuple[int, SwapStats]:
    """The second step under a plan: its peak, and what the engine counted in it."""
    meter = CountingMeter()
    applied = apply(model, plan, transfer=MeteredTransfer(meter)) if plan.rows else None
    try:
        run_step(model)
        before = applied.stats() if applied else SwapStats()
        metered(model, meter)
        run_step(model)
        meter.stop()
        return meter.peak_bytes(), (applied.stats() if applied else SwapStats()) - before
    finally:
        meter.stop()
        if applied is not None:
            applied.remove()


@pytest.mark.parametrize("name", PLANS)
def test_peak_and_swapped_bytes_are_those_of_the_engine(
    name: str, model: torch.nn.Module, simulator: Simulator
) -> None:
    plan = PLANS[name]
    peak_bytes, stats = counted(model, plan)
    found = simulator.predict(plan)
    assert found.peak_bytes == pytest.approx(peak_bytes, rel=0.005)
    assert found.swapped_bytes == found.host_bytes == stats.offloaded_bytes
    assert max(point.total_bytes for point in found.memory) == found.peak_bytes
    assert simulator.predict(plan, curve=False).peak_bytes == found.peak_bytes
    assert (found.recompute_ms > 0) == ("recompute" in name or name == "a mix")


def test_what_leaves_during_the_loss_is_there_until_the_loss_has_made_its_tensors() -> None:
    """Points of release around the loss, whose logits are most of the step's memory."""
    model = tiny_llama(use_cache=False, vocab_size=512)
    simulator = recorded(model)
    events = simulator.profile.op_events
    loss = events[-1]
    for point in range(loss.first_op - 6, loss.first_op + loss.num_ops + 1):
        rows = (
            PlanRow(scope, path, "swap", ordinal, windows=Windows(10, max(point - event.first_op, 0)))
            for event in events
            for scope, path, ordinal in [event.call]
            if isinstance(scope, int)
        )
        plan = plan_of(*rows)
        peak_bytes, _ = counted(model, plan)
        # Within an op event nothing has an order: what leaves in it is there until its end.
        assert 0 <= simulator.predict(plan).peak_bytes - peak_bytes <= 0.011 * peak_bytes


def test_nothing_is_added_to_what_was_measured(model: torch.nn.Module, simulator: Simulator) -> None:
    peak_bytes, _ = counted(model, plan_of())
    found = simulator.predict(plan_of())
    assert found.peak_bytes == peak_bytes
    assert found.step_ms == pytest.approx(found.compute_ms + simulator.profile.outside_ms)
    saved = [
        storage
        for storage in simulator.profile.saved.storages
        if any(u.kind == "saved" for u in storage.uses)
    ]
    assert found.kept_bytes == sum(storage.size_bytes for storage in saved)


def test_fates_are_named_storage_by_storage(simulator: Simulator) -> None:
    profile = simulator.profile
    fates = fates_of(profile, PLANS["a mix"])
    named = {
        (storage.uses[0].producer[1], fate)
        for storage, fate in zip(profile.saved.storages, fates, strict=True)
        if storage.uses[0].producer[0] == 1 and fate != "unsaved"
    }
    assert ("mlp.mul", "recompute") in named
    assert (CORE, "swap") in named
    assert ("mlp.up_proj", "recompute") not in named
