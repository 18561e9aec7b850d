"""The function mode that names ops while a layer runs, and runs recomputed functions as regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..plan.op_facts import COMMUNICATIONS, can_run_again, draws_random_numbers
from ..plan.opnames import function_name
from ..plan.record import storage_key
from .fates import KEEP, Action, FateTable
from .forward_pass import ForwardPass
from .recompute import RecomputeError, Region
from .stats import Counters


class NamingMode(TorchFunctionMode):
    """Names the functions of one call of one layer, and looks up what the plan does with each of them.

    Args:
        forward: the forward of the model that runs.
        fates: the plan's action for each op.
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
        known = {forward.track(tensor) for tensor in inputs}
        region = self._region(func, path, name, args, kwargs, action)
        versions = None if region is None else [tensor._version for tensor in inputs]
        forward.running = action
        outer = forward.region
        kept = None if outer is None else outer.kept
        if outer is not None and kept is not None:
            foreign = region is None and action.kind not in ("recompute_inside", "recompute_function")
            random = foreign and draws_random_numbers(func, name, args, kwargs)
            kept.on_call(name, path, (args, kwargs), outer.packs, foreign, random)
        if region is not None:
            forward.region = region
        try:
            result = func(*args, **kwargs)
        finally:
            forward.running = None
            forward.region = outer
        if region is not None and versions != [tensor._version for tensor in inputs]:
            raise RecomputeError(
                f"{region.name}: it writes into what it reads, so it cannot be run again; keep it "
                "(select_recompute_exclude)"
            )
        self._own_outputs(result, known, path, action, region)
        if outer is not None and kept is not None:
            kept.on_return(name, path, result, outer.packs)
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
        """Open a region for a recomputed function, unless a recomputed module around it has one.

        A communication gets its own even there: its result leaves the module, which would keep it otherwise.
        """
        if (
            action.kind != "recompute_function"
            or (self._forward.region is not None and name not in COMMUNICATIONS)
            or not torch.is_grad_enabled()
            or not can_run_again(func, name, kwargs)
        ):
            return None
        random = draws_random_numbers(func, name, args, kwargs)
        ticket_of = self._forward.ticket_of_input
        name = f"{self._forward.scope}.{path}"
        return Region(name, func, args, kwargs, ticket_of, self._counters, random)

    def _own_outputs(
        self, result: Any, known: set[int | None], path: str, action: Action, region: Region | None
    ) -> None:
        """Register the outputs that have a storage of their own (views and in-place results have none)."""
        forward = self._forward
        fresh = False
        for position, tensor in enumerate(_tensors(result)):
            if storage_key(tensor) not in known:
                forward.owners.own(tensor, action, region, position)
                if region is not None:
                    region.returned(position, tensor)
                fresh = True
        if fresh and forward.stack is not None:
            forward.stack.count(path)


def end_region(forward: ForwardPass, output: Any) -> None:
    """End the region of a recomputed module. Its output is kept, unless a repeated communication made it."""
    region, forward.region = forward.region, None
    if region is not None:
        region.close()
    for tensor in _tensors(output):
        owner = forward.owners.owner(tensor)
        if owner is None or owner.region is None:
            forward.owners.own(tensor, KEEP)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a function's arguments or result; most are flat, and flattening trees is slow."""
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
