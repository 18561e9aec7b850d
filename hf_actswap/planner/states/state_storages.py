"""The storages of optimizer states, on the device or on the host: tracks, counts and moves them.

The states' tensor objects stay the same; the storages to which they refer change. While its values are on the
host, a tensor refers to a single NaN (of integers: to a single largest value), expanded to its shape. Code
that has kept the tensor cannot take what it reads for a state; what it writes is lost, or the write raises.
`WatchedStates`, a dictionary for ``optimizer.state``, reports accesses, so that states can come back before
them.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...engine.device_allocator import free_bytes
from ...engine.host_pool import HostBuffer, HostPool
from ...engine.moving_block import MovingBlock
from ...engine.stats import Counters
from ...engine.tickets import View
from ...engine.transfer import Transfer


class Placeholders:
    """The placeholders to which tensors refer while their values are on the host: one element per dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elements: dict[torch.dtype, torch.Tensor] = {}

    def like(self, view: View) -> torch.Tensor:
        dtype = view.dtype
        if dtype not in self._elements:
            if dtype.is_floating_point or dtype.is_complex:
                element = torch.full((), float("nan"))  # not every such dtype can be filled
            else:
                element = torch.full((), dtype is torch.bool or torch.iinfo(dtype).max, dtype=dtype)
            self._elements[dtype] = element.to(device=self._device, dtype=dtype)
        return self._elements[dtype].expand(view.shape)

    def is_(self, tensor: torch.Tensor) -> bool:
        element = self._elements.get(tensor.dtype)
        return element is not None and tensor.untyped_storage()._cdata == element.untyped_storage()._cdata


class StateStorage(MovingBlock):
    """A storage of optimizer states, which moves as a whole, whichever tensors share it.

    It goes to the host and comes back in each step, ahead of time and beside compute. Its tensors belong to
    the optimizer, and refer to placeholders meanwhile. Its host block has its size.

    Attributes:
        tensors: by the key in ``optimizer.state``: plain tensors that share the storage.
        unchanged: whether the host has the same bytes; known only while the storage is on the device.
    """

    def __init__(self, storage: torch.UntypedStorage, host: HostBuffer, residence: StateResidence) -> None:
        super().__init__(host, residence.transfer, residence.counters)
        self.size_bytes = storage.nbytes()
        self.tensors: dict[Hashable, list[tuple[torch.Tensor, View]]] = {}
        self.unchanged = False
        self._residence = residence
        residence.home[storage._cdata] = self
        residence.total_bytes += self.size_bytes
        residence.device_bytes += self.size_bytes

    def send(self) -> None:
        """Start the copy out, or leave at once if the host has the bytes; nothing unless at ``device``."""
        if self.place != "device":
            return
        if self.unchanged:
            self._let_go()
            return
        self.leave(_bytes_of(self._storage()))
        self._residence.leaving.append(self)

    def release(self) -> None:
        """Wait for the copy out and free the device memory; nothing unless at ``leaving``."""
        if self.place == "leaving":
            super().release()
            self._let_go()

    def reload(self) -> torch.Tensor:
        target = super().reload()
        self._residence.device_bytes += self.size_bytes
        return target

    def turn_back(self) -> None:
        """Drop the copy in, which nothing has read, and be on the host again; nothing unless returning."""
        if self.place == "returning":
            self.drop()
            self._residence.device_bytes -= self.size_bytes

    def bring(self, will_change: bool = True) -> None:
        """Come to the device from any place and wait for any copy; ``will_change``: the host's is invalid."""
        if self.place == "host":
            self.counters.late_prefetches += 1
            self.reload()
        if self.place == "returning":
            self._arrive()
        elif self.place == "leaving":
            self.stay()
        if will_change:
            self.unchanged = False

    def _arrive(self) -> None:
        """Wait for the copy in, and let the tensors refer to their values again."""
        block = self.take("device")
        for tensor, view in self._members():
            tensor.data = view.on(block, 0)
        self.unchanged = True
        self._residence.home[self._storage()._cdata] = self

    def set_aside(self) -> None:
        """Let the tensors refer to their values on the host. Call it at ``host``, after a synchronization.

        Nothing may use the block after that, so its pool must be closed.
        """
        whole = self.host.whole()
        block = self.host_copy() if whole is None else whole
        for tensor, view in self._members():
            tensor.data = view.on(block, 0)

    def abandon(self) -> None:
        """Wait for running copies to end and forget the tensors: the storage is not needed any more."""
        self.end()
        if self.place != "host":
            self._residence.device_bytes -= self.size_bytes
        self._residence.total_bytes -= self.size_bytes
        self.place = "device"  # it may still be among those that leave
        self.tensors.clear()

    def drop_strangers(self, address: int) -> None:
        """Forget tensors that by now refer to another storage than the one at ``address``."""
        for key, entries in list(self.tensors.items()):
            own = [entry for entry in entries if entry[0].untyped_storage()._cdata == address]
            if own:
                self.tensors[key] = own
            else:
                del self.tensors[key]

    def host_copy(self) -> torch.Tensor:
        """Return its bytes in ordinary memory; call it at ``host`` or ``returning``, after synchronizing."""
        copy = torch.empty(self.size_bytes, dtype=torch.uint8)
        torch.cat(self.host.pieces, out=copy)
        return copy

    def _members(self) -> Iterator[tuple[torch.Tensor, View]]:
        for tensors in self.tensors.values():
            yield from tensors

    def _storage(self) -> torch.UntypedStorage:
        tensor, _ = next(self._members())
        return tensor.untyped_storage()

    def _let_go(self) -> None:
        self._residence.home.pop(self._storage()._cdata, None)
        self._residence.device_bytes -= self.size_bytes
        for tensor, view in self._members():
            tensor.data = self._residence.absent.like(view)
        self.place = "host"


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a parameter's state, also in nested dictionaries, lists and tuples.

    They are plain tensors; for a ``DTensor`` this rank's part. Other subclasses are left out.
    """
    if isinstance(value, torch.Tensor):
        with torch.no_grad():  # without gradients `to_local` returns the part itself, not a view
            local = value.to_local() if isinstance(value, DTensor) else value
        if type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout is torch.strided:
            yield local
    elif isinstance(value, dict):
        for item in value.values():
            yield from plain_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from plain_tensors(item)


def holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors refer to a storage. PyTorch has no public way to ask."""
    count = int(torch._C._storage_Use_Count(storage._cdata))
    return count - 1  # ``storage`` itself


class WatchedStates(defaultdict[Any, Any]):
    """A `collections.defaultdict` that calls ``looked`` before each access to a value.

    It gets the key that is accessed, if present, or ``None`` if all values are. Pickling or copying gives a
    plain `defaultdict` with all states.
    """

    def __init__(self, states: dict[Any, Any], looked: Callable[[Hashable | None], None]) -> None:
        super().__init__(getattr(states, "default_factory", dict), states)
        self._looked = looked

    def unwatched_items(self) -> ItemsView[Any, Any]:
        return super().items()

    def unwatched(self, key: Any) -> Any:
        return super().get(key)

    def __getitem__(self, key: Any) -> Any:
        if key in self:
            self._looked(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()  # overridden so that `dict(states)` calls `__getitem__` for each key

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            self._looked(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key in self:
            self._looked(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            self._looked(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        self._looked(None)
        return super().popitem()

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        self._looked(None)
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._looked(None)
        return super().values()

    def plain(self) -> defaultdict[Any, Any]:
        self._looked(None)
        return defaultdict(self.default_factory, super().items())

    def copy(self) -> Any:
        return self.plain()

    def __copy__(self) -> Any:
        return self.plain()

    def __reduce__(self) -> tuple[Any, ...]:
        self._looked(None)
        return defaultdict, (self.default_factory,), None, None, iter(super().items())


logger = logging.getLogger(__name__)

SHARED = "optimizer states held from outside"
NO_HOST_MEMORY = "no host memory for optimizer states"


class StateResidence:
    """Finds the storages of an optimizer's states and moves them; those below ``min_tensor_bytes`` stay.

    Attributes:
        device_bytes: bytes of the storages with a host block that are on the device.
        total_bytes: bytes of all storages with a host block.
        absent: placeholders to which tensors refer while their values are on the host.
        home: the storages that are on the device, by the address of the storage object.
        leaving: the storages whose copies out have begun, the oldest first; some may have come back.
    """

    def __init__(
        self,
        transfer: Transfer,
        pool: HostPool,
        counters: Counters,
        device: torch.device,
        min_tensor_bytes: int,
    ) -> None:
        self.transfer, self._pool, self.counters = transfer, pool, counters
        self._device, self._min_tensor_bytes = device, max(1, min_tensor_bytes)
        self.absent = Placeholders(device)
        self._of: dict[Hashable, list[StateStorage]] = {}
        self.home: dict[int, StateStorage] = {}
        self.leaving: deque[StateStorage] = deque()
        self.device_bytes = self.total_bytes = 0
        self._warned = False

    def storages_of(self, key: Hashable) -> list[StateStorage]:
        """Return the storages of a parameter's states, as of the last `refresh`."""
        return self._of.get(key, [])

    def storages_of_all(self, keys: Iterable[Hashable]) -> list[StateStorage]:
        """Return the storages of several parameters' states, each once, in order."""
        return list(dict.fromkeys(item for key in keys for item in self.storages_of(key)))

    def all(self) -> list[StateStorage]:
        return self.storages_of_all(self._of)

    def known(self) -> list[Hashable]:
        return list(self._of)

    def refresh(self, keys: Iterable[Hashable], states: WatchedStates) -> None:
        """Update the storages of states: new ones get a host block, those that are gone give theirs back.

        A storage that is also held from outside these states (a flat buffer, a parameter, a kept state
        dictionary) stays on the device: it would not be freed, and its holder may rely on seeing new values.
        """
        found = {}
        for key in keys:
            here = (item for item in plain_tensors(states.unwatched(key)) if item.device == self._device)
            found[key] = list({id(item): item for item in here}.values())
        addresses = (tensor.untyped_storage()._cdata for tensors in found.values() for tensor in tensors)
        held = Counter(addresses)
        for key, tensors in found.items():
            self._refresh(key, tensors, held)

    def forget_all(self) -> None:
        """Give back every host block; states that are on the host are lost."""
        for storage in self.all():
            self._discard(storage)
        self._of.clear()

    def bring_all(self) -> int:
        """Bring every storage to the device; if it has no room for all, set aside all that can move.

        Returns the bytes set aside. They are on the CPU then, in the memory of their blocks. Their pool is
        closed; `forget_all` follows.
        """
        free = free_bytes(self._device)
        if free is not None and self.total_bytes - self.device_bytes > free:
            return self._set_all_aside()
        try:
            for storage in self.all():
                storage.bring(will_change=False)
            return 0
        except torch.OutOfMemoryError:
            return self._set_all_aside()

    def _set_all_aside(self) -> int:
        self.send(self.all())
        self.release(0)
        self.transfer.synchronize()
        self._pool.close()  # slabs whose blocks are given back are unlocked, and the tensors' own
        for storage in self.all():
            storage.set_aside()
        return self.total_bytes

    def send(self, storages: Iterable[StateStorage]) -> None:
        """Start the copies out of storages, and turn back those that are coming."""
        for storage in storages:
            storage.turn_back()
            storage.send()

    def release(self, down_to_bytes: int, spared: int = 0) -> None:
        """Free leaving storages, the oldest first, until ``device_bytes`` is at most ``down_to_bytes``.

        ``spared``: the number of storages, those that began to leave last, that are not freed.
        """
        while len(self.leaving) > spared and self.device_bytes > down_to_bytes:
            self.leaving.popleft().release()

    def start_returns(self, ahead: deque[StateStorage], most_bytes: int, spared: int) -> None:
        """Start the copies in of the next storages, as long as at most ``most_bytes`` are on the device.

        ``ahead`` are the storages in order; those whose copies have started are taken off. Leaving storages
        make room for them, but those ``spared`` (`release`).
        """
        while ahead:
            storage = ahead[0]
            if storage.place == "host":
                self.release(most_bytes - storage.size_bytes, spared)
                if self.device_bytes + storage.size_bytes > most_bytes:
                    return
                storage.fetch()
            ahead.popleft()

    def _refresh(self, key: Hashable, tensors: list[torch.Tensor], held: Counter[int]) -> None:
        found = {id(item) for item in tensors}
        before = self._of.pop(key, [])
        after: list[StateStorage] = []
        for storage in before:
            entries = storage.tensors.pop(key, [])
            if storage.place in ("host", "returning"):  # its tensors refer to placeholders
                still = [entry for entry in entries if id(entry[0]) in found and self.absent.is_(entry[0])]
                if still:
                    storage.tensors[key] = still
                    after.append(storage)
        for tensor in tensors:
            if self.absent.is_(tensor):
                continue
            own = self._storage_of(tensor, held)
            if own is not None:
                own.tensors.setdefault(key, []).append((tensor, View.of(tensor)))
                if own not in after:
                    after.append(own)
        if after:
            self._of[key] = after
        for storage in before:
            if not storage.tensors:
                self._discard(storage)

    def _storage_of(self, tensor: torch.Tensor, held: Counter[int]) -> StateStorage | None:
        """Return the storage that holds ``tensor``, which is on the device; ``None``: it does not move."""
        raw = tensor.untyped_storage()
        size_bytes = raw.nbytes()
        if size_bytes < self._min_tensor_bytes:
            return None
        known = self.home.get(raw._cdata)
        if known is not None and known.size_bytes == size_bytes:
            known.drop_strangers(raw._cdata)
            return known
        if holders(raw) > held[raw._cdata]:
            self.counters.rejected[SHARED] += size_bytes
            return None
        host = self._pool.take(size_bytes)
        if host is None:
            self.counters.rejected[NO_HOST_MEMORY] += size_bytes
            if not self._warned:
                self._warned = True
                logger.warning("Optimizer states stay on the device where host memory has no room for them.")
            return None
        return StateStorage(raw, host, self)

    def _discard(self, storage: StateStorage) -> None:
        self.home = {key: item for key, item in self.home.items() if item is not storage}
        storage.abandon()
        self._pool.give_back(storage.host)


def state_tensors(optimizer: Any) -> Iterator[tuple[Hashable, torch.Tensor]]:
    """Yield (key, tensor) for each tensor in an optimizer's states.

    A key is a parameter, or whatever else the optimizer uses (PEFT's LoRA-FA: names).
    """
    states = getattr(optimizer, "state", None)
    for key, state in states.items() if isinstance(states, Mapping) else ():
        yield from ((key, leaf) for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


def trained_in(group: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer's group that are trained: frozen ones never have a state.

    Loops with adapters often hand all parameters of the model to the optimizer.
    """
    return (parameter for parameter in group["params"] if parameter.requires_grad)


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from trained_in(group)
