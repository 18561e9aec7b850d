"""Recomputation: a region runs again in backward, and hooks collect the tensors that it saves.

A **region** is one call of a module or of a function. Its saved tensors get `RegionTicket`s, numbered in
the order in which autograd packed them. The first ticket that is read runs the region again with the same
inputs, autocast state and random state, under hooks that catch the packed tensors by number; the run stops
as soon as the last one needed is there. Each caught tensor is handed out once per backward and then
dropped; a second backward (``retain_graph``) runs the region again.

A recomputed *module* keeps its output. A recomputed *function* drops it: the consumers of its output get
`OutputTicket`s that run the function again. Its inputs are tickets too, so a chain of functions is rebuilt
step by step. A region is run again exactly as it ran, so gradients are bitwise equal.

Layers that are recomputed whole use ``torch.utils.checkpoint`` instead (`hooks.checkpointed`). Its hooks are
inside ours and take precedence, so a layer in which some op is excluded from recomputation is a region.

Saved-tensor hooks of a recomputation: they hold the tensors that backward still needs, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .kept_results import KeptResults, ReplayMismatch
from .replay import CalledModule, CallState
from .stats import Counters
from .tickets import StaleTensorError, SwapGroup, Ticket, View, restore
from .transfer import profiler_is_on, profiler_range


class RecomputeError(RuntimeError):
    """A region cannot be run again, or did not save the same tensors when it was."""


class AllCaught(Exception):
    """Raised to end a recomputation early, once all needed tensors are there."""


class Kept:
    """A rebuilt tensor, with the version that it had when it was rebuilt."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> torch.Tensor:
        """Return the tensor. Raises `StaleTensorError` if the backward of another op wrote into it."""
        if self._tensor._version != self._version:
            raise StaleTensorError(self._tensor.shape, self._version, self._tensor._version)
        return self._tensor


class Catcher:
    """Saved-tensor hooks of one recomputation. They number the saved tensors and hold those in ``expected``.

    ``expected`` has their shape and dtype by number; ``early``: raise `AllCaught` once all are there.
    """

    def __init__(self, name: str, expected: dict[int, tuple[torch.Size, torch.dtype]], early: bool) -> None:
        self._name, self._expected, self._early = name, expected, early
        self.count = 0
        self.caught: dict[int, Kept] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        index = self.count
        self.count += 1
        if index in self._expected:
            if (tensor.shape, tensor.dtype) != self._expected[index]:
                raise RecomputeError(
                    f"{self._name}: run again, saved tensor {index} is {list(tensor.shape)} {tensor.dtype}; "
                    f"in forward it was {list(self._expected[index][0])} {self._expected[index][1]}"
                )
            self.caught[index] = Kept(tensor.detach())
            if self._early and len(self.caught) == len(self._expected):
                raise AllCaught
        return index

    def complete(self) -> dict[int, Kept]:
        """Return what was caught. Raises `RecomputeError` if something is missing."""
        if missing := [index for index in self._expected if index not in self.caught]:
            raise RecomputeError(
                f"{self._name}: run again, it saved {self.count} tensors and not number {missing[0]}; "
                "it must do the same work each time (data-dependent control flow? a changed module?)"
            )
        return self.caught

    def unpack(self, index: int) -> torch.Tensor:
        raise RecomputeError(
            f"{self._name}: a recomputation has no backward of its own (saved tensor {index})"
        )


class Region:
    """One call of a module or function that can be run again.

    Args:
        name: name in messages.
        run: the module or function.
        args, kwargs: arguments of the call; tensors among them are held by tickets.
        ticket_of: makes the ticket for an input.
        counters: where runs are counted.
        random: whether the random state must be restored.
        keeps: whether ops inside are kept or swapped, so that they are not run again (`kept_results`).
        called: what the call reads beside its arguments; ``None``: nothing (a function).
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
        keeps: bool = False,
        called: CalledModule | None = None,
    ) -> None:
        self.name, self.function, self.called = name, run, called
        self.packs = 0
        self.input_groups: list[SwapGroup] = []
        self._counters = counters
        leaves, self._spec = tree_flatten((args, kwargs))
        self.leaves = [
            Input(ticket_of(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        self.state = CallState(device, random, leaves)
        self.expected: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self._caught: dict[int, Kept] = {}
        self._outputs: dict[int, _Output] = {}
        self._versions: dict[int, int] = {}
        self.kept = KeptResults(ticket_of, device) if keeps else None

    def saved(self, tensor: torch.Tensor) -> RegionTicket:
        """Make the ticket of the tensor packed last."""
        index = self.packs - 1
        self.expected[index] = (tensor.shape, tensor.dtype)
        if self.kept is not None:
            self.kept.saved(index, tensor)
        return RegionTicket(self, index)

    def close(self) -> None:
        """Note that the call has ended."""
        if self.kept is not None:
            self.kept.close()

    def returned(self, position: int, tensor: torch.Tensor) -> None:
        """Note that the call returned ``tensor``, at ``position`` among the tensors that it returned."""
        self._versions[position] = tensor._version

    def output(self, position: int, tensor: torch.Tensor) -> OutputTicket | None:
        """Make a ticket for a view of an output.

        ``None`` if the output was written since it was returned, because a new run would return the old one.
        """
        if tensor._version != self._versions.get(position):
            return None
        self._outputs.setdefault(position, _Output()).tickets += 1
        return OutputTicket(self, position, View.of(tensor))

    def take_saved(self, index: int) -> torch.Tensor:
        """Return saved tensor ``index``, running the region again if it must."""
        if index not in self._caught:
            self._run_again(outputs=False)
        return self._caught.pop(index).tensor()

    def leave_saved(self, index: int) -> None:
        """Note that saved tensor ``index`` will not be read any more."""
        self.expected.pop(index, None)
        self._caught.pop(index, None)
        if self.kept:
            self.kept.drop_after(max(self.expected, default=-1))

    def take_output(self, position: int, ticket: OutputTicket) -> torch.Tensor:
        """Return output ``position``, running the region again if it must. The last consumer drops it."""
        output = self._outputs[position]
        if output.kept is None:
            self._run_again(outputs=True)
        if output.kept is None:
            raise RecomputeError(f"{self.name}: run again, it did not return tensor {position}")
        tensor = output.kept.tensor()
        output.read_by(ticket)
        return tensor

    def leave_output(self, position: int, ticket: OutputTicket) -> None:
        """Note that a consumer of output ``position`` was freed."""
        output = self._outputs[position]
        output.tickets -= 1
        output.read_by(ticket)
        if not output.tickets:
            del self._outputs[position]

    def call(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Call ``function`` as the region was called, with other ``leaves`` of its arguments."""
        args, kwargs = tree_unflatten(list(leaves), self._spec)
        return function(*args, **kwargs)

    def rebuilt_as(self, caught: Mapping[int, Kept], outputs: Sequence[torch.Tensor]) -> None:
        """Take the tensors of a new run, for tickets to read them."""
        self._counters.recomputes += 1
        self._caught.update(caught)
        for position, output in self._outputs.items():
            if output.kept is None and position < len(outputs):
                output.rebuilt(outputs[position].detach())

    def _inputs(self) -> list[Any]:
        try:
            return [leaf.tensor() if isinstance(leaf, Input) else leaf for leaf in self.leaves]
        except StaleTensorError as error:
            raise RecomputeError(
                f"{self.name}: a tensor that it was called with was written in place afterwards, so it "
                "cannot be run again; keep it (select_recompute_exclude)"
            ) from error

    def _run_again(self, outputs: bool) -> None:
        if not profiler_is_on():
            self._run_again_unnamed(outputs)
            return
        with profiler_range("recompute", self.name.replace(".", " ", 1)):
            self._run_again_unnamed(outputs)

    def _run_again_unnamed(self, outputs: bool) -> None:
        leaves = self._inputs()
        try:
            caught, result = self._run(leaves, outputs, self.kept)
        except ReplayMismatch:
            caught, result = self._run(leaves, outputs, None)
        self.rebuilt_as(caught, tensors_in(result))

    def _run(self, leaves: list[Any], outputs: bool, kept: KeptResults | None) -> tuple[dict[int, Kept], Any]:
        catcher = Catcher(self.name, dict(self.expected), early=not (outputs or self._outputs))
        with (
            self.state.restored(),
            self.called.restored() if self.called else nullcontext(),
            kept.replayed(catcher) if kept else nullcontext(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(catcher.pack, catcher.unpack),
        ):
            try:
                result = self.call(self.function, leaves)
            except AllCaught:
                result = None
        return catcher.complete(), result


@dataclass(slots=True)
class _Output:
    """An output of a region that is still needed: rebuilt by a run, held until all tickets have read it."""

    tickets: int = 0
    kept: Kept | None = None
    runs: int = 0
    unread: int = 0

    def rebuilt(self, tensor: torch.Tensor) -> None:
        self.kept, self.unread = Kept(tensor), self.tickets
        self.runs += 1

    def read_by(self, ticket: OutputTicket) -> None:
        """Note that ``ticket`` has read it, or will never read it."""
        if self.kept is None or ticket.has_read == self.runs:
            return
        ticket.has_read = self.runs
        self.unread -= 1
        if not self.unread:
            self.kept = None


class Input:
    """A tensor that a region was called with."""

    __slots__ = ("requires_grad", "ticket")

    def __init__(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        self.ticket, self.requires_grad = ticket, tensor.requires_grad

    def tensor(self) -> torch.Tensor:
        return restore(self.ticket).detach().requires_grad_(self.requires_grad)


class RegionTicket:
    """The ticket of saved tensor ``index`` of a region."""

    __slots__ = ("_index", "_region")

    def __init__(self, region: Region, index: int) -> None:
        self._region, self._index = region, index

    def restore(self) -> torch.Tensor:
        """Return the tensor; run its region again if it is not rebuilt yet."""
        return self._region.take_saved(self._index)

    def __del__(self) -> None:
        self._region.leave_saved(self._index)


class OutputTicket:
    """The ticket of a view of a tensor that a recomputed function returned.

    Attributes:
        has_read: number of the run whose output it read last.
    """

    __slots__ = ("has_read", "position", "region", "view")

    def __init__(self, region: Region, position: int, view: View) -> None:
        self.region, self.position, self.view = region, position, view
        self.has_read = 0

    def restore(self) -> torch.Tensor:
        """Return the tensor; run its region again if it is not rebuilt yet."""
        return self.view.on(self.region.take_output(self.position, self), 0)

    def __del__(self) -> None:
        self.region.leave_output(self.position, self)


def tensors_in(result: Any) -> list[torch.Tensor]:
    """Return the tensors in the result of a call, in order."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
