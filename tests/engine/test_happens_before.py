"""The order that streams and events enforce, checked operator by operator with vector clocks."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from hf_actswap import MemoryPlan
from hf_actswap.engine import (
    HostBuffer,
    HostPool,
    PageableSlabs,
    Resources,
    StreamTransfer,
    install,
    transfer,
)
from hf_actswap.engine.stats import Counters, PendingTime
from hf_actswap.engine.tickets import Place, SwapGroup, SwapTicket, View
from tests.engine.gpu_stress import PLANS, Stress, moving, small_llama
from tests.engine.pretended_streams import CPU, PretendedEvent, PretendedStream, StreamOrder, pretend
from tests.engine.test_random_orders import Example, Trainer, examples, structure_of
from tests.engine.tiny_models import on, swap_everything
from tests.quick_cases import quick_first, quick_named

UNWAITED = [
    ("compute", "out"),  # memory is given back while it is copied out
    ("compute", "in"),  # a block is read before it has arrived
    ("out", "compute"),  # a copy out starts before the tensor is written
    ("in", "compute"),  # a copy in writes memory that its owner before still uses
]
"""The other two, between the copy streams, follow from these as long as all compute is on one stream."""
STEPS = 7
"""Each life of graphs once."""


class _NoMachine:
    """What `Trainer` moves time with; here there is none."""

    def beat(self, *_: object) -> None:
        return None


def violations(example: Example, order: StreamOrder, patch: pytest.MonkeyPatch) -> list[str]:
    """Run an example under a plan and return what is out of order; gradients must be right nevertheless."""
    expected = Trainer(example, _NoMachine(), lambda: None).gradients()  # type: ignore[arg-type]
    trainer = Trainer(example, _NoMachine(), lambda: None)  # type: ignore[arg-type]
    with patch.context() as patched:
        pretend(patched, order)
        applied = install(
            trainer.model, example.plan, structure_of(len(example.bodies)), Resources(StreamTransfer(CPU))
        )
        with order.watching():
            found = trainer.gradients()
        applied.remove()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return order.violations


def run_stress(
    stress: Stress, plan: MemoryPlan | str, order: StreamOrder, patch: pytest.MonkeyPatch, steps: int = STEPS
) -> list[str]:
    """Run steps of the tiny Llama whose graphs die in reference cycles; return what is out of order."""

    def forward(number: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        loss = Stress.forward(stress, number, mask)
        loss.cycle = loss  # type: ignore[attr-defined]
        return loss

    with patch.context() as patched:
        pretend(patched, order)
        patched.setattr(stress, "forward", forward)
        with order.watching():
            applied = on(stress.model, plan, StreamTransfer(CPU))
            with applied:
                assert stress.wrong_bits(steps) == 0
                assert applied.stats().offloaded_bytes > 0
    return order.violations


@pytest.fixture(scope="module")
def stress() -> Stress:
    found = Stress(small_llama(CPU, hidden=32), (2, 16))
    found.learn()
    return found


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(examples, st.integers(0, 1000))
def test_random_orders(monkeypatch: pytest.MonkeyPatch, example: Example, seed: int) -> None:
    assert violations(example, StreamOrder(seed, collections=0.05), monkeypatch) == []


@pytest.mark.parametrize(
    "plan", quick_named(PLANS, ["case_4", "windows 0", "auto", "recomputed layers", "swapped and recomputed"])
)
def test_a_model(plan: MemoryPlan | str, stress: Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder(1, collections=0.05)
    assert run_stress(stress, moving(plan), order, monkeypatch) == []
    assert order.operators > 1000


@pytest.mark.essential
@pytest.mark.parametrize("pair", UNWAITED, ids=" ".join)
def test_a_wait_that_is_left_out_is_found(
    pair: tuple[str, str], stress: Stress, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = StreamOrder(1, unwaited=(pair,))
    assert run_stress(stress, swap_everything(5), order, monkeypatch)


def test_a_graph_may_die_while_a_copy_stream_is_current(
    stress: Stress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a copy that makes only the current stream wait."""

    def wait_on_current_alone(copy: transfer._StreamCopy) -> PendingTime | None:
        torch.accelerator.current_stream(CPU).wait_event(copy.done.event)
        return None

    order = StreamOrder(1, collections=0.05)
    assert run_stress(stress, swap_everything(20), order, monkeypatch) == []
    monkeypatch.setattr(transfer._StreamCopy, "wait", wait_on_current_alone)
    assert run_stress(stress, swap_everything(20), StreamOrder(1, collections=0.05), monkeypatch)


@pytest.mark.parametrize(("apart_ms", "stalls"), [(0.01, 0), (0.5, 2)])
def test_a_wait_is_a_stall_only_if_the_device_waited(
    apart_ms: float, stalls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches waits that count because the host runs ahead, and timing events that are made anew."""
    order = StreamOrder()
    pretend(monkeypatch, order)
    monkeypatch.setattr(PretendedEvent, "query", lambda event: event.timing)  # copies are never complete
    monkeypatch.setattr(PretendedEvent, "elapsed_time", lambda *_: apart_ms)
    transfer, counters = StreamTransfer(CPU), Counters()
    source = torch.ones(4, dtype=torch.uint8)
    host = HostBuffer(4, (torch.zeros_like(source),), ())
    host.hold(source.dtype, source.shape)
    for _ in range(2):
        counters.stalled(transfer.offload(source, host).wait())
        stats = counters.snapshot(None)
    assert (stats.stalls, stats.stall_ms) == (stalls, stalls * apart_ms)
    assert order.timing_events == 2


def test_backward_on_a_thread_of_its_own(stress: Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where autograd runs backward on the device's thread."""
    order = StreamOrder(3, collections=0.05)
    backward = torch.Tensor.backward

    def on_a_thread(loss: torch.Tensor, **options: bool) -> None:
        def run() -> None:
            with order.operators_of_thread():
                backward(loss, **options)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    monkeypatch.setattr(torch.Tensor, "backward", on_a_thread)
    assert run_stress(stress, swap_everything(20), order, monkeypatch) == []


@pytest.mark.parametrize("prefetch_ops", quick_first([5, 0, 40], 1))
def test_a_layer_on_a_stream_of_its_own(
    prefetch_ops: int, stress: Stress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches memory that is copied for one stream, used on another, and goes back to either too early.

    Autograd runs the backward of an operator on the stream of its forward. What is not copied is left out:
    PyTorch itself asks whoever uses several streams to see to that memory.
    """
    order = StreamOrder(3, collections=0.05)
    side, layer = order.new_stream(name="side"), stress.model.model.layers[1]

    def join(first: PretendedStream, then: PretendedStream) -> None:
        done = order.new_event()
        done.record(first)
        then.wait_event(done)
        order.set_current(then)

    def before(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled() and args[0].requires_grad:
            args[0].register_hook(lambda _gradient: join(side, order.compute))
        join(order.compute, side)

    def after(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _gradient: join(order.compute, side))
        join(side, order.compute)

    handles = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        found = run_stress(stress, swap_everything(prefetch_ops), order, monkeypatch)
    finally:
        for handle in handles:
            handle.remove()
    assert [line for line in found if line.startswith("copied") or " in " in line or " out " in line] == []


def test_each_reader_of_a_block_waits_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a block that only its first reader waits for, and that goes back while the second reads it."""
    order = StreamOrder()
    pretend(monkeypatch, order)
    side, pool = order.new_stream(name="side"), HostPool(PageableSlabs())
    transfer, counters = StreamTransfer(CPU), Counters()
    with order.watching():
        source = torch.ones(64)
        host, storage = pool.take(source.nbytes), source.untyped_storage()
        assert host is not None
        group = SwapGroup(source, Place.of(source), storage, host, pool, transfer, counters, 0)
        other = SwapTicket(group, View.of(source[:8]))
        del source, storage
        group.release()
        group.fetch()
        group.restore().sum()
        with side:
            other.restore().sum()
        del other, group
    assert order.violations == []
