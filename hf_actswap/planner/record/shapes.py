"""Makes a profile without a device: the step runs on fake tensors, and op times are computed from shapes.

Forward and backward both run, so saved tensors, temporary memory and releases occur as in a real step; but
nothing is computed and no memory is touched. The fake tensors are on the CPU, whatever the device: fused
attention saves the same there (its output and the softmax statistics).

What runs in tiles on the model runs in tiles here too, so the profile is that of the step in tiles: a tile
saves only its input, its forward runs once more within its backward, and one piece is there at a time.
Products that are summed in fp32 are counted as on an accelerator, without copies in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...plan.dry_run import dry_call, fake_batch, fake_weights
from ...plan.exchanged_weights import exchanged
from ...plan.model_structure import ModelStructure
from ..meter import CountingMeter
from ..profile import Profile
from .devices import DeviceRates, device_rates
from .op_times import op_ms
from .recorder import StepRecorder

_CPU = torch.device("cpu")


def profile_from_shapes(
    model: nn.Module,
    structure: ModelStructure,
    batch: Mapping[str, Any],
    device_name: str,
    *,
    optimizer_state_bytes: int = 0,
    gradients_exist: bool = False,
    with_workspaces: bool = False,
) -> Profile:
    """Return the profile of one micro-batch, run on fake tensors.

    No hook on the model runs, none of its tensors is touched, no random number is drawn; autocast is as it is
    when this is called. Compiled modules run eagerly.

    Args:
        model: the model inside its wrappers, as the model structure names it; may be on ``meta``. It must be
            in training mode if it has dropout.
        structure: structure of this model.
        batch: arguments of the model's call; with ``labels`` if there is to be a loss. Of tensors (also fake
            ones, also on ``meta``) only shape and type count.
        device_name: a device, as `devices.device_rates` takes it.
        optimizer_state_bytes: optimizer states on the device in every op event; the optimizer's time follows
            from them too.
        gradients_exist: whether backward adds to gradients that are there already (gradient accumulation).
        with_workspaces: whether the workspaces of the device's libraries are counted too.

    Raises:
        PlanError: there is no such device.
        Exception: whatever the model raises on fake tensors (data-dependent shapes, custom kernels).
    """
    rates = device_rates(device_name)
    meter = CountingMeter(unlimited_bytes=rates.memory_bytes)
    with dry_call(model, batch) as named:
        state = {name: _on_cpu(tensor) for name, tensor in fake_weights(model, _CPU).items()}
        call = fake_batch(named, _CPU)
        trained = [tensor for tensor in state.values() if tensor.requires_grad]
        if gradients_exist:
            for tensor in trained:
                tensor.grad = torch.empty_like(tensor)
        meter.own(state.values())
        weight_bytes = meter.allocated_bytes()
        workspace_bytes = rates.workspace_bytes if with_workspaces else 0
        baseline = torch.empty(optimizer_state_bytes + workspace_bytes, dtype=torch.uint8)
        meter.own([baseline, *(tensor.grad for tensor in trained if tensor.grad is not None)])
        meter.own(leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor))
        recorder = StepRecorder(
            model,
            structure,
            meter,
            RooflineClock(rates),
            compiles=False,
            device=_CPU,
            gradient_bytes=_counter_of_gradients(trained),
        )
        meter.start()
        try:
            with recorder, exchanged(model, state):  # in backward too: layers run again there
                _run_step(model, call)
        finally:
            meter.stop()
    trained_bytes = sum(tensor.nbytes for tensor in trained)
    moved_bytes = 2 * optimizer_state_bytes + 3 * trained_bytes  # weights both ways, gradients once
    return recorder.profile(
        device=rates.name,
        device_bytes=rates.memory_bytes,
        link=rates.link,
        optimizer_state_bytes=optimizer_state_bytes,
        outside_ms=moved_bytes / rates.bytes_per_ms if optimizer_state_bytes else 0.0,
        weight_bytes=weight_bytes,
        source="shapes",
    )


def _run_step(model: nn.Module, call: Mapping[str, Any]) -> None:
    result = _result(model(**call))  # the rest is freed, as in training
    if result is not None:
        result.backward(torch.empty_like(result))


def _counter_of_gradients(trained: Sequence[torch.Tensor]) -> Callable[[], int]:
    """Return a function that returns how many bytes of gradients autograd has accumulated so far."""
    there = {id(tensor): tensor.nbytes for tensor in trained if tensor.grad is not None}

    def accumulated(tensor: torch.Tensor) -> None:
        there[id(tensor)] = tensor.nbytes

    for tensor in trained:
        tensor.register_post_accumulate_grad_hook(accumulated)
    return lambda: sum(there.values())


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == _CPU:
        return tensor
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def _result(output: Any) -> torch.Tensor | None:
    """Return the loss, or without one the first result that requires a gradient."""
    loss = getattr(output, "loss", None)
    leaves = [loss] if isinstance(loss, torch.Tensor) else tree_leaves(output)
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)


@dataclass(frozen=True, slots=True)
class RooflineStamp:
    """A time in ms since its `RooflineClock` was made."""

    ms: float

    def ms_since(self, earlier: RooflineStamp) -> float:
        """Return the time from ``earlier`` to this stamp, in ms."""
        return self.ms - earlier.ms


class RooflineClock:
    """A `Clock` that adds up how long ops would take on a device, by their shapes.

    How long an op takes says `op_ms`.

    Args:
        rates: rates of the device.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self._rates = rates
        self._now_ms = 0.0

    def stamp(self) -> RooflineStamp:
        """Return a stamp of the present time."""
        return RooflineStamp(self._now_ms)

    def synchronize(self) -> None:
        """Do nothing: no op is in flight."""

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Add the time of an aten op that ran."""
        self._now_ms += op_ms(self._rates, func, args, kwargs, result)
