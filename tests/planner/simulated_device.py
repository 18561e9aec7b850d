"""A device whose memory is counted and ends, on the CPU: it raises what an accelerator raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_actswap import apply
from hf_actswap.engine import Transfer
from hf_actswap.planner import CountingMeter, Planner, devices, on_paper
from hf_actswap.planner.phases import planner as leading
from hf_actswap.planner.phases import search

Shape = tuple[int, int]


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


def make_device_known(patch: pytest.MonkeyPatch) -> None:
    """Take the counted device for a tiny H100; its libraries take no workspaces, for none are counted.

    Its steps take a CPU's time, as if all waited for the host: nothing is compared with whole layers.
    """
    patch.setattr(devices, "DEVICES", tuple(replace(one, workspace_bytes=0) for one in devices.DEVICES))
    patch.setattr(leading, "LEAST_ON_PAPER_BYTES", 0)
    patch.setattr(search, "whole_layers", lambda _: None)
    patch.setattr(on_paper, "rates_name", lambda _: "H100")


@dataclass
class Trained:
    """What a training did, step by step.

    Args:
        losses: as floats, exactly; of each micro-batch.
        phases: in which each step ran.
        peaks: bytes in use at most in forward and backward of each step.
        recomputes, rows: of each step that the planner watched: regions run again, and the plan's rows.
        planner: after the last step; its plan has been removed.
        plan_rows: of the plan that was on at the end.
        guarded: of the planner at the end.
        weights: at the end.
    """

    losses: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    recomputes: list[int] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    planner: Planner | None = None
    plan_rows: tuple[Any, ...] = ()
    guarded: bool = False
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)

    def stable(self, values: list[Any]) -> list[Any]:
        """Of values of all steps those of the stable ones."""
        return [value for value, phase in zip(values, self.phases, strict=True) if phase == "stable"]

    def stable_peaks(self) -> list[int]:
        return self.stable(self.peaks)


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
    shape: Shape | Callable[[int], Shape | list[Shape]] = (4, 128),
    micro_batches: int = 1,
    transfer: Transfer | None = None,
    zeroes_late: bool = False,
    together: bool = False,
    by_position: bool = False,
    own_loss: bool = False,
    autocast: bool = False,
    **sections: Any,
) -> Trained:
    """Train with AdamW.

    Args:
        memory: ``None``: without the planner.
        shape: of all batches, or of a step's; a list: of each of its micro-batches.
        zeroes_late: whether gradients are set to zero between a step's first forward and backward.
        together: whether one backward follows the forwards of all micro-batches.
        by_position: whether the model is called with its ids as a positional argument, and returns logits.
        own_loss: whether the loop computes the loss, from the model's logits.
        autocast: whether the loop has the forward in bf16 autocast.
    """
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    trained = Trained()
    with on_device(model, limit_bytes) as device:
        planner: Any = None
        if memory is not None:
            # One candidate: each costs a second. Of tensors as tiny as these checksums have not few bytes.
            config = {"memory": {"search_steps": 2, "verify": "off", **memory}, **sections}
            planner = apply(model, config, optimizer=optimizer, meter=device, transfer=transfer)
        try:
            for step in range(steps):
                device.reset_peak()
                if planner is not None:
                    trained.phases.append(planner.phase)
                    before = planner.stats()
                sizes = shape(step) if callable(shape) else shape
                sizes = sizes if isinstance(sizes, list) else [sizes] * micro_batches
                losses = []
                for number, size in enumerate(sizes):
                    ids = torch.randint(0, model.config.vocab_size, size, generator=generator)
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        if by_position:
                            loss = _loss_of(model(ids).logits, ids)
                        elif own_loss:
                            loss = _loss_of(model(input_ids=ids).logits, ids)
                        else:
                            loss = model(input_ids=ids, labels=ids).loss
                    if zeroes_late and not number:
                        optimizer.zero_grad()
                    trained.losses.append(loss.item())
                    losses.append(loss)
                    del loss
                    if not together or number == len(sizes) - 1:
                        sum(losses).backward()
                        losses.clear()
                trained.peaks.append(device.peak_bytes())
                if planner is not None:
                    trained.recomputes.append((planner.stats() - before).recomputes)
                    trained.rows.append(planner.plan.rows)
                optimizer.step()
                if not zeroes_late:
                    optimizer.zero_grad()
        finally:
            if planner is not None:
                trained.planner, trained.plan_rows = planner, planner.plan.rows
                trained.guarded = planner.final_plan is None
                planner.remove()
    trained.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return trained


def _loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
