"""Batches that differ in size: recorded steps scaled to other sizes, plans in turn, whole trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_actswap import PlanError, model_structure
from hf_actswap.config import MemoryConfig
from hf_actswap.engine import AppliedPlan, Resources, install
from hf_actswap.engine.hook_wrappers import replace_outermost_calls
from hf_actswap.engine.host_budget import HostMemory
from hf_actswap.plan import MemoryPlan, PlanRow
from hf_actswap.planner import CountingMeter, Profile, profile_from_shapes
from hf_actswap.planner.phases import stable
from hf_actswap.planner.phases.search import SearchPhase
from hf_actswap.planner.phases.warm_up import module_weights, with_memory_of
from hf_actswap.planner.plan_file import MeasuredStep
from hf_actswap.planner.planning import agreed_task, whole_layers
from hf_actswap.planner.recorded_step import BatchSize, RecordedStep, scores_of
from hf_actswap.planner.run import ModeLog, ahead_of_calls
from hf_actswap.planner.search.find_plan import least_peak_bytes
from tests.engine.disorderly_transfer import DisorderlyTransfer, Machine
from tests.engine.tiny_models import (
    VOCABULARY,
    assert_bitwise_equal,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
    tiny_mixtral,
)
from tests.planner.recorded_steps import measured_peak_bytes
from tests.planner.simulated_device import Trained, train

GIB = 2**30
TOP = BatchSize(512)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()


def test_longer_sequences_are_told_apart_where_scores_are_saved() -> None:
    top = BatchSize.of((4, 128), True)
    assert top == BatchSize(512, 512 * 128)
    long = BatchSize.of((1, 256), True)
    assert long is not None
    assert top.covers(long)
    assert not top.covers(BatchSize(512, 512 * 129))
    short = BatchSize.of((2, 128), True)
    assert short is not None
    assert long.pairs > short.pairs
    assert BatchSize.of((), True) is None


def on_paper(shape: tuple[int, int], attention: str) -> Profile:
    model = tiny_llama(attn_implementation=attention)
    ids = torch.zeros(shape, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    return profile_from_shapes(model, model_structure(model), call, "H200")


def recorded_on_paper(shape: tuple[int, int], attention: str) -> RecordedStep:
    model = tiny_llama(attn_implementation=attention)
    baseline_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    weights = module_weights(model, model_structure(model))
    return RecordedStep(on_paper(shape, attention), weights, baseline_bytes)


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_scaled_step_is_the_step_of_that_size(attention: str) -> None:
    step = recorded_on_paper((4, 128), attention)
    scores = bool(scores_of(step.profile))
    assert scores == (attention == "eager")
    for shape in [(4, 64), (1, 64), (4, 200)]:
        size = BatchSize.of(shape, scores)
        assert size is not None
        scaled, true = step.at(size), on_paper(shape, attention)
        peak, true_peak = measured_peak_bytes(scaled), measured_peak_bytes(true)
        assert peak >= 0.99 * true_peak, shape
        if attention == "sdpa":
            assert peak <= 1.01 * true_peak, shape
            known = {use.order: item.size_bytes for item in true.saved.storages for use in item.uses}
            for storage in scaled.saved.storages:
                assert all(storage.size_bytes == known[use.order] for use in storage.uses)
    assert step.at(TOP if not scores else BatchSize(512, 512 * 128)) is step.profile


def test_what_does_not_depend_on_the_batch_stays() -> None:
    step = recorded_on_paper((4, 128), "sdpa")
    scaled, profile = step.at(BatchSize(64)), step.profile
    assert scaled.outside_ms == profile.outside_ms
    assert scaled.outside_base_bytes == profile.outside_base_bytes
    assert all(op_event.forward_base_bytes >= step.baseline_bytes for op_event in scaled.op_events)
    assert scaled.compute_ms == pytest.approx(profile.compute_ms / 8)
    last = max(scaled.op_events, key=lambda op_event: op_event.backward_place)
    gradients = sum(weight.nbytes for weight in tiny_llama().parameters())
    assert last.backward_base_bytes >= step.baseline_bytes + gradients


def test_an_unknown_shape_cannot_be_scaled() -> None:
    step = recorded_on_paper((2, 16), "sdpa")
    with pytest.raises(ValueError, match="not known"):
        replace(step, profile=replace(step.profile, batch_shape=())).at(BatchSize(3))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 12 + seed), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def gradients_without_plan(seeds: tuple[int, ...]) -> dict[str, torch.Tensor]:
    model = tiny_llama(use_cache=False)
    losses = [loss_of(model, seed) for seed in seeds]
    for loss in losses:
        loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


PLANS: dict[str, Callable[[], MemoryPlan]] = {
    "swap": lambda: swap_everything(3),
    "modules": lambda: plan_of(*recompute_rows(["mlp"], range(4))),
    "layers": lambda: plan_of(*recompute_rows([""], range(4))),
    "mixed": lambda: plan_of(*recompute_rows(["mlp.mul"], range(4)), *swap_rows(["self_attn"], range(4), 5)),
}


@pytest.mark.parametrize(("first", "second"), [("swap", "modules"), ("layers", "mixed"), ("mixed", "swap")])
def test_graphs_of_two_plans_live_beside_each_other(first: str, second: str) -> None:
    model, machine = tiny_llama(use_cache=False), Machine([1])
    host = HostMemory(plan_of())
    plans: list[AppliedPlan] = []
    for name in (first, second):
        for applied in plans:
            applied.suspend()
        transfer = DisorderlyTransfer(machine, [0, 3, 40], [7, 0, 25])
        plans.append(install(model, PLANS[name](), model_structure(model), Resources(transfer, host=host)))
    losses = []
    for seed in range(4):
        plans[1 - seed % 2].suspend()
        plans[seed % 2].resume()
        losses.append(loss_of(model, seed))
    for loss in losses:  # the earlier plan's graphs too, while the other is on
        loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert_bitwise_equal(found, gradients_without_plan((0, 1, 2, 3)))
    assert machine.violations == []
    assert all(applied.stats().forwards == 2 for applied in plans)
    for applied in reversed(plans):
        applied.remove()
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())
    with pytest.raises(PlanError, match="removed"):
        plans[0].resume()


def test_only_one_plan_is_on() -> None:
    model = tiny_llama(use_cache=False)
    first = install(model, PLANS["swap"](), model_structure(model))
    with pytest.raises(PlanError, match="one that is applied"):
        install(model, PLANS["modules"](), model_structure(model))
    first.suspend()
    before = first.stats()
    loss_of(model, 0).backward()
    assert first.stats() == before
    with (
        install(model, PLANS["modules"](), model_structure(model)),
        pytest.raises(PlanError, match="applied"),
    ):
        first.resume()
    first.resume()
    first.resume()  # nothing happens
    loss_of(model, 0).backward()
    assert first.stats().forwards == before.forwards + 1
    first.remove()


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_comes_back_ahead_of_a_call_acts_in_it(name: str) -> None:
    """In a wrapper of the call that is to run under it."""
    model = tiny_llama(use_cache=False)
    whole = kept_in_forward(model)
    applied = install(model, PLANS[name](), model_structure(model))
    kept_in_forward(model)  # it measures
    expected = kept_in_forward(model)
    applied.suspend()
    undo = replace_outermost_calls([model], partial(ahead_of_calls, lambda *_: applied.resume()))
    assert kept_in_forward(model) == expected < whole
    for step in undo:
        step()
    applied.remove()


def kept_in_forward(model: nn.Module) -> int:
    """Return the bytes on the device after a forward beyond those before it."""
    meter = CountingMeter()
    meter.own(model.parameters())
    meter.start()
    try:
        loss = loss_of(model, 0)
        kept_bytes = meter.allocated_bytes()
    finally:
        meter.stop()
    loss.backward()
    return kept_bytes


def test_what_was_learned_survives() -> None:
    model = tiny_llama(use_cache=False)
    applied = install(model, PLANS["swap"](), model_structure(model))
    for _ in range(3):
        loss_of(model, 0).backward()
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert not layer._forward_pre_hooks  # nothing inside layers is followed any more
    applied.suspend()
    applied.resume()
    assert not layer._forward_pre_hooks
    loss_of(model, 0).backward()
    assert not layer._forward_pre_hooks
    applied.remove()


def lengths(seed: int, steps: int) -> list[int]:
    return torch.randint(5, 65, (steps,), generator=torch.Generator().manual_seed(seed)).tolist()


def train_mixed(
    shapes: list[list[tuple[int, int]]],
    memory: dict[str, Any] | None = None,
    build: Callable[[], Any] = tiny_llama,
    limit_bytes: int | None = None,
) -> Trained:
    """Train with a list of micro-batches for each step."""
    return train(build, memory, len(shapes), limit_bytes, shape=shapes.__getitem__)


def assert_same_training(found: Trained, plain: Trained) -> None:
    assert found.losses == plain.losses
    assert all(torch.equal(found.weights[name], weight) for name, weight in plain.weights.items())


@pytest.mark.slow
def test_random_lengths() -> None:
    shapes = [[(8, length)] for length in lengths(3, 40)]
    plain = train_mixed(shapes)
    budget = int(0.6 * max(plain.peaks))
    found = train_mixed(shapes, {"mode": "adaptive", "budget_gib": budget / GIB})
    assert_same_training(found, plain)
    assert found.phases[-1] == "stable"
    longest = [max([0, *(length for [(_, length)] in shapes[:at])]) for at in range(len(shapes))]
    known = [length <= before for [(_, length)], before in zip(shapes, longest, strict=True)]
    in_stable = zip(found.stable_peaks(), found.stable(known), strict=True)
    stable_peaks = [peak for peak, planned in in_stable if planned]
    assert len(stable_peaks) > 15
    assert max(stable_peaks) <= budget
    assert len(found.planner.planning_s) <= 2 * stable.MOST_PLANS
    assert found.phases.count("warm-up") <= 2 + stable.MOST_PLANS


@pytest.mark.slow
def test_micro_batches_of_different_lengths() -> None:
    shapes = [[(8, 64), (8, 64)]] * 6 + [[(8, 64), (8, 20)], [(8, 20), (8, 64)], [(8, 20), (8, 30)]] * 3
    plain = train_mixed(shapes)
    budget = int(0.6 * max(plain.peaks))
    found = train_mixed(shapes, {"mode": "adaptive", "budget_gib": budget / GIB})
    assert_same_training(found, plain)
    assert max(found.stable_peaks()) <= budget


@pytest.mark.slow
def test_an_outlier_that_no_plan_fits_does_not_leave_the_guard_on() -> None:
    shapes = [[(8, 32)]] * 6 + [[(8, 400)]] + [[(8, 32)]] * 12  # tiles are tried too
    plain = train_mixed(shapes)
    budget = int(0.7 * plain.peaks[0])
    found = train_mixed(shapes, {"mode": "adaptive", "budget_gib": budget / GIB})
    assert_same_training(found, plain)
    assert found.phases[6:8] == ["stable", "warm-up"]
    assert found.phases[-1] == "stable"
    assert not found.guarded
    assert max(found.stable_peaks()[-2:]) <= budget


@pytest.mark.slow
def test_swaps_and_the_guard_take_turns_too() -> None:
    """Lengths that grow, under a limit: larger ones run under the guard of the largest plan."""
    shapes = [[(8, length)] for length in (40, 40, 40, 40, 40, 20, 20, 64, 20, 64, 64, 20, 64, 20, 20, 40)]
    plain = train_mixed(shapes)
    limit = int(0.6 * max(plain.peaks))
    memory = {"mode": "smart_swap", "min_tensor_mib": 0.001}
    found = train_mixed(shapes, memory, limit_bytes=limit)
    assert_same_training(found, plain)
    assert max(found.peaks) <= limit
    assert found.phases[-1] == "stable"


@pytest.mark.slow
def test_routed_experts() -> None:
    """Sizes inside the experts differ from batch to batch, also of one size."""
    shapes = [[(4, length)] for length in (64, 64, 64, 64, 64, 64, 30, 64, 29, 31, 64, 12, 11, 64)]
    plain = train_mixed(shapes, build=tiny_mixtral)
    limit = int(0.75 * max(plain.peaks))
    found = train_mixed(shapes, {"mode": "adaptive"}, tiny_mixtral, limit)
    assert_same_training(found, plain)
    assert max(found.peaks) <= limit


@dataclass
class TimedRun:
    """What `SearchPhase` asks of a run: each step takes as many ms as it has tokens, and 5 beside.

    Or each takes ``step_ms``. Compute waits for none of it, or works only ``work_ms``. ``missing_bytes`` had
    to be evicted.
    """

    log: ModeLog = field(default_factory=lambda: ModeLog("adaptive"))
    tokens: int = 0
    peak_bytes: int = 0
    work_ms: float | None = None
    step_ms: float | None = None
    missing_bytes: int = 0
    switched: list[MemoryPlan] = field(default_factory=list)
    meter: CountingMeter = field(default_factory=CountingMeter)
    training: Any = field(default_factory=lambda: SimpleNamespace(part=""))

    def replace_plan(self, plan: MemoryPlan, guarded: bool) -> None:
        assert guarded
        self.switched.append(plan)

    def measured_here(self) -> MeasuredStep:
        peak, missing = self.peak_bytes, self.missing_bytes
        step_ms = self.tokens + 5.0 if self.step_ms is None else self.step_ms
        work_ms = step_ms if self.work_ms is None else self.work_ms
        return MeasuredStep(step_ms, peak, peak, 2 * missing, 0, missing, work_ms)


def search_of(
    share: float, steps: int = 8, source: Literal["measured", "shapes"] = "measured"
) -> tuple[SearchPhase, TimedRun, int]:
    """A search for batches of 512 tokens, whose budget is a share of what they take."""
    step = recorded_on_paper((4, 128), "sdpa")
    step = replace(step, profile=replace(step.profile, outside_ms=5.0, source=source))
    peak_bytes = measured_peak_bytes(step.profile)
    memory = MemoryConfig(mode="adaptive", budget_gib=share * peak_bytes / GIB)
    task = agreed_task(step, MemoryPlan((), 4, "llama"), memory, 2 * peak_bytes, 0)
    run = TimedRun(peak_bytes=int(0.1 * peak_bytes))
    return SearchPhase(run, task, steps), run, peak_bytes  # type: ignore[arg-type]


def test_steps_of_different_sizes_are_compared_by_token() -> None:
    search, run, _ = search_of(0.6)
    for length in (128, 32):
        run.tokens = 4 * length
        search.forward_starts((4, length))
        search.step_ended()
    assert [step.step_ms for step in search.trials[0].steps] == pytest.approx([517, 517])


def test_a_larger_batch_in_the_search_is_planned_for() -> None:
    search, run, peak_bytes = search_of(0.6, 2)
    run.tokens = 800
    search.forward_starts((4, 200))
    assert not search.step_ended()
    assert search.task.size == BatchSize(800)
    assert len(search.outgrown) == 1
    assert len(search.trials) == 1
    assert search.steps_left == 2
    assert search.trials[0].prediction.peak_bytes <= 0.6 * peak_bytes
    search.forward_starts((4, 200))
    search.step_ended()
    search.forward_starts((4, 10))
    assert search.step_ended()
    assert search.best.plan == run.switched[-1]


def test_ops_that_took_less_time_than_recorded_are_predicted_anew() -> None:
    search, run, _ = search_of(0.6)
    recorded_ms, expected = search.task.profile.compute_ms, search.trials[0].prediction
    run.tokens = 512
    for factor, corrected in ((2.0, False), (0.98, False), (0.5, True)):
        run.work_ms = factor * (expected.compute_ms + expected.recompute_ms + 5.0)
        for _ in range(2):
            search.forward_starts((4, 128))
            search.step_ended()
        assert search.corrected == corrected, factor
        expected = search.trials[-1].prediction
    assert search.task.profile.compute_ms == pytest.approx(0.5 * recorded_ms)
    assert search.task.profile.outside_ms == pytest.approx(2.5)
    assert search.task.step is not None
    assert search.task.step.profile.compute_ms == search.task.profile.compute_ms


@pytest.mark.parametrize("faster", [True, False])
def test_a_step_that_waits_for_the_host_is_compared_with_whole_layers(faster: bool) -> None:
    search, run, _ = search_of(0.6, 3, "shapes")
    run.tokens = 512
    for tokens in (512, 512, 400 if faster else 600):
        run.tokens = tokens
        search.forward_starts((4, 128))
        assert not search.step_ended()
    search.forward_starts((4, 128))
    assert search.step_ended(), "it is tried once"
    whole = [PlanRow(layer, "", "recompute") for layer in range(4)]
    assert list(search.trials[1].plan.rows) == whole
    assert (list(search.best.plan.rows) == whole) == faster


def test_a_step_as_long_as_predicted_is_compared_with_nothing() -> None:
    search, run, _ = search_of(0.6, 3, "shapes")
    least = whole_layers(search.task)
    assert least is not None
    run.step_ms = least.prediction.step_ms
    for ends in (False, True):
        search.forward_starts((4, 128))
        assert search.step_ended() is ends


def test_where_nothing_fits_any_more_the_plan_of_the_least_peak_is_tried() -> None:
    search, run, _ = search_of(0.6)
    task, first = search.task, search.trials[0].prediction.peak_bytes
    run.tokens, run.peak_bytes, run.missing_bytes = 512, task.budget_bytes, task.budget_bytes // 2
    search.forward_starts((4, 128))
    assert not search.step_ended()
    least = least_peak_bytes(task.profile, task.fixed, task.limits())
    assert search.trials[-1].prediction.peak_bytes == least < first
    assert search.task.unpredicted_bytes == task.budget_bytes + run.missing_bytes - first


@pytest.mark.slow
def test_a_larger_batch_that_fits_nowhere_leaves_the_search_as_it_was() -> None:
    search, run, _ = search_of(0.6, 3)
    run.tokens = 2**14
    search.forward_starts((4, 2**12))
    search.step_ended()
    assert search.task.size == TOP
    assert not search.outgrown


def test_memory_of_one_size_and_times_of_another() -> None:
    memory, times = on_paper((4, 128), "sdpa"), on_paper((4, 32), "sdpa")
    op_events = tuple(replace(op_event, forward_ms=1.0, backward_ms=2.0) for op_event in times.op_events)
    found = with_memory_of(replace(times, op_events=op_events, outside_ms=3.0), memory)
    assert found.batch_shape == memory.batch_shape
    assert found.saved == memory.saved
    assert {(op_event.forward_ms, op_event.backward_ms) for op_event in found.op_events} == {(4.0, 8.0)}
    assert found.outside_ms == 3.0
    assert measured_peak_bytes(found) == measured_peak_bytes(memory)


def test_states_that_came_between_steps_of_different_ops_are_counted() -> None:
    memory = on_paper((4, 128), "sdpa")
    times = replace(memory, op_events=memory.op_events[:-1], optimizer_state_bytes=4096)
    found = with_memory_of(times, memory)
    assert len(found.op_events) == len(memory.op_events)
    assert found.optimizer_state_bytes == 4096
    assert measured_peak_bytes(found) == measured_peak_bytes(memory) + 4096
