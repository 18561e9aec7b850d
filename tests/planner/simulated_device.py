"""A device whose memory is counted and ends, on the CPU: it raises what an accelerator raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_actswap import apply
from hf_actswap.engine import Transfer
from hf_actswap.planner import CountingMeter, Planner


class SimulatedDevice(CountingMeter):
    """Counts from `on` to `off`, whoever starts and stops its meter in between."""

    def on(self, model: nn.Module) -> None:
        self.own(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))
        super().start()

    def off(self) -> None:
        super().stop()

    def start(self) -> None:
        """A device cannot be stopped, and so not be started."""

    def stop(self) -> None:
        """See `start`."""


@dataclass
class Trained:
    """What a training did, step by step.

    Args:
        losses: as floats, exactly.
        phases: in which each step ran.
        peaks: bytes in use at most in forward and backward of each step.
        planner: after the last step; its plan has been removed.
        plan_rows: of the plan that was on at the end.
        weights: at the end.
    """

    losses: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    planner: Planner | None = None
    plan_rows: tuple[Any, ...] = ()
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)

    def stable_peaks(self) -> list[int]:
        return [peak for peak, phase in zip(self.peaks, self.phases, strict=True) if phase == "stable"]


@contextmanager
def on_device(model: nn.Module, limit_bytes: int | None = None) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(limit_bytes)
    device.on(model)
    try:
        yield device
    finally:
        device.off()


def train(
    build: Callable[[], Any],
    memory: Mapping[str, Any] | None = None,
    steps: int = 12,
    limit_bytes: int | None = None,
    shape: tuple[int, int] | Callable[[int], tuple[int, int]] = (4, 128),
    micro_batches: int = 1,
    transfer: Transfer | None = None,
    **sections: Any,
) -> Trained:
    """Train with AdamW; ``memory`` ``None``: without the planner."""
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    trained = Trained()
    with on_device(model, limit_bytes) as device:
        planner: Any = None
        if memory is not None:
            config = {
                "memory": {"search_steps": 2, **memory},
                **sections,
            }  # one candidate: each costs a second
            planner = apply(model, config, optimizer=optimizer, meter=device, transfer=transfer)
        try:
            for step in range(steps):
                device.reset_peak()
                if planner is not None:
                    trained.phases.append(planner.phase)
                size = shape(step) if callable(shape) else shape
                peak = 0
                for _ in range(micro_batches):
                    ids = torch.randint(0, model.config.vocab_size, size, generator=generator)
                    loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
                    peak = max(peak, device.peak_bytes())
                    trained.losses.append(loss.item())
                    del loss
                trained.peaks.append(peak)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            if planner is not None:
                trained.planner, trained.plan_rows = planner, planner.plan.rows
                planner.remove()
    trained.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return trained
