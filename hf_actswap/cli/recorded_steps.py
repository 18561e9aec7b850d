"""Real steps of a model on this machine, as the planner records them in warm-up.

Weights are random, and so are the tokens: times and bytes depend on neither, but for experts that tokens are
routed to. As in training, memory is taken from one step and times from others, because asking the allocator
after each op takes longer than a small op runs; of each span the median of the timed steps counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from ..engine.host_memory import available_bytes
from ..engine.transfer import Transfer
from ..engine.transfer_streams import transfer_of
from ..plan import Outline
from ..planner.meter import AllocatorMeter, CountingMeter, Meter
from ..planner.profile import Profile
from ..planner.record.clock import DeviceClock
from ..planner.record.recorder import StepRecorder
from ..planner.warm_up import with_memory_of
from .model_source import DTYPES
from .step import StepShape

WARM_UP_STEPS, TIMED_STEPS = 2, 3

Progress = Callable[[str, int], None]
"""Told the stage, and how many of its steps are left; see `report.PlannerBar`."""


@dataclass
class RecordedSteps:
    """Trains a model for a few steps and records the last ones.

    Args:
        model: on its device, in training mode; its weights are changed.
        shape: its outline.
        step: the batch, mixed precision and optimizer.
        progress: see `Progress`.
    """

    model: nn.Module
    shape: Outline
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
    """Return the last profile with the median of each time; as it is, if the steps ran different ops."""
    last = profiles[-1]
    calls = [span.call for span in last.spans]
    if any([span.call for span in profile.spans] != calls for profile in profiles):
        return last
    spans = tuple(
        replace(
            same[-1],
            forward_ms=median(span.forward_ms for span in same),
            backward_ms=median(span.backward_ms for span in same),
        )
        for same in zip(*(profile.spans for profile in profiles), strict=True)
    )
    return replace(last, spans=spans, outside_ms=median(profile.outside_ms for profile in profiles))


def _random_batch(model: nn.Module, step: StepShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Ids and labels of shape (sequences, tokens); one tensor each: a model may move or cut its labels."""
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
