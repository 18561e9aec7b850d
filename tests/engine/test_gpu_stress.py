"""Bitwise the same gradients while copies are delayed at random, memory is short and reused at once.

The tests at the end run the same code on the CPU, where it proves that the stress is written correctly and
nothing about streams.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.exactness import deterministic
from hf_actswap import MemoryPlan
from hf_actswap.engine import StreamTransfer
from tests.engine import gpu_stress_worker
from tests.engine.disorderly_transfer import DisorderlyTransfer, Machine
from tests.engine.gpu_stress import (
    BY_LAYER,
    LIVES_OF_COMPILED,
    PLANS,
    Stress,
    moving,
    needs_expandable_segments,
    small_llama,
)
from tests.engine.graph_lives import GRAPH_LIVES
from tests.engine.pretended_streams import pretend
from tests.engine.stressed_transfer import StressedTransfer
from tests.engine.test_gpu import device
from tests.engine.tiny_models import compiled_layers, on
from tests.quick_cases import quick_named
from tests.rehearsed import on_gpu, skip_compiled, skip_too_large

BATCH, LENGTH = on_gpu((4, 512), (2, 48))
CPU = torch.device("cpu")
SHORT = 2 * len(GRAPH_LIVES)
ROOT = Path(__file__).resolve().parents[2]
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))


@pytest.fixture(scope="module")
def repeatable() -> Iterator[None]:
    with deterministic():
        yield


@pytest.fixture(scope="module")
def stress(repeatable: None) -> Stress:
    """Eager layers."""
    found = Stress(small_llama(device()), (BATCH, LENGTH))
    found.learn()
    return found


@pytest.fixture(scope="module")
def compiled_stress(repeatable: None) -> Iterator[Stress]:
    """Layers compiled in place; compiled once for all plans."""
    skip_compiled()
    torch._dynamo.reset()
    model = compiled_layers(small_llama(device()), dynamic=False)
    found = Stress(model, (BATCH, LENGTH), LIVES_OF_COMPILED)
    found.learn()
    yield found
    torch._dynamo.reset()


@pytest.mark.gpu
def test_without_a_plan_the_gradients_repeat(stress: Stress) -> None:
    """Else the comparisons below mean nothing."""
    assert stress.wrong_bits(SHORT) == 0


@pytest.mark.gpu
@every_plan
def test_gradients_survive_delays_and_reuse(plan: MemoryPlan | str, stress: Stress) -> None:
    assert stress.wrong_under(plan, StressedTransfer(device())) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [PLANS[name] for name in BY_LAYER], ids=BY_LAYER)
def test_gradients_of_compiled_layers_survive(plan: MemoryPlan, compiled_stress: Stress) -> None:
    assert compiled_stress.wrong_bits(SHORT) == 0
    assert compiled_stress.wrong_under(plan, StressedTransfer(device())) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["windows 20", "auto", "case_4"])
def test_gradients_survive_on_a_stream_of_their_own(name: str, stress: Stress) -> None:
    torch.accelerator.synchronize()
    with torch.Stream(device()):
        wrong = stress.wrong_under(PLANS[name], StressedTransfer(device()), SHORT)
    torch.accelerator.synchronize()
    assert wrong == 0


def run_worker(*arguments: str, **settings: str) -> str:
    """Run `gpu_stress_worker` in a process of its own; return what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.gpu_stress_worker", *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.gpu
def test_an_engine_that_does_not_wait_does_not_survive() -> None:
    assert "found out" in run_worker("unwaited")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "allocator",
    [
        "expandable_segments:False",
        pytest.param("expandable_segments:True", marks=needs_expandable_segments),
    ],
)
def test_gradients_survive_when_memory_is_short(allocator: str) -> None:
    """The allocator must take blocks back that are free but cached, in the middle of steps."""
    skip_too_large()
    assert "right under pressure" in run_worker("pressure", PYTORCH_ALLOC_CONF=allocator)


@pytest.mark.gpu
@needs_expandable_segments
def test_little_more_is_reserved_than_allocated() -> None:
    """As in the benchmark: expandable segments, peaks reset after the warm-up."""
    skip_too_large()
    settings = "expandable_segments:True"
    assert "reserved at most 1.08 of allocated" in run_worker("reserved", PYTORCH_ALLOC_CONF=settings)


@pytest.mark.gpu
def test_gradients_survive_under_fsdp2() -> None:
    """One rank: its all-gathers and reductions run on streams of their own nevertheless."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("FSDP2 on an accelerator needs NCCL, which this PyTorch has not")
    assert "right under FSDP2" in run_worker("fsdp2")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["windows 20", "auto", "case_3", "default_swap"])
def test_nothing_in_a_steady_step_waits_for_the_device(name: str) -> None:
    stress = Stress(small_llama(device()), (BATCH, LENGTH))
    # A mask that is complete is passed on as it is; to make one transformers asks the device.
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device()).tril().expand(BATCH, 1, -1, -1)

    def steady_step() -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            stress.forward(0, mask).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    stress.forward(0, mask).backward()
    try:
        steady_step()
    except RuntimeError as error:
        pytest.skip(f"the model itself waits for the device: {error}")
    applied = on(stress.model, PLANS[name], StreamTransfer(device()))
    for _ in range(5):  # auto decides in the third
        stress.forward(0, mask).backward()
    before = applied.stats()
    steady_step()
    assert (applied.stats() - before).offloads > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["windows 20", "case_4"])
def test_small_case_for_the_sanitizer(name: str) -> None:
    """`make gpu` runs this alone under compute-sanitizer, which slows everything a hundredfold."""
    small = Stress(small_llama(device(), hidden=64), (1, 64))
    small.learn()
    assert small.wrong_under(PLANS[name], StressedTransfer(device(), spins_cycles=[0, 1000]), 7) == 0


@pytest.fixture
def cpu_stress() -> Stress:
    found = Stress(small_llama(CPU, hidden=32), (2, 16))
    found.learn()
    return found


@pytest.mark.parametrize("plan", quick_named(PLANS, ["windows 1", "auto", "swapped and recomputed"]))
def test_the_stress_runs_on_pretended_streams(
    plan: MemoryPlan | str, cpu_stress: Stress, monkeypatch: pytest.MonkeyPatch
) -> None:
    spins = pretend(monkeypatch)
    assert cpu_stress.wrong_under(moving(plan), StressedTransfer(CPU), len(GRAPH_LIVES)) == 0
    assert any(spins)


def test_the_stress_runs_on_compiled_layers() -> None:
    torch._dynamo.reset()
    model = compiled_layers(small_llama(CPU, hidden=32), backend="aot_eager", dynamic=False)
    stress = Stress(model, (2, 16), LIVES_OF_COMPILED)
    stress.learn()
    machine = Machine([1])
    assert stress.wrong_under(PLANS["windows 20"], DisorderlyTransfer(machine, [3], [3]), 6) == 0
    assert machine.violations == []
    torch._dynamo.reset()


def test_the_stress_finds_an_engine_that_does_not_wait() -> None:
    """On a machine on which that can be seen."""
    assert gpu_stress_worker.unwaited(CPU) == "found out"


def test_the_worker_runs_on_the_cpu() -> None:
    assert "right, without pressure" in gpu_stress_worker.pressure(CPU)


@pytest.mark.slow
@pytest.mark.dist
def test_the_worker_shards_on_the_cpu() -> None:
    assert "right under FSDP2" in run_worker("fsdp2", "cpu")
