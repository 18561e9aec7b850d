"""Swap is real: the device copy is gone between release and prefetch, and nobody reads too early."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.spies import WatchingTransfer
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    SWAP_CASES,
    assert_bitwise_equal,
    forward,
    gradients,
    gradients_of_step,
    on,
    plan_of,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.quick_cases import each_value_once


def alive(references: list[StorageWeakRef]) -> int:
    return sum(not reference.expired() for reference in references)


@pytest.mark.parametrize("case", SWAP_CASES)
def test_swapped_storages_are_dead_between_release_and_prefetch(case: str) -> None:
    model, transfer = tiny_llama(), WatchingTransfer()
    on(model, CASES[case], transfer)
    alive_at_layers: list[int] = []
    for layer in model.model.layers:
        layer.register_full_backward_pre_hook(lambda *_: alive_at_layers.append(alive(transfer.blocks)))
    loss = forward(model)
    assert len(transfer.sources) > 0
    assert alive(transfer.sources) == 0
    assert transfer.blocks == []
    loss.backward()
    assert len(transfer.blocks) == len(transfer.sources)
    assert alive(transfer.blocks) == 0
    assert max(alive_at_layers) < len(transfer.blocks)  # they do not pile up in backward


def test_attention_outputs_die_only_where_they_are_swapped() -> None:
    """The same references without a plan are alive: the test above can fail."""

    def attention_outputs(model: nn.Module) -> list[StorageWeakRef]:
        found: list[StorageWeakRef] = []
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _m, args: found.append(StorageWeakRef(args[0].untyped_storage()))
            )
        return found

    bare = tiny_llama()
    outputs = attention_outputs(bare)
    loss = forward(bare)
    assert alive(outputs) == NUM_LAYERS
    model = tiny_llama()
    on(model, plan_of(*swap_rows(["self_attn.flash_attention"], [0, 2])))
    outputs = attention_outputs(model)
    swapped_loss = forward(model)
    assert [reference.expired() for reference in outputs] == [True, False, True, False]
    assert loss == swapped_loss


def test_a_release_point_inside_the_forward_is_kept() -> None:
    """With p = 1 the attention output of one layer is gone before the next layer runs."""
    model, transfer = tiny_llama(), WatchingTransfer()
    on(model, plan_of(*swap_rows(["self_attn.flash_attention"], range(NUM_LAYERS), 1)), transfer)
    seen: list[tuple[int, int]] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda *_: seen.append((len(transfer.sources), alive(transfer.sources)))
        )
    forward(model)
    assert seen == [(0, 0), (2, 0), (4, 0), (6, 0)]


@each_value_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefetch_ops", [0, 1, 10, 1000])
def test_poison_in_everything_that_was_swapped(prefetch_ops: int, dtype: torch.dtype) -> None:
    model, transfer = tiny_llama(dtype), WatchingTransfer(hold=True)
    bare = gradients_of_step(model)
    model.zero_grad()
    on(model, swap_everything(prefetch_ops), transfer)
    loss = forward(model)
    assert len(transfer.held) > 16 * NUM_LAYERS
    transfer.poison()
    loss.backward()
    assert_bitwise_equal(gradients(model), bare)


def events_of(prefetch_ops: int) -> tuple[list[str], int]:
    """The events of one step in which copies complete only when waited for; the second: of the forward."""
    model, transfer = tiny_llama(), RecordingTransfer()
    on(model, plan_of(*swap_rows(["self_attn.flash_attention"], range(NUM_LAYERS), prefetch_ops)), transfer)
    loss = forward(model)
    forward_events = len(transfer.events)
    loss.backward()
    assert transfer.in_flight == 0
    return transfer.events, forward_events


@pytest.mark.parametrize("prefetch_ops", [0, 1, 20, 1000])
def test_order_of_events(prefetch_ops: int) -> None:
    events, forward_events = events_of(prefetch_ops)
    assert len(events) == len(set(events)) == 2 * 3 * 2 * NUM_LAYERS
    at = {event: index for index, event in enumerate(events)}
    for number in range(2 * NUM_LAYERS):
        for direction in ("out", "in"):
            start, wait, done = (at[f"{direction} {number} {what}"] for what in ("start", "wait", "done"))
            assert start < wait
            assert start < done
        assert at[f"out {number} wait"] < forward_events <= at[f"in {number} start"]


def test_large_leads_start_everything_before_anything_is_needed() -> None:
    events, forward_events = events_of(1000)
    starts = [event for event in events[forward_events:] if event.endswith("start")]
    assert events[forward_events : forward_events + 2 * NUM_LAYERS] == starts
    # and the release waits come at the end of the forward, after all copies out have started
    waits = [index for index, event in enumerate(events[:forward_events]) if event.endswith("wait")]
    outs = [index for index, event in enumerate(events[:forward_events]) if event.endswith("start")]
    assert max(outs) < min(waits)


def test_no_lead_starts_each_layer_when_it_is_needed() -> None:
    events, forward_events = events_of(0)
    back = [event for event in events[forward_events:] if not event.endswith("done")]
    for layer in range(NUM_LAYERS):
        numbers = {2 * layer, 2 * layer + 1}
        of_layer = back[4 * layer : 4 * layer + 4]
        assert set(of_layer) == {f"in {number} {what}" for number in numbers for what in ("start", "wait")}
