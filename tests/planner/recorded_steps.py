"""Steps of tiny models under watch, and the clock and the meter that the tests read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hf_actswap import model_structure
from hf_actswap.engine.install import put_tiles, tile_parts
from hf_actswap.plan import MemoryPlan
from hf_actswap.planner import CountingMeter, Profile, StepRecorder
from hf_actswap.planner.profile import Places, lifetimes, saved_on_device
from tests.engine.tiny_models import batch, tiny, tiny_llama, tiny_neox


def tied_llama() -> nn.Module:
    return tiny_llama(tie_word_embeddings=True, num_hidden_layers=2)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama,
    "neox": tiny_neox,
    "qwen3": lambda: tiny("Qwen3", num_hidden_layers=2),
    "tied": tied_llama,
}


@dataclass(frozen=True)
class Tick:
    count: int

    def ms_since(self, earlier: Tick) -> float:
        return self.count - earlier.count


class TickClock:
    """Every op takes one ms."""

    def __init__(self) -> None:
        self.count = 0

    def stamp(self) -> Tick:
        return Tick(self.count)

    def ran(self, *_: Any) -> None:
        self.count += 1

    def synchronize(self) -> None:
        pass


def call_of(**more: Any) -> dict[str, Any]:
    ids = batch(0)
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False, **more}


def counting_meter(model: nn.Module, call: Mapping[str, Any]) -> CountingMeter:
    meter = CountingMeter()
    meter.own([*model.parameters(), *model.buffers()])
    meter.own(value for value in call.values() if isinstance(value, torch.Tensor))
    return meter


def step(model: nn.Module, call: Mapping[str, Any]) -> None:
    torch.manual_seed(7)
    model(**call).loss.backward()


def recorded(model: nn.Module, **settings: Any) -> tuple[Profile, CountingMeter]:
    """Record one step; return the profile and a meter that counted the same step, from outside."""
    call = call_of()
    outside, inside = counting_meter(model, call), counting_meter(model, call)
    outside.start()
    inside.start()
    try:
        with StepRecorder(model, model_structure(model), inside, TickClock(), **settings) as recorder:
            step(model, call)
    finally:
        inside.stop()
        outside.stop()
    return recorder.profile(device="cpu"), outside


def measured_peak_bytes(profile: Profile) -> int:
    """The most device memory in use in the recorded step, in which everything is kept."""
    places = Places(profile.op_events)
    forward, backward = saved_on_device(lifetimes(profile.saved, profile.op_events, places), places)
    peaks = [profile.outside_base_bytes]
    for op_event, ahead, back in zip(profile.op_events, forward, backward, strict=True):
        peaks.append(op_event.forward_base_bytes + ahead)
        if op_event.backward_place >= 0:
            peaks.append(op_event.backward_base_bytes + back)
    return max(peaks)


def assert_events_partition(profile: Profile) -> None:
    """Fail unless op events follow each other without gaps and own every use once."""
    orders = sorted(use.order for storage in profile.saved.storages for use in storage.uses)
    covered = [
        order
        for op_event in profile.op_events
        for order in range(op_event.first_order, op_event.last_order + 1)
    ]
    assert covered == orders == list(range(1, len(orders) + 1))
    ops = [0, *accumulate(op_event.num_ops for op_event in profile.op_events)]
    assert [op_event.first_op for op_event in profile.op_events] == ops[:-1]
    places = [op_event.backward_place for op_event in profile.op_events if op_event.backward_place >= 0]
    assert places == sorted(places, reverse=True), "backward does not run in reverse"
    assert len(set(places)) == len(places)


@contextmanager
def tiled(model: Any, plan: MemoryPlan) -> Iterator[None]:
    structure = model_structure(model)
    undo = put_tiles(model, tile_parts(model, plan.tiles, structure, None), structure)
    try:
        yield
    finally:
        for restore in undo:
            restore()
