"""Where the optimizer's states wait, chosen by a training that runs out of memory while it warms up.

Compute's time is that of the aten ops, on a clock; the tensors that the guard evicts take the link's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_actswap import apply
from hf_actswap.engine import BlockingTransfer, Copy, HostBuffer, Link
from hf_actswap.engine.host_pool import HostPool
from hf_actswap.engine.moving_block import MovingBlock
from hf_actswap.engine.swapped_storages import EvictableStorage
from hf_actswap.engine.transfer import _Done, _Spent
from hf_actswap.planner import Planner, start
from hf_actswap.planner.phases import planner as leading
from hf_actswap.planner.planning import PlanningTask, StatesInPassing, states_in_passing
from tests.engine.simulated_transfer import Clock, SimulatedStamp
from tests.engine.tiny_models import tiny_llama

from .simulated_device import on_device

pytest.importorskip("scipy")

FLOP_PER_MS, BYTES_PER_MS = 8e6, 3e5
LINK = Link(1.5e4, 1.5e4, 1.35e4, 1.35e4, 0.001)
SHAPE, MICRO_BATCHES = (2, 64), 4


class Accumulation:
    """What an optimizer of Accelerate has."""

    sync_gradients = True


class OpTimes(TorchDispatchMode):
    """Advances a clock by what each op computes and writes, times ``slower``."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self.slower = clock, 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            made = result if isinstance(result, (tuple, list)) else [result]
            tensors = [item for item in made if isinstance(item, torch.Tensor)]
            flop = 0
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
                flop = 2 * tensors[0].numel() * args[0].shape[-1]
            ms = flop / FLOP_PER_MS + sum(item.nbytes for item in tensors) / BYTES_PER_MS
            self._clock.advance(self.slower * ms)
        return result


class ClockedTransfer(BlockingTransfer):
    """Blocking copies that take a link's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(torch.device("cpu"))
        self._clock = clock

    def stamp(self) -> Any:
        return SimulatedStamp(self._clock.now_ms)

    def link(self) -> Link:
        return LINK

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        super().offload(source, host)
        return self._waited(LINK.out_ms(host.size_bytes))

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        block, _ = super().reload(host, after)
        return block, self._waited(LINK.in_ms(host.size_bytes))

    def _waited(self, ms: float) -> Copy:
        self._clock.advance(ms)
        return _Done(_Spent(ms))


@contextmanager
def trained(
    monkeypatch: pytest.MonkeyPatch,
    limit_bytes: int | None,
    in_backward: bool = False,
    budget_bytes: int | None = None,
    slower: float = 1.0,
    steps: int = 2,
    answers: Sequence[StatesInPassing | None] = (),
) -> Iterator[Any]:
    """Train under ``adaptive``; yield the planner, the losses, and what was to be planned.

    Ops take ``slower`` times as long while the planner warms up. ``answers``: where the states wait; empty:
    it is chosen.
    """
    torch.manual_seed(0)
    model, clock, tasks = tiny_llama().train(), Clock(), []
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    optimizer.gradient_state = Accumulation()
    generator, losses = torch.Generator().manual_seed(0), []
    copy_out, reload, taken = EvictableStorage._copy_out, EvictableStorage._reload, HostPool.take

    def slow_copy_out(storage: EvictableStorage, block: MovingBlock) -> None:
        clock.advance(LINK.out_ms(storage._size_bytes))
        copy_out(storage, block)

    def slow_reload(storage: EvictableStorage, block: MovingBlock) -> torch.Tensor:
        with storage._idle.around_copies():
            clock.advance(LINK.in_ms(storage._size_bytes))
            return reload(storage, block)

    def take(pool: HostPool, size_bytes: int) -> HostBuffer:
        with _disable_current_modes():  # else the host's memory counts as the device's
            return taken(pool, size_bytes)

    def asked(task: PlanningTask, micro_batches: int, on_device: Any) -> Any:
        tasks.append(task)
        if answers:
            return answers[len(tasks) - 1], on_device
        return states_in_passing(task, micro_batches, on_device)

    with ExitStack() as undo:
        patched = undo.enter_context(monkeypatch.context())
        patched.setattr(EvictableStorage, "_copy_out", slow_copy_out)
        patched.setattr(EvictableStorage, "_reload", slow_reload)
        patched.setattr(HostPool, "take", take)
        patched.setattr(start, "_may_move_states", lambda *_: True)  # it moves none on the CPU
        patched.setattr(leading, "states_in_passing", asked)
        device = undo.enter_context(on_device(model, limit_bytes))
        times = undo.enter_context(OpTimes(clock))
        memory = {"mode": "adaptive", "search_steps": 4, "budget_gib": _gib(budget_bytes or limit_bytes)}
        planner = apply(
            model,
            {"memory": {**memory, "optimizer_in_backward": in_backward}},
            optimizer=optimizer,
            meter=device,
            transfer=ClockedTransfer(clock),
        )
        assert isinstance(planner, Planner)
        undo.callback(planner.remove)
        for _ in range(steps):
            times.slower = slower if planner.phase == "warm-up" else 1.0
            for number in range(MICRO_BATCHES):
                optimizer.gradient_state.sync_gradients = number == MICRO_BATCHES - 1
                ids = torch.randint(0, model.config.vocab_size, SHAPE, generator=generator)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                losses.append(loss.item())
                del loss
            optimizer.step()
            optimizer.zero_grad()
        yield planner, losses, tasks


def _gib(size_bytes: int | None) -> float:
    return 1.0 if size_bytes is None else size_bytes / 2**30


def test_a_training_that_evicts_in_warm_up_chooses_as_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trained(monkeypatch, None) as (planner, losses, tasks):
        roomy = tasks[0]
        assert not planner.evicted_bytes
        assert planner.optimizer_states is None, "everything fits"
    limit = math.ceil(0.5 * roomy.unplanned.peak_bytes)
    expected, _ = states_in_passing(replace(roomy, budget_bytes=limit), MICRO_BATCHES)
    assert expected is not None
    with trained(monkeypatch, limit) as (planner, found, tasks):
        assert planner.evicted_bytes > limit
        assert tasks[0].profile.compute_ms == pytest.approx(roomy.profile.compute_ms)
        assert tasks[0].profile.outside_ms == pytest.approx(roomy.profile.outside_ms)
        chosen, _ = states_in_passing(tasks[0], MICRO_BATCHES)
        assert chosen is not None
        assert astuple(chosen) == pytest.approx(astuple(expected), rel=0.02)
        assert planner.optimizer_states is not None
    assert found == losses


def test_states_may_move_in_the_search_where_ops_are_faster_than_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trained(monkeypatch, None) as (planner, _, tasks):
        budget, compute_ms = math.ceil(0.54 * tasks[0].unplanned.peak_bytes), tasks[0].profile.compute_ms
    moved = StatesInPassing(resident_bytes=0, ms=1.0, kept_ms=2.0)
    with trained(monkeypatch, None, budget_bytes=budget, slower=16.0, steps=4, answers=[None, moved]) as (
        planner,
        _,
        tasks,
    ):
        recorded, corrected = tasks
        assert recorded.profile.compute_ms == pytest.approx(16 * compute_ms)
        assert corrected.profile.compute_ms == pytest.approx(compute_ms, rel=0.4)  # copies are ops too
        assert corrected.step.profile.compute_ms == corrected.profile.compute_ms
        assert planner.optimizer_states is not None
        assert planner.phase == "search"
        assert [len(trial.steps) for trial in planner.trials] == [2]


def test_a_step_in_backward_is_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for in_backward in (False, True):
        with trained(monkeypatch, None, in_backward) as (_, losses, tasks):
            found.append((losses, tasks[0].profile))
    assert found[0][0] == found[1][0]
    assert found[1][1].compute_ms == pytest.approx(found[0][1].compute_ms)
    assert found[1][1].outside_ms < 0.1 * found[0][1].outside_ms
