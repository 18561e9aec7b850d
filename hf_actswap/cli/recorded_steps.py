"""Measures real steps of a model on this machine, as the planner records them in warm-up.

Weights and tokens are random: times and bytes do not depend on them, except for experts that tokens are
routed to. As in training, memory is taken from one step and times from others, because asking the allocator
after each op takes longer than a small op runs. The time of an op event is the median of the timed steps.

`for_all_layers` gives all layers of a model the times of the few that were measured. Bytes are those of the
whole model's step on fake tensors. A layer that was not measured gets the mean time of the measured layers
that have the same ops and save the same bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from ..engine.host_memory import available_bytes
from ..engine.transfer import Transfer
from ..engine.transfer_streams import transfer_of
from ..errors import Problem
from ..plan import ModelStructure
from ..plan.actions import Scope
from ..planner.meter import AllocatorMeter, CountingMeter, Meter
from ..planner.profile import OpEvent, Profile
from ..planner.record.clock import DeviceClock
from ..planner.record.recorder import StepRecorder
from ..planner.warm_up import with_memory_of
from .step import StepShape
from .subject import DTYPES, ModelError

WARM_UP_STEPS, TIMED_STEPS = 2, 3

Progress = Callable[[str, int], None]
"""Called with the name of the phase (``warm-up``, ``memory``, ``times``) and the number of its steps left."""


@dataclass
class RecordedSteps:
    """Trains a model for a few steps and records the last ones.

    Args:
        model: the model on its device, in training mode; its weights are changed.
        shape: layers and ops of the model.
        step: the batch, mixed precision and optimizer.
        progress: called before each step (`Progress`).
    """

    model: nn.Module
    shape: ModelStructure
    step: StepShape
    progress: Progress

    def profile(self) -> Profile:
        """Run the steps and return their profile.

        Raises:
            torch.OutOfMemoryError: a step needs more than the device has.
            Exception: whatever the model's own code raises.
        """
        device = next(parameter.device for parameter in self.model.parameters())
        transfer, optimizer = transfer_of(device), self._optimizer()
        batch = _random_batch(self.model, self.step, device)

        def train() -> None:
            self._train(batch, device, optimizer)

        for left in range(WARM_UP_STEPS, 0, -1):
            self.progress("warm-up", left)
            train()
        self.progress("memory", 1)
        memory = self._recorded(train, _meter_of(device, self.model, optimizer), transfer, optimizer)
        timed = []
        for left in range(TIMED_STEPS, 0, -1):
            self.progress("times", left)
            timed.append(self._recorded(train, None, transfer, optimizer))
        profile = with_memory_of(median_times(timed), memory)
        return replace(profile, device_bytes=memory.device_bytes, link=transfer.link())

    def _optimizer(self) -> torch.optim.Optimizer | None:
        parameters = list(self.model.parameters())
        if self.step.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-5)
        return torch.optim.SGD(parameters, lr=1e-5) if self.step.optimizer == "sgd" else None

    def _train(
        self, batch: dict[str, torch.Tensor], device: torch.device, optimizer: torch.optim.Optimizer | None
    ) -> None:
        name = self.step.autocast
        with torch.autocast(device.type, DTYPES[name]) if name else nullcontext():
            loss = self.model(**batch).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def _recorded(
        self,
        train: Callable[[], None],
        meter: Meter | None,
        transfer: Transfer,
        optimizer: torch.optim.Optimizer | None,
    ) -> Profile:
        recorder = StepRecorder(self.model, self.shape, meter, DeviceClock(transfer))
        if meter is not None:
            meter.start()
            meter.reset_peak()
        try:
            with recorder:
                train()
        finally:
            if meter is not None:
                meter.stop()
        return recorder.profile(device=self.step.device, optimizer_state_bytes=_state_bytes(optimizer))


def median_times(profiles: Sequence[Profile]) -> Profile:
    """Return the last profile with the median of each time; unchanged if the steps ran different ops."""
    last = profiles[-1]
    calls = [op_event.call for op_event in last.op_events]
    if any([op_event.call for op_event in profile.op_events] != calls for profile in profiles):
        return last
    op_events = tuple(
        replace(
            same[-1],
            forward_ms=median(op_event.forward_ms for op_event in same),
            backward_ms=median(op_event.backward_ms for op_event in same),
        )
        for same in zip(*(profile.op_events for profile in profiles), strict=True)
    )
    return replace(last, op_events=op_events, outside_ms=median(profile.outside_ms for profile in profiles))


def _random_batch(model: nn.Module, step: StepShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Return ids and labels, ``[sequences, tokens]``; two tensors, as a model may change its labels."""
    config: Any = model.config
    shape, words = (step.sequences, step.tokens), config.get_text_config().vocab_size
    ids = torch.randint(0, words, shape, device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    return sum(tensor.nbytes for tensor in _states(optimizer) if tensor.dim())


def _states(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    states = [] if optimizer is None else list(optimizer.state.values())
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def _meter_of(
    device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> AllocatorMeter | CountingMeter:
    if device.type != "cpu":
        return AllocatorMeter(device)
    here = available_bytes()
    meter = CountingMeter() if here is None else CountingMeter(unlimited_bytes=here)
    meter.own(tensor.detach() for tensor in (*model.parameters(), *model.buffers(), *_states(optimizer)))
    return meter


_Key = tuple[Scope | None, str, int | None, int]
"""Scope, op path and ordinal of a call, and the index of one of its op events."""
_Times = tuple[float, float]
"""Times of forward and backward, in ms."""


def for_all_layers(
    measured: Profile,
    whole: Profile,
    measured_weights: int,
    weights: int,
    layer_types: Sequence[str] = (),
) -> Profile:
    """Return the profile of the whole model with measured times.

    Args:
        measured: measured profile of the model's first layers and the modules around the layers.
        whole: profile of all layers, computed from shapes.
        measured_weights, weights: number of weights of the measured part and of the whole model; the time
            outside forward and backward is scaled by their ratio.
        layer_types: type of each layer (sliding or full attention), which ops and bytes do not show.

    Raises:
        ModelError: a layer is like none of the measured ones, or a real step runs other ops than the step on
            fake tensors.
    """
    kinds = _kinds(whole, layer_types)
    alike = _representatives(kinds, measured.num_layers)
    times = {key: (op_event.forward_ms, op_event.backward_ms) for key, op_event in _keyed(measured.op_events)}
    op_events = []
    missing: Counter[str] = Counter()
    for (scope, path, ordinal, number), op_event in _keyed(whole.op_events):
        scopes = alike[scope] if isinstance(scope, int) else (scope,)
        found = [times[key] for at in scopes if (key := (at, path, ordinal, number)) in times]
        if not found:
            missing[f"{scope}, {path or 'what is around'}"] += 1
            continue
        forward_ms, backward_ms = _mean(found)
        op_events.append(replace(op_event, forward_ms=forward_ms, backward_ms=backward_ms))
    if missing:
        raise ModelError([_other_ops(missing)])
    return replace(
        whole,
        op_events=tuple(op_events),
        link=measured.link,
        device=measured.device,
        device_bytes=measured.device_bytes,
        outside_ms=measured.outside_ms * weights / measured_weights,
        reserved_bytes=measured.reserved_bytes,
        source="measured",
    )


def _keyed(op_events: Iterable[OpEvent]) -> Iterator[tuple[_Key, OpEvent]]:
    """Yield op events with their keys; also those without a kernel, so that two profiles count alike."""
    seen: Counter[object] = Counter()
    for op_event in op_events:
        yield (*op_event.call, seen[op_event.call]), op_event
        seen[op_event.call] += 1


def _kinds(whole: Profile, layer_types: Sequence[str]) -> Mapping[int, object]:
    """Return what distinguishes layers: the type, the calls in order, and the bytes that they save."""
    calls: dict[int, list[object]] = defaultdict(list)
    for op_event in whole.op_events:
        scope, path, ordinal = op_event.call
        if isinstance(scope, int):
            calls[scope].append((path, ordinal))
    sizes: dict[int, dict[str, int]] = defaultdict(dict)
    for (scope, path), size_bytes in whole.saved.by_op().items():
        if isinstance(scope, int):
            sizes[scope][path] = size_bytes
    types = dict(enumerate(layer_types))
    return {
        layer: (types.get(layer), tuple(calls[layer]), tuple(sorted(sizes[layer].items()))) for layer in calls
    }


def _representatives(kinds: Mapping[int, object], measured: int) -> Mapping[int, tuple[int, ...]]:
    """Return for each layer the measured layers whose times it gets: itself, or all of its kind.

    Raises:
        ModelError: a layer is like none of the measured ones.
    """
    by_kind: dict[object, list[int]] = defaultdict(list)
    for layer in range(measured):
        by_kind[kinds[layer]].append(layer)
    strange = [layer for layer, kind in kinds.items() if kind not in by_kind]
    if strange:
        expected = f"at least {strange[0] + 1}: no earlier layer does what layer {strange[0]} does"
        raise ModelError([Problem("--layers", expected, str(measured))])
    return {layer: (layer,) if layer < measured else tuple(by_kind[kind]) for layer, kind in kinds.items()}


def _mean(times: list[_Times]) -> _Times:
    return sum(forward for forward, _ in times) / len(times), sum(back for _, back in times) / len(times)


def _other_ops(missing: Counter[str]) -> Problem:
    first = next(iter(missing))
    return Problem(
        "--layers",
        "a model that runs the same ops on this device as on fake tensors",
        f"{missing.total()} op(s) that did not run, the first in layer {first}",
        "Leave --layers out: then all layers are measured.",
    )
