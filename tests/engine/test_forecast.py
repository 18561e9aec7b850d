"""Before the first step: what is said of host memory, what is allocated, and where the rank is bound."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan, apply, load_config, model_structure, resolve_plan
from hf_actswap.config.sizes import gib_text
from hf_actswap.engine import PageableSlabs, Resources, host_budget, install, record_saved
from hf_actswap.engine.host_memory import room_beyond
from hf_actswap.plan import PlanRow
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.spies import WatchingTransfer
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    compiled_layers,
    gradients_of_step,
    one_step,
    plan_of,
    swap_rows,
    tiny_llama,
    tiny_mixtral,
)

GIB, MIB = 2**30, 2**20
CORE_BYTES = 2 * 16 * 32 * 4 + 2 * 16 * 4 * 4
"""Output and statistics of one attention core."""
CORES = swap_rows(["self_attn.flash_attention"], range(NUM_LAYERS))
BUDGET = "hf_actswap.engine.host_budget"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GiB are free on a machine with one rank, whose memory cannot be locked."""
    monkeypatch.setattr(host_budget, "PinnedSlabs", lambda _device, _cpus: PageableSlabs())
    monkeypatch.setattr(host_budget, "available_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(host_budget, "ranks_on_this_machine", lambda: 1)


class OverlappingTransfer(RecordingTransfer):
    """Says that its copies run beside compute, so that its host memory would be page-locked."""

    overlaps = True


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == BUDGET]


def test_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    with caplog.at_level(logging.INFO), apply(model, plan_of(*CORES)):
        assert lines(caplog) == []
        for step in range(3):
            one_step(model, step)
    text = "Swap needs 1 rank x 0.0 GiB of host memory; the machine has 100.0 GiB free."
    assert lines(caplog) == [("INFO", text)]


@pytest.mark.parametrize(("cores", "stays"), [(0, "all of it"), (2, None)])
def test_it_does_not_fit(cores: int, stays: str | None, caplog: pytest.LogCaptureFixture) -> None:
    model, plan = tiny_llama(), plan_of(*CORES, host_memory_bytes=cores * CORE_BYTES)
    bare = gradients_of_step(model)
    with caplog.at_level(logging.INFO), apply(model, plan):
        for _ in range(2):
            assert_bitwise_equal(gradients_of_step(model), bare)
    text = (
        "Swap needs 1 rank x 0.0 GiB of host memory, and a rank may take 0.0 GiB (host_memory_gib; the "
        "machine has 100.0 GiB free). Raise host_memory_gib or swap fewer layers. Stays on the device: "
    )
    assert lines(caplog) == [
        ("WARNING", text + (stays or "what has no room, the latest tensors of a forward first") + ".")
    ]


def test_the_machine_itself_is_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_budget, "available_bytes", lambda: 0)
    model = tiny_llama()
    bare = gradients_of_step(model)
    with caplog.at_level(logging.INFO), apply(model, plan_of(*CORES)) as applied:
        assert_bitwise_equal(gradients_of_step(model), bare)
        assert applied.stats().offloaded_bytes == 0
    assert [level for level, _ in lines(caplog)] == ["WARNING"]
    assert lines(caplog)[0][1].endswith("cannot exceed this. Stays on the device: all of it.")


def test_what_has_room_is_the_earliest_in_every_step() -> None:
    model, transfer = tiny_llama(), WatchingTransfer()
    applied = apply(model, plan_of(*CORES, host_memory_bytes=2 * CORE_BYTES + 1), transfer=transfer)
    moved: list[int] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: moved.append(len(transfer.sizes_bytes)))
    for step in range(3):
        moved.clear()
        transfer.sizes_bytes.clear()
        one_step(model, step)
        assert moved == [2, 4, 4, 4]  # output and statistics
    assert applied.stats().offloaded_bytes == 3 * 2 * CORE_BYTES


def test_memory_is_made_ready_before_the_first_step_needs_it() -> None:
    model, reports = tiny_llama(), list[tuple[int, int]]()
    plan, shape = plan_of(*CORES), model_structure(model)
    given = Resources(OverlappingTransfer(), lambda done, total: reports.append((done, total)))
    applied = install(model, plan, shape, given)
    assert applied.stats().host_pool_bytes == 0
    held: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: held.append(applied.stats().host_pool_bytes))
    for step in range(2):
        one_step(model, step)
    assert applied.stats().host_peak_bytes == NUM_LAYERS * CORE_BYTES
    assert held == [2 * MIB] * 2  # one slab for all of it, and not the 256 MiB of a slab that is asked for
    assert applied.stats().host_pool_bytes == 2 * MIB
    assert reports == [(NUM_LAYERS * CORE_BYTES, NUM_LAYERS * CORE_BYTES)]
    applied.remove()


@pytest.mark.parametrize(("windows", "expected"), [("20", ["INFO"]), ("auto", [])], ids=["a number", "auto"])
def test_auto_chooses_within_the_budget_and_is_not_forecast(
    windows: str, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    config = load_config(f"swap_config: {{swap: true, default_prefetch: {windows}}}")
    plan = replace(resolve_plan(config, model_structure(model)), min_tensor_bytes=0)
    with caplog.at_level(logging.INFO), apply(model, plan, transfer=OverlappingTransfer()) as applied:
        one_step(model)
        assert (applied.stats().host_pool_bytes > 0) == bool(expected)
    assert [level for level, _ in lines(caplog)] == expected


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            tiny_mixtral,
            "No forecast of host memory: the model does not run on fake tensors (aten.nonzero.default).",
        ),
        (
            lambda: compiled_layers(tiny_llama(), backend="eager"),
            "No forecast of host memory: the compiler decides what compiled layers save.",
        ),
    ],
)
def test_where_it_cannot_be_known_a_line_says_so(
    make: Callable[[], nn.Module], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    with caplog.at_level(logging.INFO), apply(model, plan_of(*swap_rows([""], range(NUM_LAYERS)))) as applied:
        one_step(model)
        assert applied.stats().offloaded_bytes > 0
    assert lines(caplog) == [("INFO", text)]


def test_a_plan_that_keeps_everything_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_budget, "record_saved", lambda *_: pytest.fail("recorded"))
    model = tiny_llama()
    with caplog.at_level(logging.INFO), apply(model, plan_of(PlanRow(0, "", "keep"))):
        one_step(model)
    assert lines(caplog) == []


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "cannot run"])
def test_a_plan_that_swaps_and_recomputes_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    runs = []

    def counted(*call: Any, **called: Any) -> Any:
        runs.append(call)
        if fails:
            raise NotImplementedError("no fakes")
        return record_saved(*call, **called)

    monkeypatch.setattr(host_budget, "record_saved", counted)
    model = tiny_llama()
    rows = (*swap_rows(["self_attn"], [1]), PlanRow(0, "mlp", "recompute"))
    with caplog.at_level(logging.INFO), apply(model, plan_of(*rows)):
        one_step(model)
        one_step(model)
    assert len(runs) == 1
    told = [record.message for record in caplog.records if "(no fakes)" in record.message]
    assert len(told) == (2 if fails else 0)


class Bindings:
    """Stands in for `bind_rank`: who is bound now, and how often that was asked."""

    def __init__(self) -> None:
        self.asked: list[torch.device] = []
        self.bound = 0

    def __call__(self, device: torch.device) -> Callable[[], None]:
        self.asked.append(device)
        self.bound += 1
        return self._undo

    def _undo(self) -> None:
        self.bound -= 1


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    found = Bindings()
    monkeypatch.setattr(host_budget, "bind_rank", found)
    return found


def test_the_rank_is_bound_from_apply_to_remove(bindings: Bindings) -> None:
    model = tiny_llama()
    applied = apply(model, plan_of(*CORES))
    assert bindings.asked == [torch.device("cpu")]
    one_step(model)
    one_step(model)
    assert (len(bindings.asked), bindings.bound) == (1, 1)
    applied.remove()
    applied.remove()
    assert bindings.bound == 0


@pytest.mark.parametrize(
    "plan",
    [plan_of(*CORES, bind_numa=False), plan_of(PlanRow(0, "mlp", "recompute")), plan_of()],
    ids=["switched off", "nothing swapped", "nothing"],
)
def test_the_rank_is_left_alone(plan: MemoryPlan, bindings: Bindings) -> None:
    model = tiny_llama()
    with apply(model, plan):
        one_step(model)
    assert bindings.asked == []


def test_a_model_that_moves_takes_the_rank_with_it(bindings: Bindings) -> None:
    memory = host_budget.HostMemory(plan_of(*CORES))
    for index in (0, 0, 1):
        memory.bind(torch.device("cuda", index), plan_of(*CORES))
    assert bindings.asked == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert bindings.bound == 1
    memory.unbind()
    assert bindings.bound == 0


@pytest.mark.parametrize("bind_numa", [True, False])
def test_slabs_lie_beside_the_device_only_if_the_rank_may(
    bind_numa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus: list[frozenset[int]] = []

    def slabs(_device: torch.device, near: frozenset[int]) -> PageableSlabs:
        cpus.append(near)
        return PageableSlabs()

    monkeypatch.setattr(host_budget, "PinnedSlabs", slabs)
    monkeypatch.setattr(host_budget, "node_of", lambda _device: 1)
    monkeypatch.setattr(host_budget, "cpus_of", lambda node: frozenset({4 * node}))
    memory = host_budget.HostMemory(plan_of(*CORES, bind_numa=bind_numa))
    memory.pool(torch.device("cpu"), True, None).close()
    assert cpus == [frozenset({4}) if bind_numa else frozenset()]


@pytest.mark.parametrize(("others_mib", "fits"), [(0, True), (4, True), (6, False)])
def test_a_budget_holds_although_others_take_a_little_later(
    others_mib: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 MiB the budget leaves 10 to others, who have nothing yet; 5 stay free in any case."""
    monkeypatch.setattr(host_budget, "available_bytes", lambda: 100 * MIB)
    later = partial(room_beyond, read=lambda: (100 - others_mib) * MIB)
    monkeypatch.setattr(host_budget, "room_beyond", later)
    memory = host_budget.HostMemory(plan_of(*CORES))
    assert memory.limit_bytes == 90 * MIB
    pool = memory.pool(torch.device("cpu"), False, None)
    assert (pool.take(90 * MIB) is not None) == fits
    pool.close()


def test_bind_numa_comes_from_the_configuration() -> None:
    shape = model_structure(tiny_llama())
    config: dict[str, Any] = {"swap_config": {"swap": True}}
    assert resolve_plan(load_config(config), shape).bind_numa is True
    config["memory"] = {"bind_numa": False}
    assert resolve_plan(load_config(config), shape).bind_numa is False


@pytest.mark.parametrize(
    ("size_bytes", "least", "limit"),
    [
        (0, "0 GiB", "0 GiB"),
        (5 * MIB, "0.004883 GiB", "0.004882 GiB"),
        (GIB, "1.000 GiB", "1.000 GiB"),
        (100 * GIB + 1, "100.1 GiB", "100.0 GiB"),
        (2**60, "unlimited", "unlimited"),
    ],
)
def test_sizes_in_words(size_bytes: int, least: str, limit: str) -> None:
    """Other tests make the words that they expect with the same function."""
    assert (gib_text(size_bytes, math.ceil), gib_text(size_bytes, math.floor)) == (least, limit)
