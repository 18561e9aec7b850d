"""How long an aten op takes on a device, computed from the shapes of its tensors and the device's rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .devices import DeviceRates

_HALF = (torch.bfloat16, torch.float16)
_GATHERS = frozenset({"embedding", "index_select", "gather", "index", "nll_loss_forward", "slice_backward"})
"""Ops that read only as many bytes of their inputs as they return."""

_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def op_ms(
    rates: DeviceRates,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
) -> float:
    """Return how long an aten op takes: the longer of the times for its arithmetic and its memory.

    It is no less than the time of a launch, and 0 for an op without a kernel.

    Args:
        rates: rates of the device.
        func: the op, as a dispatch mode gets it.
        args, kwargs: its arguments; of tensors only shapes, strides and types count.
        result: what it returned.
    """
    name = _op_name(func)
    if name in _NO_KERNEL:
        return 0.0
    given = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    arithmetic_ms, attention = 0.0, attention_flops(func, args, kwargs)
    half = any(leaf.dtype in _HALF for leaf in given)
    if attention is not None:
        rate = rates.attention_flop_per_ms
        arithmetic_ms = attention / (rate if half else rate * rates.full_flop_per_ms / rates.half_flop_per_ms)
    elif (formula := flop_registry.get(getattr(func, "_overloadpacket", None))) is not None:
        flops = formula(*args, **kwargs, out_val=result)
        arithmetic_ms = flops / (rates.half_flop_per_ms if half else rates.full_flop_per_ms)
    moved_bytes = sum(map(_touched_bytes, made)) * (2 if name in _GATHERS else 1)
    if name not in _GATHERS:
        moved_bytes += sum(map(_touched_bytes, given))
    return max(arithmetic_ms, moved_bytes / rates.bytes_per_ms, rates.launch_ms)


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
