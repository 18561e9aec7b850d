"""The frozen weights of one layer: in host memory always, on the device while the layer needs them.

All of them lie in one block of host memory, and come to the device as one block of the same bytes: one
allocation of the same size for each layer of a stack, which the allocator fits into the place of the layer
before. The block never goes back to the host, because nobody writes it: a weight's copy in is a prefetch
without a copy out.

A parameter stays the same object. Between the calls of its layer its data is the host block's; during a
call it is the device block's (`shown`), and in backward the device block is read through tickets.

**What autograd saves.** A linear layer saves its weight, or a view of it, to compute the gradient of its
input. A reference to the device block would keep all layers on the device until backward. So while a layer
is called, a pair of saved-tensor hooks stands in front of those around it (a plan's, those of
``torch.utils.checkpoint``, or none): what lies on the device block becomes a `WeightTicket`, which holds the
layer and the view's geometry and no memory; everything else goes on to the hooks behind. PyTorch asks the
innermost pair alone, so where others have been pushed inside the layer (a checkpoint of its forward), the
next module that is called pushes this one again. A recomputation calls the layer again, or modules in it, and
so meets the same pairs: both runs save the same tensors in the same order.

**Versions.** A parameter's version counter does not change when its data does. A change from outside
(``load_state_dict``) raises it and goes to the host block. At its next use the layer notices and drops its
device copy. A ticket of before then has the wrong values to offer and raises `StaleTensorError`, as autograd
does for any weight that was written between forward and backward. A write during the layer's call would be
lost with the device block, and is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, Problem
from ..plan.actions import Scope
from ..plan.record import storage_key
from .host_pool import HostBuffer, HostPool
from .stats import Counters
from .tickets import StaleTensorError, View, keep, restore
from .transfer import COMPLETE, Copy, Transfer

WEIGHT_ALIGNMENT_BYTES = 512
"""Weights start at multiples of it in a block: what PyTorch's allocators give a tensor of its own, so that
kernels which look at the alignment of their operands compute as they do without this module."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldWeight:
    """A parameter or buffer that waits on the host.

    Args:
        name: its path inside the layer.
        tensor: the parameter or buffer, which stays the same object.
        modules: the modules that own it, each with its name there.
        view: its geometry in the layer's block.
        origin: the device that it was on.
    """

    name: str
    tensor: torch.Tensor
    modules: tuple[tuple[nn.Module, str], ...]
    view: View
    origin: torch.device


def laid_out(
    named: Sequence[tuple[str, torch.Tensor, tuple[tuple[nn.Module, str], ...]]],
) -> tuple[tuple[HeldWeight, ...], int]:
    """Return the weights of a layer with their places in one block, and the bytes of the block."""
    held, end_bytes = [], 0
    for name, tensor, modules in named:
        view = View.of(tensor)
        start, stop = view.range_bytes
        held.append(HeldWeight(name, tensor, modules, view._replace(offset_bytes=end_bytes), tensor.device))
        end_bytes += -(-(stop - start) // WEIGHT_ALIGNMENT_BYTES) * WEIGHT_ALIGNMENT_BYTES
    return tuple(held), end_bytes


class LayerWeights:
    """The frozen weights of one layer.

    Args:
        scope: the layer's scope in a plan.
        path: the layer's module path.
        position: its place in the order in which forward calls the layers.
        held: the weights, as `laid_out` returns them.
        size_bytes: bytes of the block that has them all.
        read: called with the layer before a ticket reads it, so that the layer is on the device then.

    Attributes:
        needed_in_backward: whether the latest training forward saved something of the layer.
        running: whether a call of the layer runs.
    """

    def __init__(
        self,
        scope: Scope,
        path: str,
        position: int,
        held: tuple[HeldWeight, ...],
        size_bytes: int,
        read: Callable[[LayerWeights], None],
    ) -> None:
        self.scope, self.path, self.position = scope, path, position
        self.held, self.size_bytes = held, size_bytes
        self.needed_in_backward, self.running = True, False
        self._read = read
        self._host: HostBuffer | None = None
        self._on_host: tuple[torch.Tensor, ...] = ()
        self._block: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        self._copy: Copy | None = None
        self._versions: list[int] = []
        self._edition = 0
        self._tickets: dict[View, WeightTicket] = {}

    @property
    def on_device(self) -> bool:
        """Whether the device has a copy, or one is on its way."""
        return self._block is not None

    @property
    def is_exchanged(self) -> bool:
        """Whether other tensors are in the place of the weights (a dry run on fake tensors)."""
        weight = self.held[0]
        module, name = weight.modules[0]
        place = module._parameters if name in module._parameters else module._buffers
        return place.get(name) is not weight.tensor

    def to_host(self, pool: HostPool, before: HostPool | None) -> None:
        """Move the weights to a block of ``pool``.

        Args:
            pool: host memory.
            before: the pool in which they are now; ``None``: they have memory of their own.

        Raises:
            PlanError: there is not enough host memory.
        """
        host = pool.take(self.size_bytes)
        if host is None:
            raise PlanError([_no_room(self.path, self.size_bytes, pool)])
        host.hold(torch.uint8, torch.Size([self.size_bytes]))
        first, whole = host.pieces[0], torch.empty(0, dtype=torch.uint8)
        # Slabs of exactly the sizes asked for: the pieces of a block follow each other in one slab.
        whole.set_(first.untyped_storage(), int(first.storage_offset()), (self.size_bytes,), (1,))
        views = []
        with torch.no_grad():
            for weight in self.held:
                view = weight.view.on(whole, 0)
                view.copy_(weight.tensor.detach())
                weight.tensor.data = view
                views.append(view)
        if before is not None and self._host is not None:
            before.give_back(self._host)
        self._host, self._on_host = host, tuple(views)
        self._versions = self._present_versions()

    def restore_origin(self, pool: HostPool) -> None:
        """Give the weights memory of their own again, on the device that they came from."""
        self.drop()
        host, self._host, self._on_host = self._host, None, ()
        if host is None:
            return
        for weight in self.held:
            own = torch.empty_strided(
                weight.view.shape, weight.view.stride, dtype=weight.view.dtype, device=weight.origin
            )
            weight.tensor.data = own.copy_(weight.tensor.detach())
        pool.give_back(host)

    def note_outside_writes(self) -> None:
        """If somebody has written the weights since their last use, forget the device copy."""
        versions = self._present_versions()
        if versions != self._versions:
            self._versions = versions
            self._edition += 1
            self._tickets.clear()
            self.drop()

    def fetch(self, transfer: Transfer, counters: Counters, late: bool) -> None:
        """Start the copy in, unless the device has the weights."""
        if self._block is not None or self._host is None:
            return
        with torch.inference_mode(False), torch.no_grad():  # the copy may serve a training forward later
            self._block, self._copy = transfer.reload(self._host, COMPLETE)
            self._views = tuple(weight.view.on(self._block, 0) for weight in self.held)
        counters.prefetches += 1
        counters.late_prefetches += late
        counters.prefetched_bytes += self.size_bytes

    def settle(self, counters: Counters) -> None:
        """Make compute wait for the copy in, before anything reads it or drops it."""
        copy, self._copy = self._copy, None
        if copy is not None:
            waited = copy.wait()
            if waited is not None:
                counters.stalled(waited)

    def drop(self) -> None:
        """Drop the device copy. What still refers to it keeps its memory: a running node, a recomputation."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.wait()  # else compute would use the memory again while the copy still writes it
        self._block, self._views = None, ()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block the weights' data is the device's.

        Raises:
            PlanError: at the end, if the layer has written to its weights.
        """
        for weight, view in zip(self.held, self._views, strict=True):
            weight.tensor.data = view
        try:
            yield
        finally:
            for weight, view in zip(self.held, self._on_host, strict=True):
                weight.tensor.data = view
        if self._present_versions() != self._versions:
            raise PlanError([self._written()])

    def packing(self) -> AbstractContextManager[object]:
        """Return a context in which autograd saves tickets of the weights, and other hooks get the rest.

        It does nothing where these hooks are the innermost already, or nothing is saved.
        """
        block = self._block
        if block is None or not torch.is_grad_enabled():
            return nullcontext()
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            outer = _detached, restore
        else:
            innermost = getattr(outer[0], "__self__", None)
            if isinstance(innermost, _Packing) and innermost.layer is self:
                return nullcontext()
        packing = _Packing(self, storage_key(block), outer[0])
        return torch.autograd.graph.saved_tensors_hooks(packing.pack, partial(_unpack, outer[1]))

    def ticket(self, view: View) -> WeightTicket:
        """Return the ticket of a view of the device block; the same for every call of the layer."""
        found = self._tickets.get(view)
        if found is None:
            found = self._tickets[view] = WeightTicket(self, view, self._edition)
        return found

    def read(self, view: View, edition: int) -> torch.Tensor:
        """Return a view of the weights on the device, for a backward. Raises `StaleTensorError`."""
        self._read(self)
        if edition != self._edition:
            raise StaleTensorError(view.shape, edition, self._edition, self.path)
        return self._after_removal(view) if self._block is None else view.on(self._block, 0)

    def _after_removal(self, view: View) -> torch.Tensor:
        """Return a view of a weight that has memory of its own again: its graph has outlived `remove`."""
        start, _ = view.range_bytes
        weight = max(
            (weight for weight in self.held if weight.view.offset_bytes <= start),
            key=lambda weight: weight.view.offset_bytes,
        )
        own = view._replace(offset_bytes=view.offset_bytes - weight.view.offset_bytes)
        return own.on(weight.tensor.detach(), 0)

    def _present_versions(self) -> list[int]:
        return [weight.tensor._version for weight in self.held]

    def _written(self) -> Problem:
        pairs = zip(self.held, self._versions, strict=True)
        written = [weight.name for weight, version in pairs if weight.tensor._version != version]
        hint = "Use memory: {weights: keep}: on the host, what a layer writes to its weights would be lost."
        found = f"its forward writes {', '.join(written)} in place"
        return Problem(self.path, "a layer that does not write its frozen weights", found, hint)


class _Packing:
    """The pack hook of one call of a layer.

    Args:
        layer: the weights of the layer.
        key: identity of their block's storage.
        outer: the hook for all other tensors.
    """

    __slots__ = ("_key", "_outer", "layer")

    def __init__(self, layer: LayerWeights, key: int | None, outer: Callable[[torch.Tensor], Any]) -> None:
        self.layer, self._key, self._outer = layer, key, outer

    def pack(self, tensor: torch.Tensor) -> Any:
        if storage_key(tensor) != self._key:
            return self._outer(tensor)
        self.layer.needed_in_backward = True
        return self.layer.ticket(View.of(tensor))


def _unpack(outer: Callable[[Any], torch.Tensor], ticket: Any) -> torch.Tensor:
    return ticket.restore() if type(ticket) is WeightTicket else outer(ticket)


class WeightTicket:
    """What autograd holds in the place of a frozen weight, or a view of it.

    Args:
        layer: the weights of the layer.
        view: geometry of the saved tensor in the layer's block.
        edition: how often the weights had been written when it was saved.
    """

    __slots__ = ("_edition", "_layer", "_view")

    def __init__(self, layer: LayerWeights, view: View, edition: int) -> None:
        self._layer, self._view, self._edition = layer, view, edition

    def restore(self) -> torch.Tensor:
        """Return the tensor on the device. Raises `StaleTensorError` if the weights have been written."""
        return self._layer.read(self._view, self._edition)


def _detached(tensor: torch.Tensor) -> Any:
    return keep(tensor.detach())


def _no_room(path: str, size_bytes: int, pool: HostPool) -> Problem:
    limit = pool.limit_bytes
    left = "no more" if limit is None else f"{max(0, limit - pool.used_bytes) / 2**30:.2f} GiB"
    return Problem(
        "memory.weights",
        f"host memory for the frozen weights of {path} ({size_bytes / 2**30:.2f} GiB)",
        left,
        "Raise memory.host_memory_gib, start fewer ranks on this machine, or leave weights: host out.",
    )
