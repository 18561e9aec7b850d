"""A rehearsal with a clock: work takes the time that the device's rates say, and Python's clocks show it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_actswap.planner import device_rates
from hf_actswap.rehearsal import Options, build, environment
from hf_actswap.rehearsal.launch import settings_of
from tests.rehearsal.test_launch import BUILT

RATES = device_rates("H200")
TIMED = """
import time
from functools import partial
import torch

def timed(run):
    run()
    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start = time.perf_counter()
    began.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    print(began.elapsed_time(ended), 1e3 * (time.perf_counter() - start))

square = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
out = torch.empty_like(square)
device = torch.empty(2**30, dtype=torch.uint8, device="cuda")
back = torch.empty_like(device)
host, other = (torch.empty(2**30, dtype=torch.uint8, pin_memory=True) for _ in range(2))
side = torch.cuda.Stream()

def both_ways():
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        back.copy_(other, non_blocking=True)
    host.copy_(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)

timed(lambda: [torch.mm(square, square, out=out) for _ in range(20)])
experts = torch.empty(4, 8192, 8192, dtype=torch.bfloat16, device="cuda")
ends = torch.arange(1, 5, dtype=torch.int32, device="cuda") * 2048
timed(lambda: [torch._grouped_mm(square, experts, offs=ends) for _ in range(5)])
images = torch.empty(512, 1024, 32, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
for groups in 1, 1024:
    weight = torch.empty(1024, 1024 // groups, 3, 3, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    made = torch.nn.functional.conv2d(images, weight, padding=1, groups=groups)
    gradient = torch.empty_like(made)
    backward = partial(torch.autograd.grad, made, (images, weight), gradient, retain_graph=True)
    timed(lambda: [backward() for _ in range(5)])
timed(lambda: [torch.add(square, square, out=out) for _ in range(50)])
timed(lambda: host.copy_(device, non_blocking=True))
timed(both_ways)
"""


def test_the_rates_are_those_of_the_planners_table() -> None:
    settings = settings_of(Options("H200", clock=True), BUILT)
    assert float(settings["half_flop_per_ms"]) == RATES.half_flop_per_ms
    assert RATES.link is not None
    assert float(settings["out_bytes_per_ms"]) == RATES.link.out_bytes_per_ms
    assert "clock" not in settings_of(Options("H200"), BUILT)


@pytest.mark.rehearsal
def test_work_takes_the_time_that_the_rates_say() -> None:
    options = Options("H200", arithmetic="none", races=False, clock=True)
    found = environment(options, build())
    done = subprocess.run(
        [sys.executable, "-c", TIMED], env=found, capture_output=True, text=True, timeout=120, check=True
    )
    times = [[float(number) for number in line.split()] for line in done.stdout.splitlines()]
    link = RATES.link
    assert link is not None
    expected = (
        20 * 2 * 8192**3 / RATES.half_flop_per_ms,
        5 * 2 * 8192**3 / RATES.half_flop_per_ms,  # each row meets one of the experts
        5 * 2 * 2 * 512 * 32**2 * 1024**2 * 9 / RATES.half_flop_per_ms,
        5 * 3 * 512 * 32**2 * 1024 * 2 / RATES.bytes_per_ms,  # as many groups as channels: little arithmetic
        50 * 3 * 8192**2 * 2 / RATES.bytes_per_ms,
        2**30 / link.out_bytes_per_ms,
        2**30 / link.out_beside_in_bytes_per_ms,
    )
    for (events_ms, python_ms), wanted_ms in zip(times, expected, strict=True):
        assert events_ms == pytest.approx(wanted_ms, rel=0.03)
        assert events_ms <= python_ms * 1.001 <= events_ms * 1.1 + 5
