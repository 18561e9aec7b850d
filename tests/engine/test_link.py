"""Rates of the link: their arithmetic anywhere, their measurement on an accelerator."""

from __future__ import annotations

from dataclasses import asdict, astuple, replace
from typing import Any

import pytest
import torch

from hf_actswap.engine import Link
from hf_actswap.engine import link as link_module
from hf_actswap.engine.link import DuplexLink, link_of_times, measure_link, slowest
from tests.rehearsed import skip_times

LINK = Link(8.0, 4.0, 6.0, 2.0, latency_ms=0.5)


def test_a_copy_costs_its_latency_and_its_bytes() -> None:
    assert LINK.out_ms(16) == 2.5
    assert LINK.in_ms(16) == 4.5


@pytest.mark.parametrize("wrong", [*({rate: 0.0} for rate in list(asdict(LINK))[:4]), {"latency_ms": -0.1}])
def test_a_link_without_a_rate_or_with_a_negative_latency_is_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive rates and a latency that is not negative"):
        replace(LINK, **wrong)


def test_the_slowest_link_is_the_worst_of_each_number() -> None:
    links = [LINK, Link(7.0, 5.0, 6.5, 1.0, 0.1), Link(9.0, 4.5, 3.0, 4.0, 0.7)]
    assert slowest(links) == slowest(reversed(links)) == Link(7.0, 4.0, 3.0, 1.0, 0.7)
    assert slowest([LINK]) == LINK
    with pytest.raises(ValueError, match="no links to take the slowest of"):
        slowest([])


def test_rates_from_times_that_end_together() -> None:
    assert link_of_times(100, 2.0, 4.0, 5.0, 5.0) == Link(50.0, 25.0, 20.0, 20.0)


def test_what_the_later_copied_alone_is_not_counted() -> None:
    """100 bytes each way: out ends at 4 ms; back needs 2 ms more at 25 bytes/ms, so it had moved 50."""
    assert link_of_times(100, 2.0, 4.0, 4.0, 6.0) == Link(50.0, 25.0, 25.0, 12.5)


def test_rates_beside_each_other_stay_between_nothing_and_alone() -> None:
    assert link_of_times(100, 2.0, 4.0, 1.0, 4.0) == Link(50.0, 25.0, 50.0, 25.0)  # noise: faster than alone
    assert link_of_times(100, 2.0, 4.0, 2.0, 6.0) == Link(50.0, 25.0, 50.0, 0.25)  # one way at a time


def test_both_directions_slow_each_other_while_both_are_busy() -> None:
    """20 bytes out from 0, 9 back from 1: alone 8/ms, together 6 and 2, alone again 4/ms."""
    duplex = DuplexLink(replace(LINK, latency_ms=0.0))
    duplex.enqueue(duplex.out, 0, 20, 0.0)
    duplex.enqueue(duplex.back, 0, 9, 1.0)
    assert duplex.wait(duplex.out, 0, 1.0) == 3.0  # 8 in 1 ms, 12 in 2 ms
    assert duplex.wait(duplex.back, 0, 3.0) == 4.25  # 4 in 2 ms, 5 in 1.25 ms
    assert duplex.wait(duplex.out, 0, 5.0) == 5.0


def test_copies_of_one_direction_run_one_after_another() -> None:
    duplex = DuplexLink(LINK)
    for item, now_ms in enumerate([0.0, 0.0, 9.0]):
        duplex.enqueue(duplex.out, item, 16, now_ms)
    assert [duplex.wait(duplex.out, item, 9.0) for item in (1, 2)] == [9.0, 11.5]
    assert duplex.out.finish_ms == {0: 2.5, 1: 5.0, 2: 11.5}
    with pytest.raises(KeyError):
        duplex.wait(duplex.back, 0, 12.0)


@pytest.mark.parametrize(("room", "piece"), [(2**40, 64 * 2**20), (5 * 2**20, 4 * 2**20), (2**20, 2**20)])
def test_the_measurement_times_each_way_and_both(
    room: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With smaller copies on a device with little room."""
    calls: list[tuple[list[str], int]] = []
    empty = torch.empty

    def with_room(size: int, *, device: Any = None, pin_memory: bool = False, **kind: Any) -> Any:
        if device is not None and size > room:
            raise torch.OutOfMemoryError("no room")
        return empty(size, device=device, **kind)

    def copies_ms(_device: torch.device, pairs: Any, repeats: int) -> list[float]:
        ways = ["out" if target.device.type == "cpu" else "in" for target, _ in pairs]
        assert all(target.device != source.device for target, source in pairs)
        assert {part.nbytes for pair in pairs for part in pair} == {piece}
        calls.append((ways, repeats))
        return [{"out": 2.0, "in": 4.0}[direction] * len(ways) for direction in ways]

    monkeypatch.setattr(torch, "empty", with_room)
    monkeypatch.setattr(link_module, "_copies_ms", copies_ms)
    measured = measure_link(torch.device("meta"))
    assert calls == [(["out", "in"], 1), (["out"], 4), (["in"], 4), (["out", "in"], 4)]
    assert measured == link_of_times(4 * piece, 2.0, 4.0, 4.0, 8.0)


def test_what_cannot_be_measured_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a CPU has no link to measure"):
        measure_link(torch.device("cpu"))

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        measure_link(torch.device("meta"))


@pytest.mark.gpu
def test_a_link_is_measured_on_an_accelerator() -> None:
    skip_times()
    accelerator = torch.accelerator.current_accelerator()
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    first, second = measure_link(device), measure_link(device)
    for one, two in zip(astuple(first)[:4], astuple(second)[:4], strict=True):
        assert one == pytest.approx(two, rel=0.25)
        assert 1e5 < one < 2e9  # 0.1 GB/s to 2 TB/s
    assert first.out_beside_in_bytes_per_ms <= first.out_bytes_per_ms
    assert first.in_beside_out_bytes_per_ms <= first.in_bytes_per_ms
