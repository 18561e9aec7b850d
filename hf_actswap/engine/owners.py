"""Which op owns each storage that one forward uses.

A storage is identified by the address of its storage object, which cannot be reused while its owner holds a
`StorageWeakRef` on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..plan.actions import Scope
from ..plan.record import storage_key
from .auto_windows import Key
from .fates import KEEP, Action
from .recompute import Region


def inner_tensors(tensor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield a parameter, and the plain tensors inside it (DTensor, NF4, Float8, torchao's subclasses)."""
    if tensor is None:
        return
    yield tensor
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # DTensor also names its device mesh
                yield from inner_tensors(part)


def parameter_places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the module and the name of each parameter, in the model's order."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name


@dataclass(frozen=True)
class ScopeModules:
    """A decoder layer or a module around the layers, and everything in it."""

    scope: Scope
    modules: tuple[nn.Module, ...]


@dataclass(slots=True)
class Owner:
    """What the plan does with the tensors of the op that owns a storage.

    Args:
        ref: keeps the storage object's address from being reused.
        region, position: the recomputed function that returned it, and its place among the outputs.
        is_external: whether no op ever owns it (parameters, buffers).
        chosen: for a swap under ``auto``: the action chosen when it was first saved, and its key there.
    """

    ref: StorageWeakRef
    action: Action
    region: Region | None = None
    position: int = 0
    is_external: bool = False
    chosen: tuple[Action, Key] | None = None


class Owners:
    """The storages seen so far, with their owners.

    Tensors in the tree ``values`` have none, nor have parameters and buffers of ``modules`` (until `enter`
    names others). Nothing is read before the first lookup; if every layer matches its cached trace, there is
    none.
    """

    def __init__(self, modules: Iterable[nn.Module], values: Any = ()) -> None:
        self._owners: dict[int, Owner] = {}
        self._unread: Iterable[nn.Module] = modules
        self._values = values
        self._left_behind: list[tuple[weakref.ref[torch.Tensor], Action, bool]] = []
        self._rebuildable: list[Owner] = []

    @property
    def hold_regions(self) -> bool:
        """Whether outputs are known that a region can rebuild; `enter` drops those that no longer exist."""
        return bool(self._rebuildable)

    def enter(self, modules: Iterable[nn.Module]) -> None:
        """Note that ``modules`` run now: their parameters and buffers are unowned."""
        alive = []
        for owner in self._rebuildable:
            if owner.ref.expired():
                owner.region = None  # it holds its inputs in memory
            elif owner.region is not None:
                alive.append(owner)
        self._rebuildable = alive
        self._read()
        self._unread = modules

    def own_later(self, tensor: torch.Tensor, action: Action, only_if_unowned: bool) -> None:
        """Call `own` before the next lookup; ``only_if_unowned``: unless the storage has an owner by then."""
        self._left_behind.append((weakref.ref(tensor), action, only_if_unowned))

    def by_key(self, key: int) -> Owner | None:
        """Return the owner of the storage with this key, if it has one."""
        if self._unread or self._left_behind:
            self._read()
        return self._owners.get(key)

    def owner(self, tensor: torch.Tensor) -> Owner | None:
        """Return the owner of a tensor's storage, if it has one."""
        key = storage_key(tensor)
        return None if key is None else self.by_key(key)

    def own(
        self, tensor: torch.Tensor, action: Action, region: Region | None = None, position: int = 0
    ) -> None:
        """Set the owner of a tensor's storage, also if it has one already; parameters stay unowned."""
        key = storage_key(tensor)
        if key is not None:
            self._set(tensor, key, self.by_key(key), action, region, position)

    def _set(
        self,
        tensor: torch.Tensor,
        key: int,
        known: Owner | None,
        action: Action,
        region: Region | None = None,
        position: int = 0,
    ) -> None:
        if known is None:
            self._owners[key] = Owner(StorageWeakRef(tensor.untyped_storage()), action, region, position)
        elif not known.is_external:
            known.action, known.region, known.position, known.chosen = action, region, position, None
        if region is not None:
            self._rebuildable.append(self._owners[key])

    def clear(self) -> None:
        self._owners.clear()
        self._rebuildable.clear()
        self._left_behind.clear()
        self._unread = self._values = ()

    def _read(self) -> None:
        """Register what was postponed: parameters, arguments of the model, outputs; in this order.

        Parameters and buffers are read at the first tensor of each call, because FSDP2 gathers parameters in
        hooks of its own, which may run before ours or after, and moving or sharding a model gives them new
        storages.
        """
        modules, self._unread = self._unread, ()
        for module in modules:
            for held in (*module._parameters.values(), *module._buffers.values()):
                for part in inner_tensors(held):
                    key = storage_key(part)
                    if key is not None:
                        ref = StorageWeakRef(part.untyped_storage())
                        self._owners[key] = Owner(ref, KEEP, is_external=True)
        values, self._values = self._values, ()
        for leaf in tree_leaves(values):
            key = storage_key(leaf) if isinstance(leaf, torch.Tensor) else None
            if key is not None and key not in self._owners:
                self._set(leaf, key, None, KEEP)
        left_behind, self._left_behind = self._left_behind, []
        for reference, action, only_if_unowned in left_behind:
            tensor = reference()
            key = None if tensor is None else storage_key(tensor)
            if tensor is None or key is None:
                continue
            known = self._owners.get(key)
            if known is None or not only_if_unowned:
                self._set(tensor, key, known, action)
