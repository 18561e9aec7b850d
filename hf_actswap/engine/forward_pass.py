"""One forward of the model: who produced what, and what is done when autograd saves it.

A `ForwardPass` lives from the model's forward start to its end. It keeps an **owner** for each storage
that it meets: the op that produced it, and from the plan what to do with it. A storage is known by the
address of its storage object, which cannot be reused while the owner holds a `StorageWeakRef` on it; the
owners are dropped when the forward ends. What outlives the pass is in the tickets, and the `Backward` that
they share: the order in which backward prefetches.

Who owns a storage that no visible op produced? While a function runs, that function (its statistics, its
own output packed before it returns); an argument of the layer, or something the model was called with,
nobody; else the innermost module (a custom ``autograd.Function``, which no function mode sees).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..plan.actions import Scope, Windows
from ..plan.opnames import OpStack
from ..plan.outline import OUTPUT
from ..plan.record import storage_key
from .auto_windows import AutoWindows
from .backward import Backward, Reference
from .fates import KEEP, Action, FateTable
from .host_pool import HostPool
from .owners import Owner, Owners
from .parameters import is_cast_of_parameter
from .recompute import Region, Ticket
from .schedule import PrefetchOrder, ReleaseQueue, Want
from .stats import Counters
from .tickets import KeepTicket, SwapGroup, SwapTicket, View, moved_range
from .transfer import Transfer

NO_HOST_MEMORY = "host memory cap"
"""The cap (``host_memory_gib``) is reached, or the machine has no more."""


@dataclass(frozen=True)
class Setting:
    """What the passes of one applied plan share."""

    fates: FateTable
    pool: HostPool
    transfer: Transfer
    device: torch.device
    counters: Counters
    min_tensor_bytes: int
    auto: AutoWindows | None = None


@dataclass(frozen=True)
class Place:
    """A decoder layer or a module around the layers, and everything in it."""

    scope: Scope
    modules: tuple[nn.Module, ...]


class ForwardPass:
    """See the module's text.

    Args:
        setting: what the passes of one applied plan share.
        outside: modules whose parameters and buffers are never touched: those around the scopes.
    """

    def __init__(self, setting: Setting, outside: Iterable[nn.Module]) -> None:
        self._setting = setting
        self._fates = setting.fates
        self.owners = Owners(outside)
        self._groups: dict[int, weakref.ref[SwapGroup]] = {}
        self._all_groups: list[weakref.ref[SwapGroup]] = []
        self._releases: ReleaseQueue[weakref.ref[SwapGroup]] = ReleaseQueue()
        self._hooks: list[int] = []
        self._backward = Backward()
        self._clock = self._backward.clock
        self._auto = setting.auto.forward_starts(self._backward) if setting.auto is not None else None
        self._observation = self._auto.observation if self._auto is not None else None
        self._autocast = False
        self.scope: Scope | None = None
        self.stack: OpStack | None = None
        self.running: Action | None = None
        self.region: Region | None = None
        self.packing = False

    def meet(self, tensor: torch.Tensor) -> int | None:
        """Make sure that the storage of ``tensor`` has an owner, and return its identity."""
        key = storage_key(tensor)
        if key is not None and self.owners.by_key(key) is None:
            cast = self._autocast and is_cast_of_parameter(tensor)
            self.owners.own(tensor, KEEP if cast else self._action_of_unmet())
        return key

    def own_outside(self, values: Any) -> None:
        """Whatever among ``values`` has not been met comes from outside the layers and belongs to nobody."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and self.owners.owner(leaf) is None:
                self.owners.own(leaf, KEEP)

    def start_scope(
        self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], compiled_nodes: int | None
    ) -> None:
        """A decoder layer, or a module around the layers, starts.

        Args:
            place: what starts.
            args, kwargs: of its call.
            compiled_nodes: autograd nodes of its eager call, if it is compiled (0: not known).
        """
        if isinstance(place.scope, int):
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor) and self.owners.owner(hidden) is None:
                self.owners.own(hidden, self._fates["embedding", OUTPUT, None])
            self.own_outside((args, kwargs))
        self._autocast = torch.is_autocast_enabled(self._setting.device.type)  # within a pack it reads off
        self.scope = place.scope
        self.owners.enter(place.modules)
        if compiled_nodes is not None:
            self._clock.enter_compiled(compiled_nodes)

    def end_scope(self, output: Any) -> None:
        """It ends; it owns what it hands on (a layer even what an op of its own produced)."""
        scope, self.scope = self.scope, None
        self.owners.enter(())
        self._clock.leave_compiled()
        hidden = output[0] if isinstance(output, tuple) and output else output
        if scope is None or not isinstance(hidden, torch.Tensor):
            return
        if isinstance(scope, int) or self.owners.owner(hidden) is None:
            self.owners.own(hidden, self._fates[scope, OUTPUT, None])

    def pack(self, tensor: torch.Tensor) -> Ticket:
        """Autograd saves ``tensor``: return the ticket that it keeps instead.

        Whatever a ticket holds is detached: a tensor that its own node saves (``exp``, softmax) would keep
        that node alive through the ticket, a cycle that nobody breaks if backward never comes.
        """
        op = self._clock.now()
        self._hooks.append(op)
        if self._observation is not None:
            self._observation.in_forward(op)
        if self._releases:
            self._release(self._releases.due(op))
        self.packing = True
        try:
            return self._ticket_of_saved(tensor, op)
        finally:
            self.packing = False

    def ticket_of_input(self, tensor: torch.Tensor) -> Ticket:
        """Make the ticket of a tensor that a region reads: its producer's fate holds."""
        owner = self.owners.owner(tensor)
        tensor = tensor.detach()
        if owner is None:
            return KeepTicket(tensor, self._backward)
        return self._ticket(tensor, owner, self._clock.now())

    def end(self) -> None:
        """The model's forward ends: release what is left, and plan the backward."""
        if self._auto is not None and self._setting.auto is not None:
            self._setting.auto.forward_ended(self._auto)
        self._release(self._releases.drain())
        wants: list[Want[Reference]] = []
        for reference in self._all_groups:
            group = reference()
            if group is not None:
                wants.append(Want(reference, group.last_use, group.prefetch_ops))
        self._backward.schedule(PrefetchOrder(self._hooks, wants))
        self.owners.clear()
        self._groups.clear()

    def _ticket_of_saved(self, tensor: torch.Tensor, op: int) -> Ticket:
        region = self.region
        if region is not None:
            region.packs += 1  # also of tensors without a storage: the recomputation counts them too
            for group in region.input_groups:
                group.last_use = op
        key = self.meet(tensor)
        tensor = tensor.detach()
        if key is None:
            return KeepTicket(tensor, self._backward)
        owner = self.owners.by_key(key)
        if owner is None:
            raise RuntimeError("a storage that was met has no owner")
        inside = owner.action.kind == "recompute_inside" or (
            owner.action.kind == "recompute_function" and owner.region is None
        )
        if inside and region is not None:
            return region.saved(tensor, self._backward)
        return self._ticket(tensor, owner, op)

    def _action_of_unmet(self) -> Action:
        if self.running is not None:
            return self.running
        if self.scope is None:
            return KEEP
        if self.stack is not None:
            return self._fates[self.scope, *self.stack.unseen()]
        return self._fates[self.scope, "", None]

    def _ticket(self, tensor: torch.Tensor, owner: Owner, op: int) -> Ticket:
        if owner.region is not None:
            return owner.region.output(owner.position, View.of(tensor), self._backward)
        if owner.action.kind == "swap":
            return self._swap(tensor, owner, op) or KeepTicket(tensor, self._backward)
        return KeepTicket(tensor, self._backward)

    def _swap(self, tensor: torch.Tensor, owner: Owner, op: int) -> Ticket | None:
        reason = self._refusal(tensor)
        if reason is None:
            view, key = View.of(tensor), tensor.untyped_storage()._cdata
            action = self._chosen(tensor, view, owner, op)
            if action.windows is None:
                return None
            reference = self._groups.get(key)
            group = reference() if reference else None
            if group is None or not group.covers(view, tensor._version):
                group = self._new_group(tensor, view, action.windows, op, again=group is not None)
            if group is not None:
                group.last_use = op
                if self.region is not None and group not in self.region.input_groups:
                    self.region.input_groups.append(group)
                return SwapTicket(group, view, self._backward)
            reason = NO_HOST_MEMORY
        self._setting.counters.refused[reason] += tensor.numel() * tensor.element_size()
        return None

    def _chosen(self, tensor: torch.Tensor, view: View, owner: Owner, op: int) -> Action:
        """Ask once for each storage, however many nodes save it."""
        if self._auto is None:
            return owner.action
        if owner.chosen is None:
            start, stop = moved_range(view, tensor.untyped_storage().nbytes())
            owner.chosen = self._auto.action(owner.action, self.scope, stop - start, op)
        else:
            self._auto.used(owner.chosen[1], op)
        return owner.chosen[0]

    def _new_group(
        self, tensor: torch.Tensor, view: View, windows: Windows, op: int, again: bool
    ) -> SwapGroup | None:
        setting = self._setting
        storage = tensor.untyped_storage()
        moved = (0, storage.nbytes()) if again else moved_range(view, storage.nbytes())
        host = setting.pool.take(moved[1] - moved[0])
        if host is None:
            return None
        try:
            group = SwapGroup(
                tensor, moved, host, setting.pool, setting.transfer, setting.counters, windows.prefetch_ops
            )
        except BaseException:
            setting.pool.give_back(host)
            raise
        reference = weakref.ref(group)
        self._groups[storage._cdata] = reference
        self._all_groups.append(reference)
        self._releases.add(reference, op, windows.release_ops)
        return group

    def _refusal(self, tensor: torch.Tensor) -> str | None:
        """Why a tensor that the plan wants to swap stays, or ``None``."""
        setting = self._setting
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"tensor subclass {type(tensor).__name__}"
        if (
            tensor.layout != torch.strided
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return "not a plain strided tensor"
        if tensor.device != setting.device:
            return f"on {tensor.device.type}, not on the compute device"
        if tensor.numel() * tensor.element_size() < setting.min_tensor_bytes:
            return "smaller than min_tensor_mib"
        if tensor.numel() == 0:
            return "empty"
        return None

    def _release(self, references: Iterable[weakref.ref[SwapGroup]]) -> None:
        for reference in references:
            group = reference()
            if group is not None:
                group.release()
