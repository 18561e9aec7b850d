"""One call of an op that a region keeps: how its result comes back when the region runs again.

`kept_results` uses this. A record of a call has: how many tensors the region had saved before it and after
it, the geometry of its arguments, which tensors it saved that the region must rebuild (views of its
arguments: all others that it saves are kept), what it returned, and the random state after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..plan.record import storage_key
from .replay import RandomState, random_state, same_random_state, set_random_state
from .tickets import StaleTensorError, Ticket, restore
from .views import View

TicketOf = Callable[[torch.Tensor], Ticket]

RUN = object()
"""Returned in place of a result: the op must run."""


class ReplayMismatch(Exception):
    """A region does not do what it did in forward; every op of it must run."""


_CONSTANTS = (int, float, bool, str, type(None))

_Geometry = tuple[torch.Size, tuple[int, ...] | None, torch.dtype]


class Catches(Protocol):
    """Receives the saved tensors, in order, while a region runs again.

    Attributes:
        count: how many were saved so far; the number of the next one.
    """

    count: int

    def pack(self, tensor: torch.Tensor) -> int:
        """Take the next saved tensor; return its number."""


@dataclass(frozen=True)
class _ArgumentView:
    """A saved tensor that is a view of argument ``at``; the view's offset counts from the argument's."""

    at: int
    view: View

    def of(self, leaves: Sequence[Any]) -> torch.Tensor:
        argument: torch.Tensor = leaves[self.at]
        offset = int(argument.storage_offset()) + self.view.offset_bytes // argument.element_size()
        return argument.detach().as_strided(self.view.shape, self.view.stride, offset)


class Result:
    """One tensor that a kept call returned.

    First it holds the tensor itself, because it is not known yet whether it is needed; then a ticket, or
    nothing. If only functions of the same op read it (the scores of eager attention) it is *inner*: these do
    not run again either, and get a tensor of its geometry on ``meta``.
    """

    __slots__ = ("_outside", "_requires_grad", "_tensor", "_ticket", "_version", "_view", "inner", "written")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._ticket: Ticket | None = None
        self._view, self._requires_grad = View.of(tensor), tensor.requires_grad
        self._version = tensor._version
        self.inner = self.written = self._outside = False

    def hold(self, ticket_of: TicketOf) -> None:
        """Hold the tensor by a ticket, because the region needs it to run again."""
        if self._tensor is not None:
            self.check_version(self._tensor)
        if self._tensor is not None and not self.written:
            self._ticket, self._tensor = ticket_of(self._tensor), None

    def check_version(self, tensor: torch.Tensor) -> None:
        """Drop the result if ``tensor``, a view of it, shows that it was written since it was returned."""
        if tensor._version != self._version:
            self.written = True
            self.drop()

    def drop(self) -> None:
        """Hold the tensor no longer."""
        self._ticket = self._tensor = None

    def read_inside(self) -> None:
        """Note that another function of the same op has read it, which does not run again either."""
        if not self._outside:
            self.drop()
            self.inner = True

    def read_outside(self, tensor: torch.Tensor) -> None:
        """Note that an op that may run again reads it, as ``tensor``, a view of the same storage."""
        if self.inner:
            offset = self._view.offset_bytes // self._view.dtype.itemsize
            self._tensor = tensor.detach().as_strided(self._view.shape, self._view.stride, offset)
        self.inner, self._outside = False, True

    def again(self) -> torch.Tensor | None:
        """Return the tensor for a new run; ``None`` if it is not held."""
        if self.inner:
            shape, stride = self._view.shape, self._view.stride
            found = torch.empty_strided(shape, stride, dtype=self._view.dtype, device="meta")
        elif self._ticket is not None:
            found = restore(self._ticket).detach()
        else:
            return None
        return found.requires_grad_(self._requires_grad)


class KeptCall:
    """The record of one call of a kept function or module; made when the call begins.

    Args:
        arguments: tree of its arguments.
        first_pack: how many tensors the region has saved before it.
        device: where it computes.
        random: whether it may draw random numbers.
    """

    def __init__(self, arguments: Any, first_pack: int, device: torch.device, random: bool) -> None:
        self._leaves = tree_leaves(arguments)
        self._geometry = [_geometry(leaf) for leaf in self._leaves]
        self._first_pack = first_pack
        self._device = device
        self._random: RandomState | None = random_state(device) if random else None
        self._repeatable = not any(isinstance(leaf, torch.Generator) for leaf in self._leaves)
        self._shown: dict[int, _ArgumentView] = {}
        self._returned: list[Any] = []
        self._spec: TreeSpec | None = None
        self.returned_only_views = False
        """Whether it has returned nothing but views of its arguments."""
        self.after = first_pack
        """How many tensors the region has saved when it returns."""
        self.functions: Counter[str] = Counter()
        """How often each function was called inside it."""

    def saved(self, index: int, tensor: torch.Tensor) -> None:
        """Record that it saves tensor ``index``, which the region must rebuild, as a view of an argument."""
        key, view = storage_key(tensor), View.of(tensor)
        start, stop = view.range_bytes
        for at, leaf in enumerate(self._leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != tensor.dtype or storage_key(leaf) != key:
                continue
            whole = View.of(leaf)
            first, last = whole.range_bytes
            if first <= start and stop <= last:
                self._shown[index] = _ArgumentView(
                    at, view._replace(offset_bytes=view.offset_bytes - whole.offset_bytes)
                )
                return
        self._repeatable = False  # it saved a tensor that is no view of an argument

    def returned(self, value: Any, after: int) -> bool:
        """Record that it has returned ``value``; return whether that can replace the call.

        It cannot if it has a view of an argument, or an item that is neither a tensor nor a constant.
        """
        read = {storage_key(leaf) for leaf in self._leaves if isinstance(leaf, torch.Tensor)}
        self._leaves, self.after = [], after
        leaves, self._spec = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        views = [storage_key(tensor) in read for tensor in tensors]
        self.returned_only_views = all(views)
        if not self._repeatable or not tensors or any(views):
            return False
        if not all(isinstance(leaf, (torch.Tensor, *_CONSTANTS)) for leaf in leaves):
            return False
        self._returned = [Result(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if self._random is not None:
            before, self._random = self._random, random_state(self._device)
            if same_random_state(before, self._random):
                self._random = None
        return True

    @property
    def results(self) -> list[Result]:
        """The tensors that it returned."""
        return [item for item in self._returned if isinstance(item, Result)]

    def again(self, arguments: Any, catcher: Catches) -> Any:
        """Return the recorded result and pass the saved tensors to ``catcher``; or return `RUN`.

        Raises:
            ReplayMismatch: it must run but earlier calls gave it ``meta`` tensors, or its result is not held.
        """
        leaves = tree_leaves(arguments)
        if catcher.count != self._first_pack or [_geometry(leaf) for leaf in leaves] != self._geometry:
            return _run(leaves)
        if any(result.written for result in self.results):
            return _run(leaves)
        try:
            returned = [item.again() if isinstance(item, Result) else item for item in self._returned]
        except StaleTensorError:
            return _run(leaves)
        for index, shown in sorted(self._shown.items()):
            catcher.count = index
            catcher.pack(shown.of(leaves))
        catcher.count = self.after
        wanted = zip(self._returned, returned, strict=True)
        if self._spec is None or any(isinstance(item, Result) and found is None for item, found in wanted):
            raise ReplayMismatch  # in forward nothing after it was needed
        if self._random is not None:
            set_random_state(self._random)
        return tree_unflatten(returned, self._spec)


def _run(leaves: list[Any]) -> Any:
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        raise ReplayMismatch
    return RUN


def _geometry(leaf: Any) -> _Geometry | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    plain = leaf.layout is torch.strided and not leaf.is_nested
    return leaf.shape, leaf.stride() if plain else None, leaf.dtype
