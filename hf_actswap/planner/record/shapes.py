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
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...plan.dry_run import dry_call, fake_batch, fake_weights
from ...plan.model_structure import ModelStructure
from ..meter import CountingMeter
from ..profile import Profile
from .devices import DeviceRates, device_rates
from .recorder import StepRecorder

_CPU = torch.device("cpu")

_HALF = (torch.bfloat16, torch.float16)
_GATHERS = frozenset({"embedding", "index_select", "gather", "index", "nll_loss_forward", "slice_backward"})
"""Ops that read only as many bytes of their inputs as they return."""

_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def profile_from_shapes(
    model: nn.Module,
    structure: ModelStructure,
    batch: Mapping[str, Any],
    device_name: str,
    *,
    optimizer_state_bytes: int = 0,
    gradients_exist: bool = False,
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
        baseline = torch.empty(optimizer_state_bytes, dtype=torch.uint8)
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
            with recorder:
                functional_call(
                    _Step(model), {f"model.{name}": item for name, item in state.items()}, (), call
                )
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


class _Step(nn.Module):
    """Runs a model's forward and backward as one call, so that recomputation finds the same weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **call: Any) -> None:
        result = _result(self.model(**call))  # the rest is freed, as in training
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

    Each op takes the longer of the times for its arithmetic and its memory, and no less than a launch.

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
        name = _op_name(func)
        if name in _NO_KERNEL:
            return
        rates = self._rates
        given = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        arithmetic_ms, attention = 0.0, attention_flops(func, args, kwargs)
        half = any(leaf.dtype in _HALF for leaf in given)
        if attention is not None:
            rate = rates.attention_flop_per_ms
            arithmetic_ms = attention / (
                rate if half else rate * rates.full_flop_per_ms / rates.half_flop_per_ms
            )
        elif (formula := flop_registry.get(getattr(func, "_overloadpacket", None))) is not None:
            flops = formula(*args, **kwargs, out_val=result)
            arithmetic_ms = flops / (rates.half_flop_per_ms if half else rates.full_flop_per_ms)
        moved_bytes = sum(map(_touched_bytes, made)) * (2 if name in _GATHERS else 1)
        if name not in _GATHERS:
            moved_bytes += sum(map(_touched_bytes, given))
        self._now_ms += max(arithmetic_ms, moved_bytes / rates.bytes_per_ms, rates.launch_ms)


def attention_flops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the FLOPs of a fused attention op, half of them if it is causal; ``None`` for other ops.

    Forward has two products of (length x length x width), backward five.
    """
    layout = _attention_layout(func)
    if layout is None:
        return None
    names, backward = layout
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = named["query"].shape, named["key"].shape, named["value"].shape
    pairs = prod(query[:-1]) * key[-2]
    products = pairs * 2 * ((3 * query[-1] + 2 * value[-1]) if backward else (query[-1] + value[-1]))
    return products // 2 if named.get("is_causal") else products


@lru_cache(maxsize=4096)
def _attention_layout(func: Callable[..., Any]) -> tuple[tuple[str, ...], bool] | None:
    """Return a fused attention op's argument names, and whether it is the backward; ``None``: another op."""
    name = _op_name(func)
    if not name.startswith("_scaled_dot_product_") or "math" in name:
        return None
    arguments = func._schema.arguments  # type: ignore[attr-defined]
    return tuple(item.name for item in arguments), name.endswith("backward")


@lru_cache(maxsize=4096)
def _op_name(func: Callable[..., Any]) -> str:
    """Return an op's short name: ``mm`` for ``aten::mm.default``; in-place forms have the same name."""
    schema = getattr(func, "_schema", None)
    name = schema.name if schema is not None else getattr(func, "__name__", "")
    return str(name).rpartition("::")[2].rstrip("_")


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel reads or writes of a tensor; an expanded dimension counts once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, step in steps if step or not size) * tensor.element_size()
