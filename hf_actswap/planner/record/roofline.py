"""Time of aten ops by their shapes: the slower of arithmetic and memory, and never less than a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .devices import DeviceRates

_HALF = (torch.bfloat16, torch.float16)
_GATHERS = frozenset({"embedding", "index_select", "gather", "index", "nll_loss_forward", "slice_backward"})
"""What they read is as much as they give, not all that they are given."""

_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, slots=True)
class RooflineStamp:
    """A time since the clock was made, in ms."""

    ms: float

    def ms_since(self, earlier: RooflineStamp) -> float:
        """See `engine.transfer.Stamp`."""
        return self.ms - earlier.ms


class RooflineClock:
    """Adds up what ops would take on a device. See `Clock`.

    Args:
        rates: of the device.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self._rates = rates
        self._now_ms = 0.0

    def stamp(self) -> RooflineStamp:
        """See `Clock`."""
        return RooflineStamp(self._now_ms)

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """See `Clock`."""
        name = _name(func)
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
    """Return the arithmetic of fused attention, half of it where it is causal; ``None``: another op.

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
    """Names of the arguments, and whether it is the backward op."""
    name = _name(func)
    if not name.startswith("_scaled_dot_product_") or "math" in name:
        return None
    arguments = func._schema.arguments  # type: ignore[attr-defined]
    return tuple(item.name for item in arguments), name.endswith("backward")


@lru_cache(maxsize=4096)
def _name(func: Callable[..., Any]) -> str:
    """``aten::mm.default`` is ``mm``; in-place and out-of-place forms share a name."""
    schema = getattr(func, "_schema", None)
    name = schema.name if schema is not None else getattr(func, "__name__", "")
    return str(name).rpartition("::")[2].rstrip("_")


def _touched_bytes(tensor: torch.Tensor) -> int:
    """What a kernel reads or writes of a tensor: an expanded dimension once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, step in steps if step or not size) * tensor.element_size()
