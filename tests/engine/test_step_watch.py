"""A step under watch: every copy with its name and its time, memory by fate, and nothing in other steps."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import AppliedPlan, MemoryPlan, apply
from hf_actswap.engine import Link, PageableSlabs, host_budget
from hf_actswap.engine.step_watch import MemoryWatch, StepMemory, StepTimeline, TimeWatch
from hf_actswap.engine.transfer import WatchedTransfer
from hf_actswap.planner import CountingMeter

from .simulated_transfer import Clock, SimulatedStamp, SimulatedTransfer
from .tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    forward,
    gradients,
    gradients_of_step,
    one_step,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)

ATTENTION = plan_of(*swap_rows(["self_attn.flash_attention"], range(NUM_LAYERS)))


class LanesTransfer(SimulatedTransfer):
    """Says when the copies of a direction end, as streams do."""

    def copy_stamp(self, direction: str) -> SimulatedStamp:
        return SimulatedStamp(self._out_end_ms if direction == "out" else self._in_end_ms)


def steps(model: nn.Module, count: int) -> None:
    for step in range(count):
        one_step(model, step)


def watched_times(model: nn.Module, applied: AppliedPlan, after: int = 4) -> StepTimeline:
    """Cached traces are known by then, so that names must come from them."""
    steps(model, after)
    watch = TimeWatch(model, applied)
    one_step(model, after)
    watch.optimizer_starts()
    return watch.timeline()


def watched_memory(plan: MemoryPlan) -> StepMemory:
    model = tiny_llama()
    with apply(model, plan) as applied:
        steps(model, 3)
        meter = CountingMeter()
        meter.own([*model.parameters(), *(item.grad for item in model.parameters() if item.grad is not None)])
        meter.start()
        try:
            watch = MemoryWatch(model, applied, meter.allocated_bytes)
            one_step(model, 3)
            return watch.memory()
        finally:
            meter.stop()


def test_every_copy_has_its_name_and_its_bytes() -> None:
    model = tiny_llama()
    with apply(model, ATTENTION) as applied:
        before = applied.stats()
        timeline = watched_times(model, applied)
        of_step = (applied.stats() - before).offloaded_bytes / 5
    for direction in ("out", "in"):
        copies = [copy for copy in timeline.copies if copy.direction == direction]
        assert sum(copy.size_bytes for copy in copies) == of_step
        assert {(copy.scope, copy.op_path) for copy in copies} == {
            (layer, "self_attn.flash_attention") for layer in range(NUM_LAYERS)
        }
    assert not timeline.overlaps
    assert len(timeline.stalls) == len(timeline.copies)  # copies that do not overlap are waits


def test_what_a_layer_hands_on_is_named_by_its_producer() -> None:
    model = tiny_llama()
    with apply(model, swap_everything()) as applied:
        timeline = watched_times(model, applied)
    scopes = {copy.scope for copy in timeline.copies}
    assert scopes >= {*range(NUM_LAYERS), "embedding", "final_norm"}
    assert None not in scopes


def test_the_parts_of_compute_follow_each_other() -> None:
    model = tiny_llama()
    with apply(model, ATTENTION) as applied:
        parts = watched_times(model, applied).compute
    assert parts[0].start_ms == 0
    assert all(one.end_ms == other.start_ms for one, other in pairwise(parts))
    in_layers = [(part.phase, part.layer) for part in parts if part.layer is not None]
    assert in_layers == [
        *(("forward", layer) for layer in range(NUM_LAYERS)),
        *(("backward", layer) for layer in reversed(range(NUM_LAYERS))),
    ]


@pytest.mark.parametrize("by", ["plan", "model"])
def test_recomputed_layers_are_not_forward_twice(by: str) -> None:
    """The model's own checkpointing calls whole layers again in backward, our hooks on them included."""
    model = tiny_llama()
    plan = plan_of(*recompute_rows([""], range(NUM_LAYERS)))
    if by == "model":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        plan = plan_of()
    with apply(model, plan) as applied:
        parts = watched_times(model, applied, 2).compute
    assert Counter(part.layer for part in parts if part.phase == "forward" and part.layer is not None) == {
        layer: 1 for layer in range(NUM_LAYERS)
    }


def test_copies_start_when_their_lane_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_budget, "PinnedSlabs", lambda _device, _cpus: PageableSlabs())
    clock = Clock()
    model = tiny_llama()
    clock.drive(model)
    transfer = LanesTransfer(clock, Link(*[500.0] * 4, 0.0), 10**9)  # a copy takes longer than a layer
    with apply(model, ATTENTION, transfer=transfer) as applied:
        timeline = watched_times(model, applied)
    assert timeline.overlaps
    outs = [copy for copy in timeline.copies if copy.direction == "out"]
    ins = [copy for copy in timeline.copies if copy.direction == "in"]
    for copy in timeline.copies:
        assert copy.end_ms - copy.start_ms == pytest.approx(copy.size_bytes / 500)
        assert copy.start_ms >= copy.asked_ms
    for lane in (outs, ins):
        assert all(one.end_ms <= other.start_ms + 1e-9 for one, other in pairwise(lane))
    assert any(copy.start_ms > copy.asked_ms for copy in outs)
    assert timeline.stalls
    assert {stall.direction for stall in timeline.stalls} == {"out", "in"}
    for stall in timeline.stalls:
        assert any(
            stall.start_ms + stall.length_ms == pytest.approx(copy.end_ms)
            for copy in timeline.copies
            if (copy.direction, copy.scope, copy.op_path) == (stall.direction, stall.scope, stall.op_path)
        )


def test_swapping_takes_its_bytes_from_what_is_kept() -> None:
    nothing, swapped = watched_memory(plan_of()), watched_memory(ATTENTION)
    model = tiny_llama()
    with apply(model, ATTENTION) as applied:
        one_step(model)
        moved = applied.stats().offloaded_bytes
    keeps_all = watched_memory(plan_of(*swap_rows(["no_such_op"], [0])))
    most_kept = max(sample.kept_bytes for sample in keeps_all.samples)
    assert max(sample.kept_bytes for sample in swapped.samples) == most_kept - moved
    assert 0 < max(sample.swapped_bytes for sample in swapped.samples) <= moved
    assert max(sample.kept_bytes for sample in nothing.samples) == 0  # a plan without rows watches nothing
    last = swapped.samples[-1]
    assert (last.kept_bytes, last.swapped_bytes) == (0, 0)
    assert last.total_bytes == swapped.start_bytes
    assert all(sample.total_bytes >= sample.kept_bytes + sample.swapped_bytes for sample in swapped.samples)


@pytest.mark.parametrize("kind", ["times", "memory"])
def test_watching_changes_no_number_and_leaves_nothing(kind: str) -> None:
    plain = tiny_llama()
    with apply(plain, ATTENTION):
        steps(plain, 3)
        plain.zero_grad()
        expected = gradients_of_step(plain, 3)
    model = tiny_llama()
    with apply(model, ATTENTION) as applied:
        steps(model, 3)
        model.zero_grad()
        hooks = hooks_of(model)
        watch: Any = TimeWatch(model, applied) if kind == "times" else MemoryWatch(model, applied, int)
        assert hooks_of(model) != hooks
        one_step(model, 3)
        watch.close()
        watch.close()
        found = gradients(model)
        assert not applied.runtime.evictable
        place = applied._engine.runtime
        assert place.watched(place.context) is place.context  # the next forward is as any other
        assert not isinstance(place.context.transfer, WatchedTransfer)
        one_step(model, 4)
        assert hooks_of(model) == hooks
    assert_bitwise_equal(found, expected)


def hooks_of(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


def ranges_of(model: nn.Module) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        one_step(model, 5)
    return Counter(event.name for event in profiler.events() if event.name.startswith("hf_actswap."))


def test_a_profile_carries_our_names() -> None:
    model = tiny_llama()
    plan = plan_of(*swap_rows(["self_attn.flash_attention"], [0, 2]), *recompute_rows(["mlp"], [1]))
    with apply(model, plan):
        steps(model, 3)
        found = ranges_of(model)
    copies = found["hf_actswap.offload 0 self_attn.flash_attention"]
    assert copies > 0
    assert found == {
        **{
            f"hf_actswap.{direction} {layer} self_attn.flash_attention": copies
            for layer in (0, 2)
            for direction in ("offload", "prefetch")
        },
        "hf_actswap.recompute 1 mlp": 1,
    }


def test_a_backward_after_the_profile_still_finds_its_copies() -> None:
    model, plain = tiny_llama(), tiny_llama()
    expected = gradients_of_step(plain)
    with apply(model, ATTENTION):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            loss = forward(model)
        loss.backward()
    assert_bitwise_equal(gradients(model), expected)
