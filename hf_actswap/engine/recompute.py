"""Recomputation: a region is run again in backward, and what it saved is caught on the way.

A **region** is one call of a module or of a function. Its saved tensors get `RegionTicket`s, numbered in
the order in which autograd packed them. The first ticket that is asked runs the region again with the same
inputs, autocast state and random state, under hooks that catch the packed tensors by number; the run stops
as soon as the last one needed is there. Each caught tensor is handed out once per backward and then
dropped; a second backward (``retain_graph``) runs the region again.

A recomputed *module* keeps its output. A recomputed *function* drops it: the consumers of its output get
`OutputTicket`s that run the function again, and its inputs are tickets in turn, so chains unfold by
themselves. A region is run again exactly as it ran, so gradients are bitwise equal.

Whole layers ride on ``torch.utils.checkpoint`` (`checkpointed`), non-reentrant with early stop. Its hooks
lie inside ours and win, so a layer in which some op is excluded from recomputation is a region instead.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .stats import Counters
from .tickets import StaleTensorError, SwapGroup, Ticket, View, restore


class RecomputeError(RuntimeError):
    """A region did not save the same tensors when it was run again."""


class _AllCaught(Exception):
    """Ends a recomputation early."""


class Region:
    """One call of a module or function that can be run again.

    Args:
        name: for messages.
        run: the module or function.
        args, kwargs: of the call; tensors among them are held by tickets.
        ticket_of: makes the ticket for an input.
        random: whether the random state must be restored.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ticket_of: Callable[[torch.Tensor], Ticket],
        counters: Counters,
        random: bool,
    ) -> None:
        self.name = name
        self.packs = 0
        self.input_groups: list[SwapGroup] = []
        self._run, self._counters = run, counters
        leaves, self._spec = tree_flatten((args, kwargs))
        self._leaves = [
            _Input(ticket_of(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        device_type = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
        self._autocast = [_autocast_state(kind) for kind in {"cpu", device_type}]
        self._random = _random_state(device_type) if random else None
        self._expected: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self._outputs: Counter[int] = Counter()
        self._caught: dict[int, _Kept] = {}
        self._rebuilt: dict[int, tuple[_Kept, int]] = {}

    def saved(self, tensor: torch.Tensor) -> RegionTicket:
        """Make the ticket of the tensor packed last."""
        index = self.packs - 1
        self._expected[index] = (tensor.shape, tensor.dtype)
        return RegionTicket(self, index)

    def output(self, position: int, view: View) -> OutputTicket:
        """Make a ticket for a view of output ``position`` (among the tensors that the call returned)."""
        self._outputs[position] += 1
        return OutputTicket(self, position, view)

    def take_saved(self, index: int) -> torch.Tensor:
        """Return saved tensor ``index``, running the region again if it must."""
        if index not in self._caught:
            self._run_again(outputs=False)
        return self._caught.pop(index).tensor()

    def take_output(self, position: int) -> torch.Tensor:
        """Return output ``position``; it is dropped when all its consumers have had it."""
        if position not in self._rebuilt:
            self._run_again(outputs=True)
        kept, left = self._rebuilt[position]
        if left > 1:
            self._rebuilt[position] = (kept, left - 1)
        else:
            del self._rebuilt[position]
        return kept.tensor()

    def _run_again(self, outputs: bool) -> None:
        self._counters.recomputes += 1
        leaves = [leaf.tensor() if isinstance(leaf, _Input) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        catcher = _Catcher(self.name, self._expected, early=not (outputs or self._outputs))
        with ExitStack() as stack:
            for state in self._autocast:
                stack.enter_context(_autocast(state))
            if self._random is not None:
                stack.enter_context(_replayed(self._random))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(catcher.pack, catcher.unpack))
            try:
                result = self._run(*args, **kwargs)
            except _AllCaught:
                result = None
        if missing := [index for index in self._expected if index not in catcher.caught]:
            raise RecomputeError(
                f"{self.name}: run again, it saved {catcher.count} tensors and not number {missing[0]}; "
                "it must do the same work each time (data-dependent control flow? a changed module?)"
            )
        self._caught.update(catcher.caught)
        if self._outputs and result is not None:
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._rebuilt.update({i: (_Kept(tensors[i].detach()), uses) for i, uses in self._outputs.items()})


class _Kept:
    """A rebuilt tensor, with the version that it had."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> torch.Tensor:
        """Return it. Raises `StaleTensorError` if the backward of another op wrote into it."""
        if self._tensor._version != self._version:
            raise StaleTensorError(self._tensor.shape, self._version, self._tensor._version)
        return self._tensor


class _Input:
    """A tensor that a region was called with."""

    __slots__ = ("_requires_grad", "_ticket")

    def __init__(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        self._ticket, self._requires_grad = ticket, tensor.requires_grad

    def tensor(self) -> torch.Tensor:
        return restore(self._ticket).detach().requires_grad_(self._requires_grad)


class _Catcher:
    """Hooks of a recomputation: catch by number what is needed, keep nothing else."""

    def __init__(self, name: str, expected: dict[int, tuple[torch.Size, torch.dtype]], early: bool) -> None:
        self._name, self._expected, self._early = name, expected, early
        self.count = 0
        self.caught: dict[int, _Kept] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        index = self.count
        self.count += 1
        if index in self._expected:
            if (tensor.shape, tensor.dtype) != self._expected[index]:
                raise RecomputeError(
                    f"{self._name}: run again, saved tensor {index} is {list(tensor.shape)} {tensor.dtype}; "
                    f"in forward it was {list(self._expected[index][0])} {self._expected[index][1]}"
                )
            self.caught[index] = _Kept(tensor.detach())
            if self._early and len(self.caught) == len(self._expected):
                raise _AllCaught
        return index

    def unpack(self, index: int) -> torch.Tensor:
        raise RecomputeError(
            f"{self._name}: a recomputation has no backward of its own (saved tensor {index})"
        )


class RegionTicket:
    """Saved tensor ``index`` of a region."""

    __slots__ = ("_index", "_region")

    def __init__(self, region: Region, index: int) -> None:
        self._region, self._index = region, index

    def restore(self) -> torch.Tensor:
        """Return the tensor, rebuilt."""
        return self._region.take_saved(self._index)


class OutputTicket:
    """A view of what a recomputed function returned."""

    __slots__ = ("_position", "_region", "_view")

    def __init__(self, region: Region, position: int, view: View) -> None:
        self._region, self._position, self._view = region, position, view

    def restore(self) -> torch.Tensor:
        """Return the tensor, rebuilt."""
        return self._view.on(self._region.take_output(self._position), 0)


def checkpointed(layer: nn.Module) -> Callable[[], None]:
    """Put ``torch.utils.checkpoint`` around a layer's forward; return what takes it off again."""
    own = vars(layer).get("forward")
    forward = layer.forward
    first = next(iter(inspect.signature(forward).parameters), "")

    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not args and first in kwargs:  # saved-tensor hooks see only what is passed by position
            args = (kwargs.pop(first),)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    layer.forward = checkpointed_forward

    def remove() -> None:
        if own is None:
            vars(layer).pop("forward", None)
        else:
            layer.forward = own

    return remove


_AutocastState = tuple[str, bool, torch.dtype, bool]


def _autocast_state(device_type: str) -> _AutocastState:
    return (
        device_type,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


def _autocast(state: _AutocastState) -> torch.autocast:
    device_type, enabled, dtype, cache = state
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache)


def _random_state(device_type: str) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device_type != "cpu":
        states[device_type] = torch.get_device_module(device_type).get_rng_state()
    return states


@contextmanager
def _replayed(states: dict[str, torch.Tensor]) -> Iterator[None]:
    """Run with the random state of the forward, and leave the present one as it was."""
    present = {kind: _random_state(kind)[kind] for kind in states}
    try:
        _set_random_state(states)
        yield
    finally:
        _set_random_state(present)


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    for kind, state in states.items():
        (torch if kind == "cpu" else torch.get_device_module(kind)).set_rng_state(state)
