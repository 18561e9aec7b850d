"""Swap on a stage of a pipeline: bytes on the device in each pass, and when copies begin, as integers.

A stage is a whole small model here, whose passes run in the order of the schedule, in one process. Copies go
by a simulated clock: a leaf module's forward takes 1 ms and its backward 2 ms, together 44 and 86 a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_actswap.apply import apply_plan
from hf_actswap.engine import (
    Copy,
    HostBuffer,
    Link,
    PageableSlabs,
    Resources,
    StreamTransfer,
    Transfer,
    host_budget,
    schedule,
)
from hf_actswap.engine.schedule import Pass, PassOrder, Point
from hf_actswap.engine.step_watch import TimeWatch
from hf_actswap.engine.tickets import SwapGroup
from hf_actswap.pipeline.runtime import order_of_passes, schedule_class
from hf_actswap.plan import PlanRow, Windows, model_structure
from tests.engine.disorderly_transfer import Direction, DisorderlyTransfer, Machine
from tests.engine.pretended_streams import CPU, StreamOrder, pretend
from tests.engine.simulated_transfer import Clock, SimulatedCopy, SimulatedStamp, SimulatedTransfer
from tests.engine.tiny_models import (
    VOCABULARY,
    assert_bitwise_equal,
    gradients,
    plan_of,
    tiny_llama,
)

STAGES, COUNT = 4, 8
ONE_BYTES = 248_832
"""What a forward swaps."""
STORAGES = 68
"""In so many copies each way."""
LONG, SHORT = 1000, 20
"""Operators of lead: more than a pass has, and a tenth of it."""
FORWARD_MS, BACKWARD_MS = 44.0, 86.0
RATE = 3000.0
"""Bytes per ms each way: a micro-batch takes 83 ms, more than a forward and less than both passes."""


@pytest.fixture(scope="module", autouse=True)
def _pageable() -> Iterator[None]:
    """Page-locked memory needs an accelerator; what it is changes nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_budget, "PinnedSlabs", lambda *_: PageableSlabs())
        yield


class CountingTransfer(SimulatedTransfer):
    """Counts swapped bytes on the device, and notes when copies back begin.

    Attributes:
        running: the pass that runs.
        begun: (pass, micro-batch whose tensor comes) of each copy back.
        too_early: how many copies back began while the device still held the tensor.
        most_bytes: on the device, by pass.
    """

    def __init__(self, clock: Clock, rate: float) -> None:
        super().__init__(clock, Link(rate, rate, rate, rate, 0.0))
        self.running = Pass(0, 0, False)
        self.begun: list[tuple[Pass, int]] = []
        self.too_early = 0
        self.most_bytes: dict[Pass, int] = {}
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self._outs: dict[Copy, tuple[int, StorageWeakRef]] = {}
        clock.listeners.append(self._count)

    def offload(self, source: torch.Tensor, host: HostBuffer) -> SimulatedCopy:
        """See `Transfer`."""
        storage = StorageWeakRef(source.untyped_storage())
        self._storages.append((storage, host.size_bytes))
        copy = super().offload(source, host)
        self._outs[copy] = self.running.micro_batch, storage
        self._count()
        return copy

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, SimulatedCopy]:
        """See `Transfer`."""
        block, copy = super().reload(host, after)
        self._storages.append((StorageWeakRef(block.untyped_storage()), host.size_bytes))
        micro_batch, storage = self._outs[after]
        self.begun.append((self.running, micro_batch))
        self.too_early += not storage.expired()
        self._count()
        return block, copy

    def copy_stamp(self, direction: Direction) -> SimulatedStamp:
        """When the copies of a direction end."""
        return SimulatedStamp(self._out_end_ms if direction == "out" else self._in_end_ms)

    def bytes_now(self) -> int:
        """On the device."""
        self._storages = [entry for entry in self._storages if not entry[0].expired()]
        return sum(size_bytes for _, size_bytes in self._storages)

    def _count(self) -> None:
        self.most_bytes[self.running] = max(self.most_bytes.get(self.running, 0), self.bytes_now())


class Stage:
    """A model under a plan, and the passes of its steps.

    Args:
        transfer: how bytes move; ``None``: there is no plan.
        prefetch_ops: of the windows; ``None``: auto.
        order: that really runs.
    """

    def __init__(self, transfer: Transfer | None, prefetch_ops: int | None, order: Sequence[Pass]) -> None:
        self.model, self.passes, self._order = tiny_llama(), PassOrder(), order
        windows = None if prefetch_ops is None else Windows.of_prefetch(prefetch_ops)
        self._plan = plan_of(*(PlanRow(layer, "", "swap", windows=windows) for layer in range(4)))
        self.applied = None
        if transfer is not None:
            resources = Resources(transfer, passes=self.passes)
            self.applied = apply_plan(self.model, self._plan, model_structure(self.model), resources)

    def step(
        self,
        told: Sequence[Pass] = (),
        starts: Callable[[Pass], object] = id,
        ends: Callable[[Pass], object] = id,
    ) -> dict[str, torch.Tensor]:
        """Run all passes; return the gradients.

        Args:
            told: the order that the engine is told.
            starts, ends: called with each pass.
        """
        self.model.zero_grad()
        losses: dict[int, torch.Tensor] = {}
        self.passes.begin(told)
        for one in self._order:
            starts(one)
            if one.is_backward:
                losses.pop(one.micro_batch).backward()
            else:
                self.passes.forward_follows(one.chunk, one.micro_batch)
                generator = torch.Generator().manual_seed(one.micro_batch)
                ids = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
                losses[one.micro_batch] = self.model(input_ids=ids, labels=ids).loss
            ends(one)
        self.passes.end()
        return gradients(self.model)


class Counted:
    """The second step of a stage (auto: the third), on the simulated clock. Gradients must be those without
    a plan.

    Attributes:
        after: bytes on the device at the end of each pass.
        ms: that each pass took.
        transfer: what it has counted.
    """

    def __init__(
        self, order: Sequence[Pass], told: Sequence[Pass], prefetch_ops: int | None = LONG, rate: float = RATE
    ) -> None:
        clock = Clock()
        self.transfer = CountingTransfer(clock, rate)
        stage = Stage(self.transfer, prefetch_ops, order)
        clock.drive(stage.model)
        for _ in range(1 if prefetch_ops is not None else 2):
            stage.step(told)
        self.transfer.most_bytes.clear()
        self.transfer.begun.clear()
        self.transfer.too_early = 0
        self.after: list[int] = []
        times_ms = [clock.now_ms]

        def starts(one: Pass) -> None:
            self.transfer.running = one

        def ends(_one: Pass) -> None:
            self.after.append(self.transfer.bytes_now())
            times_ms.append(clock.now_ms)

        found = stage.step(told, starts, ends)
        self.ms = [round(end - start, 6) for start, end in pairwise(times_ms)]
        assert_bitwise_equal(found, without_plan(len(order) // 2))
        assert stage.applied is not None
        self.stats = stage.applied.stats()
        stage.applied.remove()

    @property
    def peak_bytes(self) -> int:
        """The most on the device."""
        return max(self.transfer.most_bytes.values())


@cache
def without_plan(count: int) -> dict[str, torch.Tensor]:
    """Gradients of a step."""
    return Stage(None, 0, order_of_passes("1f1b", count, 2, 1)).step()


def where(order: Sequence[Pass], begun: Sequence[tuple[Pass, int]]) -> dict[int, int]:
    """Count copies back by how many passes before their backward they began."""
    found: dict[int, int] = {}
    for one, micro_batch in begun:
        backward = next(p for p in order if p.is_backward and p.micro_batch == micro_batch)
        distance = order.index(backward) - order.index(one)
        found[distance] = found.get(distance, 0) + 1
    return found


def one_f_one_b(stage: int) -> tuple[Pass, ...]:
    return order_of_passes("1f1b", COUNT, STAGES, stage)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("prefetch_ops", [LONG, pytest.param(SHORT, marks=pytest.mark.slow)])
def test_without_an_order_each_pass_is_treated_alone(stage: int, prefetch_ops: int) -> None:
    """All is released where a forward ends, for which compute waits; all comes back within the backward."""
    order = one_f_one_b(stage)
    counted = Counted(order, (), prefetch_ops)
    assert counted.after == [0] * 16
    assert where(order, counted.transfer.begun) == {0: STORAGES * COUNT}
    assert all(ms > FORWARD_MS + 20 for one, ms in zip(order, counted.ms, strict=True) if not one.is_backward)
    assert counted.peak_bytes <= ONE_BYTES


@pytest.mark.parametrize(("stage", "ahead"), [(0, 4), pytest.param(1, 3, marks=pytest.mark.slow), (2, 2)])
def test_long_windows_cross_the_ends_of_passes(stage: int, ahead: int) -> None:
    order = one_f_one_b(stage)
    counted = Counted(order, order)
    forward_end, left = 356_608, 178_304
    alone = [left] * (ahead - 1)
    assert counted.after == [*alone, *[forward_end, 0] * (COUNT - ahead), forward_end, *alone, 0]
    assert where(order, counted.transfer.begun) == {1: 48 * COUNT, 0: 20 * COUNT}
    assert counted.peak_bytes == 360_704 <= 1.5 * ONE_BYTES
    assert counted.transfer.too_early == 0
    steady = range(ahead + 1, 16 - ahead)
    expected = [BACKWARD_MS if order[index].is_backward else FORWARD_MS for index in steady]
    assert [counted.ms[index] for index in steady] == expected
    assert sum(counted.ms) < sum(Counted(order, ()).ms) - 200


@pytest.mark.slow
def test_short_windows_cross_them_as_far_as_they_reach() -> None:
    order = one_f_one_b(0)
    counted = Counted(order, order, SHORT)
    assert set(where(order, counted.transfer.begun)) == {0, 1}
    assert 0 < counted.after[0] < ONE_BYTES // 4


def test_the_last_stage_is_as_without_an_order() -> None:
    order = one_f_one_b(3)
    counted, alone = Counted(order, order), Counted(order, ())
    assert (counted.after, counted.ms) == (alone.after, alone.ms)
    assert counted.transfer.most_bytes == alone.transfer.most_bytes
    assert counted.transfer.begun == alone.transfer.begun


def test_auto_swaps_all_that_the_passes_between_can_hide() -> None:
    """Two steps keep all. Then stage 0 swaps all, the last stage what one forward and backward hide."""
    order, last = one_f_one_b(0), one_f_one_b(3)
    counted, alone = Counted(order, order, None), Counted(last, last, None)
    assert counted.stats.offloads == STORAGES * COUNT
    assert alone.stats.offloaded_bytes < 0.6 * counted.stats.offloaded_bytes
    assert alone.stats.stalls == counted.stats.late_prefetches == 0
    steady = range(5, 12)
    expected = [BACKWARD_MS if order[index].is_backward else FORWARD_MS for index in steady]
    assert [counted.ms[index] for index in steady] == expected
    assert set(where(order, counted.transfer.begun)) == {0, 1}
    assert counted.transfer.too_early == 0
    assert counted.peak_bytes <= 1.5 * ONE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("rate", [800.0, 1500.0])
def test_auto_leaves_what_a_slow_link_cannot_hide(rate: float) -> None:
    order = one_f_one_b(0)
    counted, alone = Counted(order, order, None, rate), Counted(order, (), None, rate)
    assert alone.stats.offloaded_bytes < counted.stats.offloaded_bytes < ONE_BYTES * COUNT
    steady = range(5, 12)
    expected = [BACKWARD_MS if order[index].is_backward else FORWARD_MS for index in steady]
    assert [counted.ms[index] for index in steady] == expected


def test_one_pass_between() -> None:
    """Its middle separates what leaves from what comes."""
    order = order_of_passes("gpipe", 2, STAGES, 0)
    counted = Counted(order, order)
    assert set(where(order, counted.transfer.begun)) == {0, 1}
    assert counted.transfer.too_early == 0
    assert counted.peak_bytes <= 1.5 * ONE_BYTES


def other_micro_batches(order: Sequence[Pass]) -> list[Pass]:
    """The order with the micro-batches of backwards reversed."""
    return [
        one._replace(micro_batch=COUNT - 1 - one.micro_batch) if one.is_backward else one for one in order
    ]


def test_a_wrong_order_costs_time_and_no_bit() -> None:
    """An order names the wrong micro-batch: `Counted` finds the gradients right, and `where` the fault."""
    order = one_f_one_b(0)
    counted = Counted(order, other_micro_batches(order))
    assert set(where(order, counted.transfer.begun)) - {0, 1}


def test_a_copy_back_before_the_release_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine with a fault: copies back do not ask whether the device still has the data."""

    def fetch_at_once(group: SwapGroup) -> None:
        place, group.place = group.place, "host"
        fetch(group)
        group.place = place

    fetch = SwapGroup.fetch
    add = PassOrder._add

    def add_swapped(order: PassOrder, point: Point, reference: schedule.Swapped, is_release: bool) -> None:
        add(order, point, reference, not is_release)

    order = one_f_one_b(0)
    monkeypatch.setattr(PassOrder, "_add", add_swapped)
    assert Counted(order, order).transfer.too_early == 0  # swapped alone they do nothing
    monkeypatch.setattr(SwapGroup, "fetch", fetch_at_once)
    assert Counted(order, order).transfer.too_early > 0


@pytest.mark.parametrize("never_waits", [None, "out", pytest.param("in", marks=pytest.mark.slow)])
def test_memory_is_not_given_back_before_its_copy_is_complete(never_waits: Direction | None) -> None:
    """Copies that end at odd times, in other micro-batches' passes; a fault in waiting for them is found."""
    order, machine = one_f_one_b(1), Machine([1, 7, 3])
    transfer = DisorderlyTransfer(machine, [11, 2, 40], [5, 31], never_waits)
    stage = Stage(transfer, LONG, order)
    for module in stage.model.modules():
        module.register_forward_hook(machine.beat)
    found = [stage.step(order, machine.beat, machine.beat) for _ in range(2)][-1]
    machine.finish()
    same = all(torch.equal(found[name], wanted) for name, wanted in without_plan(COUNT).items())
    assert (same and not machine.violations) is (never_waits is None)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(None, marks=pytest.mark.slow),
        ("compute", "out"),
        pytest.param(("compute", "in"), marks=pytest.mark.slow),
        pytest.param(("in", "compute"), marks=pytest.mark.slow),
    ],
)
def test_streams(pair: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked operator by operator with vector clocks: a wait that is left out is found, and only then."""
    order, streams = one_f_one_b(0), StreamOrder(1, unwaited=() if pair is None else (pair,))
    pretend(monkeypatch, streams)
    stage = Stage(StreamTransfer(CPU), LONG, order)
    with streams.watching():
        found = [stage.step(order) for _ in range(2)][-1]
    assert_bitwise_equal(found, without_plan(COUNT))
    assert bool(streams.violations) is (pair is not None)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_lies_between_passes_is_waiting(stage: int) -> None:
    """The stage waits 7 ms ahead of each pass; the loss's and the head's time is none of that."""
    order, clock = order_of_passes("1f1b", 3, 2, stage), Clock()
    trained = Stage(CountingTransfer(clock, 1e9), LONG, order)
    clock.drive(trained.model)
    trained.step(order)
    assert trained.applied is not None
    watch = TimeWatch(trained.model, trained.applied)
    trained.step(order, lambda _: clock.advance(7))
    watch.optimizer_starts()
    timeline = watch.timeline()
    assert timeline.waiting_ms == pytest.approx(7 * len(order), abs=0.1)
    assert timeline.step_ms == pytest.approx(len(order) * 7 + 3 * (FORWARD_MS + BACKWARD_MS), abs=0.1)


def test_a_step_that_dies_leaves_nothing_to_the_next() -> None:
    order = one_f_one_b(0)
    stage = Stage(CountingTransfer(Clock(), RATE), LONG, order)

    def dies(last: Pass, one: Pass) -> None:
        if one == last:
            raise ValueError("fault")

    for last in (order[3], order[4], order[7]):
        with pytest.raises(ValueError, match="fault"):
            stage.step(order, starts=partial(dies, last))
        assert stage.applied is not None
        assert stage.applied.stats().live_swaps == 0
        assert_bitwise_equal(stage.step(order), without_plan(COUNT))


def test_orders() -> None:
    """Golden: the order of torch's schedules, which `test_staged` compares with pipelines that run."""

    def text(*arguments: object) -> str:
        found = order_of_passes(*arguments)  # type: ignore[arg-type]
        return " ".join(f"{'B' if one.is_backward else 'F'}{one.micro_batch}" for one in found)

    assert text("1f1b", 5, 3, 0) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert text("1f1b", 5, 3, 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert text("1f1b", 2, 3, 1) == "F0 F1 B0 B1"  # too few micro-batches: GPipe's
    assert text("gpipe", 3, 3, 2) == "F0 F1 F2 B0 B1 B2"


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("name", "count"), [("interleaved_1f1b", 8), ("interleaved_1f1b", 5), ("gpipe", 6)])
def test_orders_of_several_chunks_are_those_of_torch(name: Any, count: int, stage: int) -> None:
    facts = SimpleNamespace(
        **{"_stages": [0, 1], "n_local_stages": 2, "pp_group_size": 4, "_n_microbatches": count},
        microbatches_per_round=count // max(1, count // 4),
    )
    kind: Any = schedule_class(name, count, 4, 2)
    actions = kind._calculate_single_rank_operations(facts, stage)
    wanted = [
        Pass(action.stage_index, action.microbatch_index, action.computation_type.value == "B")
        for action in actions
        if action is not None
    ]
    assert list(order_of_passes(name, count, 4, stage, 2)) == wanted
