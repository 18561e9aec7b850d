"""Every call that faces the device, once, on small shapes: the first stage of `benchmarks/gpu_day.py`.

Runs wherever the tests run, so that nothing here meets an accelerator as the first that it meets; on the CPU
it proves that the code is sound and nothing about streams. What costs a compilation stands at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.exactness import deterministic
from benchmarks.measure import Bench
from benchmarks.meters import give_back_cached_memory, pinned_bytes
from benchmarks.records import device_named, hardware, origin
from benchmarks.rows import EAGER, ROWS, STREAMED, TILED_STEP, Row
from benchmarks.trainings import OUT_OF_MEMORY_CASES, STATES_CASES, Sizes, measure_states, train
from benchmarks.verdict import COMPARED, DIFFERENCE, NEAR_EAGER
from benchmarks.workloads import PRESETS, TrainingStep, Workload, timed_step_ms, training_step
from hf_actswap import apply
from hf_actswap.engine import EvictableTensors, HostPool, PageableSlabs, PinnedSlabs
from hf_actswap.engine.host_pool import SlabSource
from hf_actswap.engine.link import measure_link
from hf_actswap.engine.tickets import restore
from hf_actswap.engine.transfer import transfer_of
from hf_actswap.planner import AllocatorMeter, CountingMeter, Meter, OomGuard
from tests.engine.gpu_stress import PLANS, Stress, small_llama
from tests.engine.gpu_stress_worker import SHORT, stressed
from tests.engine.tiny_models import (
    NUM_LAYERS,
    VOCABULARY,
    assert_bitwise_equal,
    gradients,
    on,
    plan_of,
    recompute_rows,
    swap_rows,
    tiny_neox,
)
from tests.piece_limits import limit_pieces
from tests.rehearsed import COMPUTED, on_gpu, skip_compiled, skip_times, skip_too_large

DEVICE = device_named()
ON_CPU = DEVICE.type == "cpu"
CPU_COMPUTES = ON_CPU or COMPUTED
"""Shapes are smaller there; a rehearsal of small arithmetic takes those of a device."""
MIB = 2**20
SLAB_BYTES, SLABS = (MIB, 2) if CPU_COMPUTES else (256 * MIB, 8)
WORKLOAD: Workload = (
    replace(PRESETS["cpu"], layers=2, tokens=32, hidden=64, intermediate=128, warmup_steps=2, steps=1)
    if ON_CPU
    # Heads as wide as those of real models, so that attention runs the same kernels.
    else replace(
        PRESETS["7b-8k"],
        name="smoke",
        layers=4,
        tokens=4096,
        hidden=1024,
        intermediate=2752,
        heads=8,
        kv_heads=8,
        warmup_steps=4,
        steps=2,
    )
)
if COMPUTED:  # the inner values of the feed-forward are large enough to be swapped, and little is computed
    WORKLOAD = replace(WORKLOAD, tokens=1024, hidden=64, intermediate=1024, heads=1, kv_heads=1)
ONE_BY_ONE = [row.name for row in ROWS if not row.compiles and row.budget is None]
if ON_CPU:  # where they are measured by other tests
    ONE_BY_ONE = ["eager", "trl-offloading", "actswap-everything-auto"]
COMPILED = ("compiled", "actswap-compiled-auto")
needs_device = pytest.mark.skipif(ON_CPU, reason="needs an accelerator")
Record = Callable[[str, object], None]


@pytest.fixture(scope="module", autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    give_back_cached_memory(DEVICE)


@pytest.fixture
def repeatable() -> Iterator[None]:
    with deterministic():
        yield


def test_memory_is_counted(record_property: Record) -> None:
    about = origin(DEVICE)
    for name, value in about.items():
        record_property(name, str(value))  # what every runner of tests can carry
    assert about["device"]
    values = torch.ones(2**20, device=DEVICE)
    give_back_cached_memory(DEVICE)
    if ON_CPU:
        assert pinned_bytes(DEVICE) is None
        return
    free_bytes, total_bytes = torch.accelerator.get_memory_info(DEVICE)
    assert 0 < free_bytes <= total_bytes == hardware(DEVICE)["memory_bytes"]
    meter = AllocatorMeter(DEVICE)
    meter.reset_peak()
    assert values.nbytes <= meter.allocated_bytes() <= meter.peak_bytes() <= meter.reserved_peak_bytes()
    assert meter.reserved_peak_bytes() <= meter.limit_bytes() <= total_bytes
    before = pinned_bytes(DEVICE)
    pinned = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    assert before is not None
    assert (pinned_bytes(DEVICE) or 0) >= before
    assert pinned.is_pinned()


def test_host_memory_in_slabs(record_property: Record) -> None:
    """As the engine takes it. How long each slab takes is in the report."""
    source: SlabSource = PageableSlabs() if ON_CPU else PinnedSlabs(DEVICE)
    slabs = []
    for number in range(SLABS):
        started = time.perf_counter()
        slabs.append(source.allocate(SLAB_BYTES))
        record_property(f"slab_{number}_ms", round((time.perf_counter() - started) * 1e3, 1))
    assert source.pinned is not ON_CPU
    values = torch.arange(251, dtype=torch.uint8, device=DEVICE)
    for slab in slabs:
        slab[:251].copy_(values, non_blocking=True)
    if not ON_CPU:
        torch.accelerator.synchronize(DEVICE)
    assert all(torch.equal(slab[:251], values.cpu()) for slab in slabs)
    for slab in slabs:
        source.free(slab)


@needs_device
def test_the_link_is_measured(record_property: Record) -> None:
    skip_times()
    link = measure_link(DEVICE)
    record_property("link", asdict(link))
    assert 1e6 < link.out_beside_in_bytes_per_ms <= link.out_bytes_per_ms < 1e9  # 1 GB/s to 1 TB/s


def test_copies_out_and_back() -> None:
    """Streams, events, stamps; the block that is reused behind its last reader."""
    transfer = transfer_of(DEVICE)
    pool = HostPool(PageableSlabs() if ON_CPU else PinnedSlabs(DEVICE), slab_bytes=64 * MIB)
    free_bytes = transfer.free_bytes()
    assert free_bytes is None if ON_CPU else free_bytes
    start = transfer.stamp()
    for rows in (4, 4, 40, 4):  # of a MiB each; the large one is copied in two pieces
        source = torch.randn(rows, MIB // 4, device=DEVICE)
        host = pool.take(source.nbytes)
        host.hold(source.dtype, source.shape)
        out = transfer.offload(source, host)
        block, back = transfer.reload(host, out)
        out.wait()
        back.wait()
        assert torch.equal(block, source)
        transfer.host_reader_done(host)
        pool.give_back(host)
    end = transfer.stamp()
    transfer.synchronize()
    assert end.ms_since(start) > 0
    assert (pool.used_bytes, pool.allocating_ms > 0) == (0, True)
    pool.close()


@pytest.fixture(scope="module")
def stress() -> Stress:
    with deterministic():
        found = Stress(
            small_llama(DEVICE, 32 if CPU_COMPUTES else 256), (2, 16) if CPU_COMPUTES else (4, 512)
        )
        found.learn()
    return found


def test_eager_repeats_its_bits(stress: Stress, repeatable: None) -> None:
    """Else no comparison means anything."""
    assert stress.wrong_bits(SHORT) == 0


@pytest.mark.parametrize("name", ["windows 20", "auto", "recomputed layers", "swapped and recomputed"])
def test_gradients_are_bitwise_equal_while_copies_are_late(
    name: str, stress: Stress, repeatable: None
) -> None:
    assert stress.wrong_under(PLANS[name], stressed(DEVICE), SHORT) == 0


def test_recomputation_draws_the_same_random_numbers(repeatable: None) -> None:
    model = tiny_neox(torch.bfloat16, use_cache=False).to(DEVICE)
    ids = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(input_ids=ids, labels=ids).loss.backward()
        return gradients(model)

    expected = step()
    layers = range(NUM_LAYERS)
    rows = (*recompute_rows([""], layers), *swap_rows(["output"], layers), *recompute_rows(["mlp"], [1]))
    applied = on(model, plan_of(*rows[:-1]))
    with applied:
        for _ in range(3):
            assert_bitwise_equal(step(), expected)
        assert applied.stats().offloaded_bytes > 0


@contextmanager
def limited(limit_bytes: int | None, model: nn.Module) -> Iterator[Meter]:
    """Only so much memory, by the allocator or by a count."""
    if ON_CPU:
        counting = CountingMeter(limit_bytes)
        counting.own(parameter.detach() for parameter in model.parameters())
        counting.start()
        try:
            yield counting
        finally:
            counting.stop()
        return
    give_back_cached_memory(DEVICE)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    total_bytes = torch.accelerator.get_memory_info(DEVICE)[1]
    share = 1.0 if limit_bytes is None else limit_bytes / total_bytes
    torch.cuda.set_per_process_memory_fraction(share, DEVICE)
    try:
        yield AllocatorMeter(DEVICE)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_out_of_memory_is_survived_by_what_can_be_evicted(repeatable: None) -> None:
    width, tokens = (32, 256) if ON_CPU else (64, 2**16) if COMPUTED else (1024, 2**14)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(12)]
    model = nn.Sequential(*blocks).to(DEVICE, torch.float32 if ON_CPU else torch.bfloat16)
    batch = torch.randn(tokens, width, device=DEVICE, dtype=next(model.parameters()).dtype)

    def step(limit_bytes: int | None) -> tuple[dict[str, torch.Tensor], int, OomGuard]:
        model.zero_grad()
        with limited(limit_bytes, model) as meter:
            idle = EvictableTensors(DEVICE, min_tensor_bytes=512)
            guard = OomGuard(meter, idle)
            guard.start()
            try:
                with saved_tensors_hooks(lambda tensor: idle.keep(tensor.detach()), restore):
                    loss = model(batch).float().square().mean()
                loss.backward()
            finally:
                guard.stop()
            return gradients(model), meter.reserved_peak_bytes(), guard

    expected, peak_bytes, _ = step(None)
    found, limited_bytes, guard = step(int(0.75 * peak_bytes))
    assert_bitwise_equal(found, expected)
    assert guard.caught + guard.made_room > 0
    assert limited_bytes <= 0.75 * peak_bytes


STATES = Sizes("smoke", 2, 2, 64, 32, 256, min_tensor_bytes=1024)
if not CPU_COMPUTES:
    STATES = Sizes("smoke", 2, 4, 1024, 512, 4096)


def test_optimizer_states_on_the_host() -> None:
    rows = {case.method: measure_states(case, STATES, DEVICE) for case in STATES_CASES[:3]}
    assert len({row.parameters for row in rows.values()}) == 1
    ours = rows["ours, a tenth resident"]
    assert ours.freed_share >= 0.8
    assert ours.moved_bytes > 0
    assert ours.pinning_ms > 0


@needs_device  # on the CPU it takes a minute, and `tests/benchmarks` does it
def test_a_training_survives_six_tenths_of_its_memory() -> None:
    skip_too_large()
    sizes = Sizes("smoke", 14, 6, 1024, 8192, 256)
    plain, _, planned, _ = OUT_OF_MEMORY_CASES
    needs = train(plain, sizes, None, DEVICE)
    assert needs.error == ""
    survived = train(planned, sizes, needs.peak_bytes, DEVICE)
    assert (survived.error, survived.losses) == ("", needs.losses)
    assert survived.peak_bytes <= (survived.limit_bytes or 0)
    assert survived.evicted_bytes > 0  # else memory was never short


WHOLE = replace(
    PRESETS["cpu-model"], dtype="bfloat16", tokens=200, hidden=128, intermediate=256, kv_heads=2, vocab=512
)
CHUNK_TOKENS, PIECE_BYTES = (80, 4096) if CPU_COMPUTES else (1024, MIB)
if not CPU_COMPUTES:
    WHOLE = replace(WHOLE, tokens=2304, hidden=1024, intermediate=2752, vocab=8192)
LOSS_TILES = 5
WHOLE_MODEL: dict[str, dict[str, Any]] = {
    "tiled": {
        **TILED_STEP,
        "tile_config": {**TILED_STEP["tile_config"], "loss": LOSS_TILES},
        "swap_config": {**TILED_STEP["swap_config"], "default_prefetch": 1},  # auto might swap nothing
    },
    "streamed": {**STREAMED, "stream_config": {"tokens": CHUNK_TOKENS}, "tile_config": {"loss": LOSS_TILES}},
}
MOST_OF_ONE_WEIGHT = 0.05
"""Gradients of a single weight in bf16 differ by up to 0.01 where only the order of sums is another."""


def loss_and_gradients(step: TrainingStep) -> dict[str, torch.Tensor]:
    step.zero_gradients()
    loss = step.forward()
    step.backward(loss)
    found = {name: weight.grad.float() for name, weight in step.weights().items() if weight.grad is not None}
    return {"loss": loss.detach().float(), **found}


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative differences: of the loss, of all gradients as one vector, of the worst gradient."""
    weights = [name for name in expected if name != "loss"]
    apart = torch.stack([(found[name] - expected[name]).norm() for name in weights])
    norms = torch.stack([expected[name].norm() for name in weights])
    loss = float((found["loss"] - expected["loss"]).abs() / expected["loss"].abs())
    return {"loss": loss, "all": float(apart.norm() / norms.norm()), "worst": float((apart / norms).max())}


@pytest.mark.parametrize("name", COMPARED)
def test_a_whole_model_is_near_eager(
    name: str, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads, three chunks that are copied in several pieces but for the last, and a loss in tiles.

    In bf16 rounding alone moves gradients by a percent, eager's as well as ours: so it is asked how much
    farther ours are from those in fp32, of the same weights.
    """
    limit_pieces(monkeypatch, PIECE_BYTES)
    assert 2 * CHUNK_TOKENS < WHOLE.tokens <= 3 * CHUNK_TOKENS
    assert CHUNK_TOKENS * WHOLE.hidden * WHOLE.torch_dtype.itemsize > PIECE_BYTES
    step = training_step(WHOLE, DEVICE)
    wide = training_step(replace(WHOLE, dtype="float32"), DEVICE)
    wide.model.load_state_dict(step.model.state_dict())
    exact, eager = loss_and_gradients(wide), loss_and_gradients(step)
    with apply(step.model, WHOLE_MODEL[name]) as applied:
        timed_step_ms(step)  # the next one uses host memory again
        found = loss_and_gradients(step)
        assert applied.stats().offloads > 0
        assert any(tile.scope == "head" for tile in applied.plan.tiles)
    ours, theirs, apart = off(found, exact), off(eager, exact), off(found, eager)
    for what, values in (("off_fp32", ours), ("eager_off_fp32", theirs), ("off_eager", apart)):
        record_property(what, values)
    farther = max(ours[what] - theirs[what] for what in ("loss", "all"))
    record_property(DIFFERENCE, farther)
    assert farther <= NEAR_EAGER
    assert apart["worst"] <= MOST_OF_ONE_WEIGHT


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    found = Bench(DEVICE)
    yield found
    found.clear()


def row_named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_rows_of_the_frontier(name: str, bench: Bench) -> None:
    """Also those of others: what cannot be measured says why."""
    result = bench.measure(WORKLOAD, name)
    assert (result.status, bool(result.reason)) in (("measured", False), ("skipped", True)), result
    assert bench.is_sound()
    if result.status == "measured" and result.must_be_exact:
        assert result.exact
    if not ON_CPU and result.status == "measured":
        assert (result.peak_reserved_bytes or 0) >= (result.peak_allocated_bytes or 0) > 0


@needs_device  # as before
def test_a_row_of_the_planner(bench: Bench) -> None:
    skip_too_large()
    eager = bench.measure(WORKLOAD, EAGER.name)
    row = row_named("actswap_plan_half")
    assert row.budget is not None
    options: Any = row.budget.options(False, [eager])
    result = bench.measure(WORKLOAD, row.name, options)
    assert (result.status, result.exact) == ("measured", on_gpu(True, None)), result  # zeros in a rehearsal
    assert (result.peak_allocated_bytes or 0) <= (result.budget_bytes or 0)
    assert bench.is_sound()


@needs_device  # on the CPU a compilation takes half a minute, and other tests do it
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_rows(name: str, bench: Bench) -> None:
    skip_compiled()
    result = bench.measure(WORKLOAD, name)
    assert result.status == "measured", result
    assert (result.first_step_compile_ms or 0) > 0
    assert bench.is_sound()
