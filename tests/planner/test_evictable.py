"""Kept tensors that leave the device when asked to, and come back when backward reads them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hf_actswap.engine import EvictableTensors, HostPool, PageableSlabs, StaleTensorError
from hf_actswap.engine.swapped_storages import EvictableTicket
from hf_actswap.engine.tickets import restore

CPU = torch.device("cpu")
EVERYTHING = 2**60


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


@pytest.fixture
def idle() -> EvictableTensors:
    return EvictableTensors(CPU, min_tensor_bytes=64)


def saving(idle: EvictableTensors) -> saved_tensors_hooks:
    """Let autograd keep tickets of ``idle``."""
    return saved_tensors_hooks(lambda tensor: idle.keep(tensor.detach()), restore)


def fresh(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_an_evicted_tensor_comes_back_as_it_was(idle: EvictableTensors) -> None:
    tensor = fresh(16, 8)
    expected, gone = tensor.clone(), weakref.ref(tensor.untyped_storage())
    ticket = idle.keep(tensor.detach())
    assert isinstance(ticket, EvictableTicket)
    assert idle.evict(1) == 0, "this test holds it"
    del tensor
    assert idle.idle_bytes == 512
    assert idle.evict(1) == 512
    assert gone() is None
    assert idle.evict(1) == 0, "once is enough"
    found = ticket.restore()
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_the_oldest_goes_first_and_no_more_than_wanted(idle: EvictableTensors) -> None:
    tickets = [idle.keep(fresh(32, seed=seed)) for seed in range(4)]
    again = tickets[0].restore()  # type: ignore[union-attr]
    tickets.append(idle.keep(again.detach()))  # saved once more: backward reads it sooner now
    del again
    assert idle.evict(129) == 256
    on_device = [bool(ticket._storage._tensors) for ticket in tickets]  # type: ignore[union-attr]
    assert on_device == [True, False, False, True, True]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.t(),
    "row slice": lambda base: base[3:7],
    "column slice": lambda base: base[:, 2:5],
    "expanded": lambda base: base[:1].expand(4, 8),
    "every other": lambda base: base[::2, ::3],
    "other dtype": lambda base: base.view(torch.int32),
    "flat": lambda base: base.view(-1)[5:],
    "scalar": lambda base: base[3, 3],
}


def test_views_share_one_host_copy(idle: EvictableTensors) -> None:
    base = fresh(16, 8)
    expected = {name: view(base).clone() for name, view in VIEWS.items()}
    strides = {name: view(base).stride() for name, view in VIEWS.items()}
    tickets = {name: idle.keep(view(base).detach()) for name, view in VIEWS.items()}
    del base
    assert idle.evict(EVERYTHING) == 512
    assert idle.counters.offloads == 1
    for repeat in (1, 2):  # a second backward fetches its own
        for name, ticket in tickets.items():
            found = restore(ticket)
            assert torch.equal(found, expected[name]), name
            assert found.stride() == strides[name], name
        assert idle.counters.prefetches == repeat, "once for all views"


def test_a_block_that_came_back_goes_again_for_nothing(idle: EvictableTensors) -> None:
    base = fresh(64)
    expected = base.clone()
    tickets = [idle.keep(base.detach()), idle.keep(base[:32].detach())]
    del base
    idle.evict(EVERYTHING)
    found = restore(tickets[0])
    assert idle.evict(EVERYTHING) == 0, "a reader has it"
    del found
    assert idle.evict(EVERYTHING) == 256, "another reader is expected, but can wait"
    assert (idle.counters.offloads, idle.counters.prefetches) == (1, 1)
    assert torch.equal(restore(tickets[1]), expected[:32])
    assert (idle.counters.offloads, idle.counters.prefetches) == (1, 2)


def test_what_a_reader_has_is_not_evicted(idle: EvictableTensors) -> None:
    ticket = idle.keep(fresh(64))
    found = restore(ticket)
    assert idle.evict(EVERYTHING) == 0
    del found
    assert idle.evict(EVERYTHING) == 256


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 4).to_sparse(),
        lambda: torch.randn(64, dtype=torch.complex64).conj(),
        lambda: torch.randn(8),
        lambda: torch.empty(0),
        lambda: torch.randn(64, device="meta"),
        lambda: torch.randn(64).as_subclass(Tagged),
    ],
    ids=["sparse", "conjugated", "small", "empty", "elsewhere", "subclass"],
)
def test_what_is_rejected_is_kept(idle: EvictableTensors, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    ticket = idle.keep(tensor)
    assert isinstance(ticket, tuple)
    assert restore(ticket) is tensor


def test_parameters_and_their_views_stay(idle: EvictableTensors) -> None:
    weight = nn.Parameter(fresh(16, 16))
    tickets = [idle.keep(weight.detach()), idle.keep(weight.t().detach())]
    assert idle.evict(EVERYTHING) == 0
    assert restore(tickets[0]).data_ptr() == weight.data_ptr()


def test_a_resized_storage_is_left_alone(idle: EvictableTensors) -> None:
    """FSDP frees what it gathered by resizing to nothing, and gathers again into the same storage."""
    tensor = fresh(64)
    ticket = idle.keep(tensor)
    del tensor
    kept = ticket._storage._tensors[0]  # type: ignore[union-attr]
    kept.untyped_storage().resize_(0)
    assert idle.evict(EVERYTHING) == 0
    kept.untyped_storage().resize_(256)
    del kept
    assert idle.evict(EVERYTHING) == 256


def test_a_change_after_saving_is_an_error(idle: EvictableTensors) -> None:
    base = fresh(64)
    early = idle.keep(base.detach())
    base.add_(1)
    late, expected = idle.keep(base.detach()), base.clone()
    with pytest.raises(StaleTensorError):
        restore(early)
    del base
    idle.evict(EVERYTHING)
    with pytest.raises(StaleTensorError):
        restore(early)
    assert torch.equal(restore(late), expected)


def test_a_change_by_a_reader_is_an_error_for_the_next(idle: EvictableTensors) -> None:
    base = fresh(64)
    tickets = [idle.keep(base.detach()), idle.keep(base.view(8, 8).detach())]
    del base
    idle.evict(EVERYTHING)
    restore(tickets[0]).mul_(2)
    with pytest.raises(StaleTensorError):
        restore(tickets[1])


def test_tickets_leave_nothing_behind(idle: EvictableTensors) -> None:
    pool = HostPool(PageableSlabs(), slab_bytes=1)
    idle.pool = pool
    tickets = [idle.keep(fresh(64, seed=seed)) for seed in range(3)]
    idle.evict(300)
    assert pool.used_bytes == 512
    found = restore(tickets[0])
    assert torch.equal(found, fresh(64, seed=0))
    tickets.clear()
    del found
    assert pool.used_bytes == 0
    assert not idle._known
    pool.close()


def test_a_full_pool_means_staying(idle: EvictableTensors) -> None:
    idle.pool = HostPool(PageableSlabs(), cap_bytes=256, slab_bytes=1)
    tickets = [idle.keep(fresh(64, seed=seed)) for seed in range(3)]
    assert idle.evict(EVERYTHING) == 256
    for seed, ticket in enumerate(tickets):
        assert torch.equal(restore(ticket), fresh(64, seed=seed))


def test_a_ticket_in_a_cycle_is_collected(idle: EvictableTensors) -> None:
    holder: dict[str, Any] = {"ticket": idle.keep(fresh(64))}
    holder["self"] = holder
    idle.evict(EVERYTHING)
    del holder
    gc.collect()
    assert not idle._known


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[module for _ in range(4) for module in (nn.Linear(16, 16), nn.GELU(), nn.Softmax(-1))]
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [item.grad.clone() for item in model.parameters() if item.grad is not None]


def test_every_saved_tensor_evicted_and_backward_twice(idle: EvictableTensors) -> None:
    x = fresh(8, 16)
    plain = network()
    plain(x).sum().backward()
    expected = gradients(plain)
    model = network()
    with saving(idle):
        loss = model(x).sum()
    assert idle.evict(EVERYTHING) > 0
    loss.backward(retain_graph=True)
    assert all(map(torch.equal, gradients(model), expected))
    idle.evict(EVERYTHING)
    model.zero_grad()
    loss.backward()
    assert all(map(torch.equal, gradients(model), expected))
    del loss
    assert not idle._known


def test_an_exception_in_mid_step_leaves_nothing(idle: EvictableTensors) -> None:
    model = network()

    def fail(*_: object) -> None:
        raise KeyError("in mid-step")

    model[6].register_forward_hook(fail)

    def step() -> None:
        with saving(idle):
            model(fresh(8, 16))

    with pytest.raises(KeyError):
        step()
    gc.collect()
    assert not idle._known


def test_two_forwards_before_two_backwards(idle: EvictableTensors) -> None:
    inputs = [fresh(8, 16, seed=seed) for seed in (1, 2)]
    plain = network()
    for x in inputs:
        plain(x).sum().backward()
    model = network()
    with saving(idle):
        losses = [model(x).sum() for x in inputs]
    idle.evict(EVERYTHING)
    for loss in losses:
        loss.backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_threads_may_read_and_evict_at_once(idle: EvictableTensors) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        for turn in range(60):
            expected = fresh(64, seed=100 * seed + turn)
            tickets = [idle.keep(expected.clone()) for _ in range(3)]
            idle.evict(300)
            failures.extend(f"{seed}.{turn}" for item in tickets if not torch.equal(restore(item), expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not idle._known


def test_taking_host_memory_and_copying_out_count_as_no_time_of_an_op(
    idle: EvictableTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locking takes seconds: counted, an op would seem to take these, and much to hide beside it."""
    happened: list[str] = []

    @contextmanager
    def paused() -> Iterator[None]:
        happened.append("pause")
        yield
        happened.append("go on")

    idle.around_copies, idle.pool = paused, HostPool(PageableSlabs())
    take = idle.pool.take
    monkeypatch.setattr(idle.pool, "take", lambda size: happened.append("take") or take(size))
    ticket = idle.keep(fresh(16, 8))
    assert idle.evict(1) == 512
    assert happened == ["pause", "take", "go on"]
    assert torch.equal(ticket.restore(), fresh(16, 8))  # type: ignore[union-attr]
    assert happened[3:] == ["pause", "go on"]
