"""``auto`` on a simulated clock: what it decides, when, and that gradients never notice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from hf_actswap import apply
from hf_actswap.engine import AppliedPlan, Link, PageableSlabs, SwapStats, auto_windows, host_budget
from hf_actswap.engine.windows import TOO_LATE_BACK, TOO_LATE_OUT
from hf_actswap.plan import MemoryPlan, PlanRow, Windows
from tests.engine.simulated_transfer import Clock, SimulatedTransfer
from tests.engine.tiny_models import (
    NUM_LAYERS,
    VOCABULARY,
    assert_bitwise_equal,
    batch,
    gradients,
    gradients_of_step,
    plan_of,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.engine.window_simulation import Simulated, simulate

DECIDED = 2
"""Index of the first step that decisions act in: forward 1 warms up, forward 2 is observed."""
FREE_BYTES = 2**40


def auto_plan(layers: Sequence[int] = range(NUM_LAYERS), *others: PlanRow) -> MemoryPlan:
    return plan_of(*others, *(PlanRow(layer, "", "swap") for layer in layers))


def link_of(bytes_per_ms: float) -> Link:
    return Link(bytes_per_ms, bytes_per_ms, bytes_per_ms, bytes_per_ms, latency_ms=0.01)


class Trained:
    """A tiny model under a plan beside the bare one, step by step, on one simulated clock."""

    def __init__(
        self,
        bytes_per_ms: float = 1e6,
        free_bytes: int = FREE_BYTES,
        plan: MemoryPlan | None = None,
        slowdown: float = 1.0,
    ) -> None:
        self.bare, self.model = tiny_llama(), tiny_llama()
        clock = Clock()
        clock.drive(self.model)
        self.transfer = SimulatedTransfer(clock, link_of(bytes_per_ms), free_bytes, slowdown)
        self.applied: AppliedPlan = apply(self.model, plan or auto_plan(), transfer=self.transfer)
        self.steps: list[SwapStats] = []

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def step(self, *all_ids: torch.Tensor) -> SwapStats:
        """All forwards, then all backwards, last one first; gradients must be the bare model's, bitwise."""
        before = self.applied.stats()
        self.bare.zero_grad()
        self.model.zero_grad()
        for loss in reversed([self.bare(input_ids=ids, labels=ids).loss for ids in all_ids]):
            loss.backward()
        losses = [self.loss(ids) for ids in all_ids]
        while losses:
            losses.pop().backward()
        assert_bitwise_equal(gradients(self.model), gradients(self.bare))
        self.steps.append(self.applied.stats() - before)
        return self.steps[-1]

    def run(self, steps: int) -> Trained:
        for _ in range(steps):
            self.step(batch(len(self.steps)))
        return self

    def bytes_of(self, fate: str, reason: str = "") -> int:
        """What the adjustments say that gets this fate, for reasons that begin so."""
        found = 0
        for adjustment in self.applied.plan.adjustments:
            size = re.match(rf"{fate} ([\d,]+) bytes", adjustment.got)
            if size is not None and adjustment.reason.startswith(reason):
                found += int(size[1].replace(",", ""))
        return found


@pytest.fixture(scope="module", autouse=True)
def _pageable() -> Iterator[None]:
    """Page-locked memory needs an accelerator; what it is changes nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_budget, "PinnedSlabs", lambda *_: PageableSlabs())
        yield


@pytest.fixture(scope="module")
def asked_bytes(_pageable: None) -> int:
    """What a step would swap if windows were numbers."""
    trained = Trained(plan=plan_of(*swap_rows([""], range(NUM_LAYERS))))
    asked = trained.run(1).steps[0].offloaded_bytes
    assert asked > 100_000
    return asked


@pytest.fixture(scope="module")
def forward_ms() -> float:
    """What compute takes for a forward."""
    model, clock = tiny_llama(), Clock()
    clock.drive(model)
    with torch.no_grad():
        model(input_ids=batch(0))
    assert clock.now_ms > 30
    return clock.now_ms


def rate(asked_bytes: int, forward_ms: float, share: float) -> float:
    """The rate at which a whole forward carries ``share`` of what is asked for."""
    return asked_bytes * share / forward_ms


def test_two_forwards_keep_everything_and_then_each_step_swaps_the_same_without_a_stall(
    asked_bytes: int, forward_ms: float
) -> None:
    trained = Trained(rate(asked_bytes, forward_ms, 0.6)).run(DECIDED)
    assert [step.offloaded_bytes for step in trained.steps] == [0, 0]
    assert trained.applied.plan.adjustments == ()
    decided = trained.run(4).steps[DECIDED:]
    assert [step.stalls for step in decided] == [0] * 4
    swapped = trained.bytes_of("swap")
    assert [step.offloaded_bytes for step in decided] == [swapped] * 4
    assert [step.prefetched_bytes for step in decided] == [swapped] * 4
    assert [step.late_prefetches for step in decided] == [0] * 4
    assert 0 < swapped < asked_bytes
    assert (trained.transfer.links_measured, trained.transfer.caches_emptied) == (1, 1)


def test_everything_that_was_asked_for_is_swapped_or_kept_for_a_reason(
    asked_bytes: int, forward_ms: float
) -> None:
    trained = Trained(rate(asked_bytes, forward_ms, 0.6)).run(DECIDED + 1)
    too_late = trained.bytes_of("keep", TOO_LATE_OUT) + trained.bytes_of("keep", TOO_LATE_BACK)
    assert trained.bytes_of("keep") == too_late > 0
    assert trained.bytes_of("swap", "measured: the link carries") == trained.bytes_of("swap")
    assert trained.bytes_of("swap") + trained.bytes_of("keep") == asked_bytes
    assert {adjustment.asked for adjustment in trained.applied.plan.adjustments} == {
        "swap, backward_prefetch auto"
    }


def test_a_fast_link_swaps_all_but_the_tail_and_bytes_rise_with_the_rate(
    asked_bytes: int, forward_ms: float
) -> None:
    swapped = []
    for share in (0.1, 0.3, 0.6, 1.0, 20.0):
        trained = Trained(rate(asked_bytes, forward_ms, share)).run(DECIDED + 1)
        assert trained.steps[DECIDED].stalls == 0
        assert trained.steps[DECIDED].offloaded_bytes == trained.bytes_of("swap")
        swapped.append(trained.bytes_of("swap"))
    assert swapped == sorted(set(swapped))
    assert 0.05 * asked_bytes < swapped[0] <= 0.1 * asked_bytes
    assert swapped[-1] > 0.9 * asked_bytes
    kept = [item for item in trained.applied.plan.adjustments if item.got.startswith("keep")]
    assert {layer for item in kept for layer in item.layers} <= {NUM_LAYERS - 1}


def test_copies_a_little_slower_than_measured_still_do_not_stall(asked_bytes: int, forward_ms: float) -> None:
    bytes_per_ms = rate(asked_bytes, forward_ms, 0.6)
    assert Trained(bytes_per_ms, slowdown=1.09).run(DECIDED + 1).steps[-1].stalls == 0
    late = Trained(bytes_per_ms, slowdown=2.0).run(DECIDED + 2).steps[DECIDED:]
    assert min(step.stall_ms for step in late) > 1
    assert late[0].offloaded_bytes == late[1].offloaded_bytes


def small_device(trained: Trained, kept_bytes: int) -> int:
    """The free memory of which ``kept_bytes`` may be kept beside the gradients to come."""
    pending = sum(item.numel() * item.element_size() for item in trained.model.parameters())
    return pending + int(kept_bytes / auto_windows.KEPT_SHARE_OF_FREE) + 2


def test_what_does_not_fit_is_spilled_in_warm_up_and_swapped_visibly_afterwards(
    asked_bytes: int, forward_ms: float
) -> None:
    limit = asked_bytes // 3
    free_bytes = small_device(Trained(), limit)
    trained = Trained(rate(asked_bytes, forward_ms, 0.3), free_bytes).run(DECIDED + 3)
    for step in trained.steps[:DECIDED]:
        assert asked_bytes - limit <= step.offloaded_bytes < asked_bytes
        assert step.stalls > 0
    too_large = trained.bytes_of("swap", "does not fit on the device beside the rest")
    assert too_large > 0
    assert trained.bytes_of("keep") <= limit
    assert trained.bytes_of("swap") + trained.bytes_of("keep") == asked_bytes
    for step in trained.steps[DECIDED:]:
        assert step.offloaded_bytes == trained.bytes_of("swap")
        assert step.stalls > 0


def test_waits_of_the_observed_step_are_not_taken_for_compute(asked_bytes: int, forward_ms: float) -> None:
    """Under a fast link the same is decided whether or not the observed step had to wait."""
    bytes_per_ms = rate(asked_bytes, forward_ms, 3)
    roomy = Trained(bytes_per_ms).run(DECIDED + 1)
    narrow = Trained(bytes_per_ms, small_device(roomy, asked_bytes // 2)).run(DECIDED + 1)
    assert narrow.steps[DECIDED - 1].stalls > 0
    assert narrow.applied.plan.adjustments == roomy.applied.plan.adjustments
    assert narrow.steps[DECIDED].stalls == 0


def test_the_decision_waits_for_backward_of_the_observed_forward(asked_bytes: int, forward_ms: float) -> None:
    trained = Trained(rate(asked_bytes, forward_ms, 0.6))
    first = trained.step(batch(0), batch(1), batch(2))  # forwards 2 and 3 come before backward 2
    assert first.offloaded_bytes == 0
    assert trained.applied.plan.adjustments == ()
    second = trained.step(batch(3), batch(4))
    assert second.offloaded_bytes == 2 * trained.bytes_of("swap") > 0
    assert second.prefetched_bytes == second.offloaded_bytes
    third = trained.step(batch(5), batch(6))
    assert third.offloaded_bytes == second.offloaded_bytes
    assert second.stalls == third.stalls == 0


@pytest.mark.parametrize("at", range(4))
def test_a_forward_without_backward_changes_nothing(at: int) -> None:
    """The second is the one that is observed, and observed again then."""
    trained = Trained()
    for step in range(5):
        if step == at:
            trained.loss(batch(50))
        trained.step(batch(step))
    assert trained.steps[-1].offloaded_bytes == trained.bytes_of("swap") > 0
    assert trained.applied.stats().live_swaps == 0


def test_evaluation_is_not_a_forward_of_training() -> None:
    trained = Trained()
    for step in range(DECIDED):
        with torch.no_grad():
            trained.loss(batch(70 + step))
        assert trained.step(batch(step)).offloaded_bytes == 0
    assert trained.step(batch(9)).offloaded_bytes == trained.bytes_of("swap") > 0


@pytest.mark.parametrize("shape", [(2, 40), (2, 5), (5, 16), (1, 1)])
def test_batches_of_another_shape_after_the_decision(shape: tuple[int, int]) -> None:
    trained = Trained().run(DECIDED + 1)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))
    changed = trained.step(ids)
    per_token = trained.steps[DECIDED].offloaded_bytes / batch(0).numel()
    assert changed.offloaded_bytes == pytest.approx(per_token * ids.numel(), rel=0.2)
    assert trained.step(batch(4)).offloaded_bytes == trained.steps[DECIDED].offloaded_bytes


def test_a_device_whose_copies_block_gets_windows_of_one() -> None:
    """Without a transfer given the CPU's is used, whose copies do not run beside compute."""
    numbers = apply(model := tiny_llama(), swap_everything(1))
    expected = gradients_of_step(model)
    asked = numbers.stats()
    wrap_call = tuple(PlanRow(scope, "", "swap") for scope in ("embedding", "final_norm", "head"))
    auto = apply(model := tiny_llama(), auto_plan(range(NUM_LAYERS), *wrap_call))
    for step in range(3):
        before = auto.stats()
        assert_bitwise_equal(gradients_of_step(model), expected)
        done = auto.stats() - before
        assert (done.offloaded_bytes, done.prefetches) == (asked.offloaded_bytes, asked.prefetches), step
    assert len(auto.plan.adjustments) == 1
    assert "overlap" in auto.plan.adjustments[0].reason


class Spy:
    """Stands in front of `choose_windows` and keeps what it was asked and what it answered."""

    def __init__(self) -> None:
        self._choose = auto_windows.choose_windows
        self.predicted: list[Simulated] = []

    def __call__(self, candidates: Any, timeline: Any, link: Link, *others: Any, **named: Any) -> Any:
        decisions = self._choose(candidates, timeline, link, *others, **named)
        self.predicted.append(simulate(candidates, decisions, timeline, link))
        return decisions


@pytest.mark.parametrize(("prefetch_ops", "release_ops"), [(1, 3), (20, 60), (80, 10)])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_stalls_under_the_users_numbers_are_those_of_the_simulator(
    asked_bytes: int,
    forward_ms: float,
    share: float,
    prefetch_ops: int,
    release_ops: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto_windows, "choose_windows", spy := Spy())
    windows = Windows(prefetch_ops, release_ops)
    numbers = tuple(PlanRow(layer, "", "swap", windows=windows) for layer in range(NUM_LAYERS - 1))
    plan = auto_plan([NUM_LAYERS - 1], *numbers)
    trained = Trained(rate(asked_bytes, forward_ms, share), plan=plan).run(DECIDED + 2)
    (predicted,) = spy.predicted
    predicted_ms = predicted.forward_stall_ms + predicted.backward_stall_ms
    assert predicted_ms > 5
    for step in trained.steps[DECIDED:]:
        assert step.stall_ms == pytest.approx(predicted_ms, rel=1e-3), (step, predicted)
        assert step.stalls == pytest.approx(predicted.stalls, rel=0.1)
