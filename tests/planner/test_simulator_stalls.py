"""Predicted stalls, copies and bytes against the engine itself, whose compute and link are on one clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actswap import MemoryPlan, apply, model_structure
from hf_actswap.engine import Copy, HostBuffer, Link, PageableSlabs, SwapStats, host_budget
from hf_actswap.plan import PlanRow, Windows
from hf_actswap.planner import CountingMeter, DeviceClock, Simulator, StepRecorder
from tests.engine.simulated_transfer import Clock, SimulatedCopy, SimulatedTransfer
from tests.engine.tiny_models import plan_of, recompute_rows, swap_rows, tiny_llama

LAYERS = range(4)


def link_of(bytes_per_ms: float) -> Link:
    return Link(bytes_per_ms, bytes_per_ms, bytes_per_ms, bytes_per_ms, latency_ms=0.05)


def windows(prefetch_ops: int, release_ops: int, layers: range = LAYERS) -> MemoryPlan:
    rows = (PlanRow(layer, "", "swap", windows=Windows(prefetch_ops, release_ops)) for layer in layers)
    return plan_of(*rows)


NORMS = ("input_layernorm", "post_attention_layernorm")
PLANS: dict[str, MemoryPlan] = {
    **{
        f"everything, windows of {ops}": plan_of(*swap_rows([""], LAYERS, ops))
        for ops in (1, 2, 3, 5, 10, 20)
    },
    "everything, released late": windows(1, 60),
    "everything, fetched early": windows(60, 1),
    "half of the layers": plan_of(*swap_rows([""], [0, 2], 5)),
    "the first layers": plan_of(*swap_rows([""], [0, 1], 10)),
    "some ops": plan_of(*swap_rows(["self_attn", "mlp.down_proj"], LAYERS, 5)),
    "the feed-forward, no windows": plan_of(*swap_rows(["mlp"], LAYERS, 1)),
    "a mix": plan_of(*recompute_rows(NORMS, LAYERS), *swap_rows(["self_attn", "output"], LAYERS, 5)),
    "layers again, inputs away": plan_of(*recompute_rows([""], LAYERS), *swap_rows(["output"], LAYERS, 10)),
}
RATES = {"fast": 60_000.0, "even": 12_000.0, "slow": 4_000.0}
"""Bytes per ms: a copy of everything lasts less than, about as long as, and longer than forward."""


NO_TIME = {"copy_", "fill_", "full", "zero_", "detach", "empty", "empty_like", "zeros_like", "arange"}


class NotedTransfer(SimulatedTransfer):
    """Notes when the copies of a step end; those of one direction begin when the one before has ended."""

    def __init__(self, clock: Clock, link: Link) -> None:
        super().__init__(clock, link)
        self.out_ends_ms: list[float] = []
        self.in_ends_ms: list[float] = []

    def offload(self, source: torch.Tensor, host: HostBuffer) -> SimulatedCopy:
        copy = super().offload(source, host)
        self.out_ends_ms.append(copy.finish_ms)
        return copy

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, SimulatedCopy]:
        block, copy = super().reload(host, after)
        self.in_ends_ms.append(copy.finish_ms)
        return block, copy


@dataclass
class Measured:
    """A step of the engine: what it counted, its ms, and when its copies ended, from its beginning."""

    stats: SwapStats
    step_ms: float
    out_ends_ms: list[float]
    in_ends_ms: list[float]


class OpTimes(TorchDispatchMode):
    """Every op that computes takes time: a matrix product and attention more than others, backward alike.

    Hooks on modules would let time pass between the functions; an op packs what it reads before its kernel
    runs and what it makes after it, in this clock as on a device.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name not in NO_TIME and not any(item.alias_info for item in func._schema.returns):
            self._clock.advance(1.0 if "mm" in name or "attention" in name else 0.2)
        return result


class Driven:
    """A tiny model on a clock, and the simulator of its step as it was recorded there."""

    def __init__(self) -> None:
        self.model, self.clock = tiny_llama(use_cache=False), Clock()
        transfer, meter = SimulatedTransfer(self.clock, link_of(1e6)), CountingMeter()
        meter.own([*self.model.parameters(), *self.model.buffers()])
        meter.start()
        with StepRecorder(self.model, model_structure(self.model), meter, DeviceClock(transfer)) as recorder:
            self.step()
        meter.stop()
        self.simulator = Simulator(recorder.profile(device="simulated", device_bytes=2**40))

    def step(self) -> float:
        """One step; return its ms."""
        ids = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(1))
        self.model.zero_grad()
        begin_ms = self.clock.now_ms
        with OpTimes(self.clock):
            self.model(input_ids=ids, labels=ids).loss.backward()
        return self.clock.now_ms - begin_ms

    def run(self, plan: MemoryPlan, link: Link) -> Measured:
        """The third step under a plan."""
        transfer = NotedTransfer(self.clock, link)
        with apply(self.model, plan, transfer=transfer) as applied:
            self.step()
            self.step()
            before, begin_ms = applied.stats(), self.clock.now_ms
            transfer.out_ends_ms.clear()
            transfer.in_ends_ms.clear()
            step_ms = self.step()
            stats = applied.stats() - before
        self.clock.listeners.clear()
        ends = ([ms - begin_ms for ms in of] for of in (transfer.out_ends_ms, transfer.in_ends_ms))
        return Measured(stats, step_ms, *ends)


@pytest.fixture(scope="module")
def driven() -> Iterator[Driven]:
    """Page-locked memory needs an accelerator; what it is changes nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_budget, "PinnedSlabs", lambda *_: PageableSlabs())
        yield Driven()


QUICK = {("everything, windows of 3", "even"), ("a mix", "even")}
CASES = [
    pytest.param(name, rate, marks=() if (name, rate) in QUICK else pytest.mark.slow)
    for name in PLANS
    for rate in RATES
]


@pytest.mark.parametrize(("name", "rate"), CASES)
def test_stalls_and_copies_are_those_of_the_engine(name: str, rate: str, driven: Driven) -> None:
    plan, link = PLANS[name], link_of(RATES[rate])
    measured, found = driven.run(plan, link), driven.simulator.predict(plan, link)
    stats, stall_ms = measured.stats, found.forward_stall_ms + found.backward_stall_ms
    assert found.swapped_bytes == stats.offloaded_bytes == stats.prefetched_bytes
    assert len(found.copies) == stats.offloads
    assert stall_ms == pytest.approx(stats.stall_ms, rel=0.05, abs=0.5)
    assert found.step_ms == pytest.approx(measured.step_ms, rel=0.02)
    within_ms = 0.02 * measured.step_ms
    assert [copy.out_end_ms for copy in found.copies] == pytest.approx(measured.out_ends_ms, abs=within_ms)
    back_ms = sorted(copy.in_end_ms for copy in found.copies)
    assert back_ms == pytest.approx(measured.in_ends_ms, abs=within_ms)


def test_within_the_layers_it_is_exact(driven: Driven) -> None:
    """What is left is that of the scopes outside them, one op event each (the last layer's output)."""
    for name, rate in (("half of the layers", "slow"), ("some ops", "even"), ("the first layers", "even")):
        plan, link = PLANS[name], link_of(RATES[rate])
        measured, found = driven.run(plan, link), driven.simulator.predict(plan, link)
        assert found.forward_stall_ms + found.backward_stall_ms == pytest.approx(measured.stats.stall_ms)
        assert found.step_ms == pytest.approx(measured.step_ms)
