"""The counted device: what is on it, and what is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from hf_actswap.engine import BlockingTransfer, HostBuffer
from hf_actswap.engine.host_pool import mapped
from hf_actswap.planner import CountingMeter


@pytest.fixture
def meter() -> Iterator[CountingMeter]:
    meter = CountingMeter()
    meter.start()
    yield meter
    meter.stop()


def test_storages_count_from_their_first_appearance_to_their_end(meter: CountingMeter) -> None:
    a = torch.zeros(100)
    assert meter.allocated_bytes() == 400
    b = a.view(10, 10)[2:]
    c = b.t().add_(1)
    assert meter.allocated_bytes() == 400, "views and in-place ops make nothing"
    d = a + 1
    del a, b
    assert meter.allocated_bytes() == 800
    del c
    assert meter.allocated_bytes() == 400
    assert meter.peak_bytes() == 800
    meter.reset_peak()
    assert meter.peak_bytes() == 400
    del d
    assert meter.allocated_bytes() == 0


def test_what_was_there_before_is_not_counted_unless_owned() -> None:
    weight, other = nn.Parameter(torch.zeros(100)), torch.zeros(50)
    meter = CountingMeter()
    meter.own([weight, weight.t(), weight.data])
    meter.start()
    try:
        assert meter.allocated_bytes() == 400
        other.add_(1)
        kept = other[:10]
        assert meter.allocated_bytes() == 400
        product = torch.mul(other, 2, out=other)
        assert meter.allocated_bytes() == 400
        assert kept.numel() + product.numel() == 60
    finally:
        meter.stop()


def test_the_hosts_copies_are_not_on_the_device(meter: CountingMeter) -> None:
    transfer = BlockingTransfer(torch.device("cpu"))
    source = torch.ones(1024)
    host = HostBuffer(4096, (mapped(4096),), ())
    host.hold(source.dtype, source.shape)
    copy = transfer.offload(source, host)
    assert meter.allocated_bytes() == 4096
    block, _ = transfer.reload(host, copy)
    assert meter.allocated_bytes() == 8192
    assert torch.equal(block, source)


def test_a_limit_rejects_what_exceeds_it(meter: CountingMeter) -> None:
    meter.limit = 1000
    a = torch.zeros(200)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"asks for 400 bytes, and 800 bytes are in use of 1,000"
    ):
        torch.zeros(100)
    assert (meter.rejections, meter.allocated_bytes(), meter.peak_bytes()) == (1, 800, 800)
    assert meter.limit_bytes() == 1000
    a.add_(1)
    assert torch.zeros(50).nbytes == 200


@pytest.mark.parametrize("meter_outside", [True, False])
def test_fake_tensors_count(meter_outside: bool) -> None:
    meter, fake = CountingMeter(), FakeTensorMode()
    first, second = (meter, fake) if meter_outside else (fake, meter)
    with first, second:
        a = torch.zeros(100)
        b = a @ a.view(100, 1)
        assert meter.allocated_bytes() == 404
        del a, b
    assert meter.allocated_bytes() == 0
    assert meter.peak_bytes() == 404
