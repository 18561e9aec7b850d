"""Layers that do what they did before are not followed; those that do not move the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan, apply
from hf_actswap.engine import SwapStats
from hf_actswap.engine.forward_pass import ForwardPass
from hf_actswap.plan import PlanRow, Windows
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.tiny_models import (
    BATCH,
    LENGTH,
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    gradients,
    plan_of,
    swap_rows,
    tiny_llama,
)

PLANS = {
    "layers": plan_of(*swap_rows([""], [0, 1, 2])),
    "ops": plan_of(*swap_rows(["self_attn", "output"], [0, 1, 2])),
}
MISMATCHING = 3
"""A layer of which nothing is swapped but what the layer before hands on."""


def _squared(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Two more ops at a layer's beginning: the second saves what the layer before handed on."""
    layer.input_layernorm.weight.sum()
    return (args[0] * args[0], *args[1:])


def _step(model: nn.Module, seed: int, labels: bool = True) -> dict[str, torch.Tensor]:
    ids = batch(seed)
    output = model(input_ids=ids, labels=ids if labels else None)
    model.zero_grad()
    (output.loss if labels else output.logits.square().sum()).backward()
    return gradients(model)


class _Steps:
    """Steps of a model with a plan and of one without, which must agree.

    Args:
        plan: of the one.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.model, self.bare = tiny_llama(), tiny_llama()
        self._applied = apply(self.model, plan, transfer=RecordingTransfer())
        self._seed = 0

    def run(self, labels: bool = True) -> SwapStats:
        """One step; return what was moved in it."""
        before = self._applied.stats()
        self._seed += 1
        moved = _step(self.model, self._seed, labels)
        assert_bitwise_equal(moved, _step(self.bare, self._seed, labels))
        return self._applied.stats() - before

    def both(self, change: Callable[[nn.Module], object]) -> None:
        """Change both models."""
        change(self.model)
        change(self.bare)


def _add_op(model: nn.Module) -> None:
    model.model.layers[MISMATCHING].register_forward_pre_hook(_squared)


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> list[ForwardPass]:
    """Grows with each saved tensor whose owner had to be found."""
    seen: list[ForwardPass] = []
    track = ForwardPass.track

    def noting(self: ForwardPass, tensor: torch.Tensor) -> int | None:
        seen.append(self)
        return track(self, tensor)

    monkeypatch.setattr(ForwardPass, "track", noting)
    return seen


@pytest.mark.parametrize("name", PLANS)
def test_after_two_equal_calls_nothing_is_followed(name: str, tracked: list[ForwardPass]) -> None:
    steps = _Steps(PLANS[name])
    first = steps.run()
    assert tracked
    assert steps.run().offloaded_bytes == first.offloaded_bytes
    tracked.clear()
    assert steps.run().offloaded_bytes == first.offloaded_bytes
    assert not tracked


@pytest.mark.parametrize("name", PLANS)
def test_a_layer_with_another_trace_moves_what_it_moves_when_followed(name: str) -> None:
    followed = _Steps(PLANS[name])
    followed.both(_add_op)
    expected = followed.run()
    steps = _Steps(PLANS[name])
    usual = [steps.run() for _ in range(4)]
    steps.both(_add_op)
    mismatched = steps.run()
    assert (mismatched.offloads, mismatched.offloaded_bytes) == (expected.offloads, expected.offloaded_bytes)
    assert mismatched.rejected == {}
    assert usual[0].offloaded_bytes == usual[-1].offloaded_bytes


def test_what_runs_between_layers_mismatches_alone(tracked: list[ForwardPass]) -> None:
    """A forward without a loss saves less after the head; the layers go on by their cached traces."""
    steps = _Steps(PLANS["layers"])
    for _ in range(3):
        steps.run()
    tracked.clear()
    steps.run(labels=False)
    assert not tracked
    steps.run()
    between = len(tracked)
    assert between
    steps.run()
    tracked.clear()
    steps.run()
    assert not tracked
    followed = _Steps(PLANS["layers"])
    followed.run()
    assert 0 < 4 * between < len(tracked)


def test_a_model_that_never_does_the_same_is_always_followed(tracked: list[ForwardPass]) -> None:
    steps = _Steps(PLANS["layers"])
    first = steps.run()
    for _ in range(3):
        steps.run()
        steps.run()
        steps.run()
        hooks = [
            model.model.layers[MISMATCHING].register_forward_pre_hook(_squared)
            for model in (steps.model, steps.bare)
        ]
        steps.run()
        for hook in hooks:
            hook.remove()
    for _ in range(3):
        tracked.clear()
        assert steps.run().offloaded_bytes == first.offloaded_bytes
        assert tracked


def test_what_was_too_small_is_swapped_as_soon_as_it_is_large_enough() -> None:
    """Longer sequences run the same operators."""
    threshold = 2 * BATCH * LENGTH * 48 * 4  # bytes of the feed-forward's tensors, of twice the sequence
    windows = Windows.of_prefetch(5)
    rows = tuple(PlanRow(layer, "mlp", "swap", windows=windows) for layer in range(NUM_LAYERS))
    applied = apply(model := tiny_llama(), plan_of(*rows, min_tensor_bytes=threshold))
    ids = batch(0)
    stats = [applied.stats()]
    for length in (1, 1, 1, 2, 1):
        train_ids = ids.repeat(1, length)
        model(input_ids=train_ids, labels=train_ids).loss.backward()
        stats.append(applied.stats())
    moved = [after - before for before, after in pairwise(stats)]
    reason = "smaller than min_tensor_mib"
    assert [step.offloaded_bytes for step in moved[:3]] == [0, 0, 0]
    assert len({step.rejected[reason] for step in (*moved[:3], moved[4])}) == 1
    assert moved[3].offloaded_bytes >= NUM_LAYERS * 3 * threshold
    assert moved[3].rejected.get(reason, 0) == 0
    assert moved[4].offloaded_bytes == 0
