"""The function mode that names ops while a layer runs, and runs recomputed functions as regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..plan.opnames import RANDOM_FUNCTIONS, function_name
from ..plan.record import storage_key
from .fates import Action, FateTable
from .forward_pass import ForwardPass
from .recompute import Region
from .stats import Counters


class NamingMode(TorchFunctionMode):
    """Active during one call of one layer.

    Args:
        forward: the running pass.
        fates: the plan.
        counters: where recomputations are counted.
    """

    def __init__(self, forward: ForwardPass, fates: FateTable, counters: Counters) -> None:
        super().__init__()
        self._forward, self._fates, self._counters = forward, fates, counters

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        forward, name = self._forward, function_name(func)
        stack, scope = forward.stack, forward.scope
        if name is None or stack is None or scope is None or forward.packing:
            return func(*args, **kwargs)
        path, ordinal = stack.begin(name)
        action = self._fates[scope, path, ordinal]
        inputs = _tensors((*args, *kwargs.values()) if kwargs else args)
        known = {forward.meet(tensor) for tensor in inputs}
        region = self._region(func, path, name, args, kwargs, action)
        forward.running = action
        if region is not None:
            forward.region = region
        try:
            result = func(*args, **kwargs)
        finally:
            forward.running = None
            if region is not None:
                forward.region = None
        self._own_outputs(result, known, path, action, region)
        return result

    def _region(
        self,
        func: Callable[..., Any],
        path: str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        action: Action,
    ) -> Region | None:
        """Open a region for a recomputed function, unless a recomputed module around it has one."""
        if (
            action.kind != "recompute_function"
            or self._forward.region is not None
            or not torch.is_grad_enabled()
        ):
            return None
        random = name in RANDOM_FUNCTIONS or bool(kwargs.get("dropout_p"))
        ticket_of = self._forward.ticket_of_input
        return Region(f"{self._forward.scope}.{path}", func, args, kwargs, ticket_of, self._counters, random)

    def _own_outputs(
        self, result: Any, known: set[int | None], path: str, action: Action, region: Region | None
    ) -> None:
        """Register the outputs that have a storage of their own (views and in-place results have none)."""
        forward = self._forward
        fresh = False
        for position, tensor in enumerate(_tensors(result)):
            if storage_key(tensor) not in known:
                forward.owners.own(tensor, action, region, position)
                fresh = True
        if fresh and forward.stack is not None:
            forward.stack.count(path)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a function's arguments or result; most are flat, and flattening trees is slow."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, tuple | list):
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    found: list[torch.Tensor] = []
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, tuple | list | dict):
            found += _tensors(item)
    return found
