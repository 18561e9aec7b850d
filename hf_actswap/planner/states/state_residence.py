"""Tracks which of an optimizer's states are on the device, counts their bytes, and moves them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator

import torch

from ...engine.host_pool import HostPool
from ...engine.stats import Counters
from ...engine.transfer import Transfer
from .state_storages import Geometry, Placeholders, StateStorage, holders, plain_tensors
from .watched_states import WatchedStates

logger = logging.getLogger(__name__)

SHARED = "optimizer states held from outside"
NO_HOST_MEMORY = "no host memory for optimizer states"


class StateResidence:
    """Finds the storages of an optimizer's states and moves them.

    Args:
        transfer: copies bytes.
        pool: the host memory to which states move.
        counters: count the copies.
        device: the device of the states.
        min_tensor_bytes: smaller storages stay on the device.

    Attributes:
        device_bytes: bytes of the storages with a host block that are on the device.
        total_bytes: bytes of all storages with a host block.
        absent: placeholders to which tensors refer while their values are on the host.
    """

    def __init__(
        self,
        transfer: Transfer,
        pool: HostPool,
        counters: Counters,
        device: torch.device,
        min_tensor_bytes: int,
    ) -> None:
        self._transfer, self._pool, self._counters = transfer, pool, counters
        self._device, self._min_tensor_bytes = device, max(1, min_tensor_bytes)
        self.absent = Placeholders(device)
        self._of: dict[Hashable, list[StateStorage]] = {}
        self._home: dict[int, StateStorage] = {}
        """The storages that are on the device, by the address of the storage object."""
        self._leaving: deque[StateStorage] = deque()
        self.device_bytes = self.total_bytes = 0
        self._warned = False

    def storages_of(self, key: Hashable) -> list[StateStorage]:
        """Return the storages of a parameter's states, as of the last `refresh`."""
        return self._of.get(key, [])

    def storages_of_all(self, keys: Iterable[Hashable]) -> list[StateStorage]:
        """Return the storages of several parameters' states, each once, in order."""
        return list(dict.fromkeys(item for key in keys for item in self.storages_of(key)))

    def all(self) -> list[StateStorage]:
        """Return every storage once."""
        return self.storages_of_all(self._of)

    def known(self) -> list[Hashable]:
        """Return the keys whose states have storages here."""
        return list(self._of)

    @property
    def leaving_bytes(self) -> int:
        """Bytes that are on the device and are being copied out."""
        return sum(item.size_bytes for item in dict.fromkeys(self._leaving) if item.place == "leaving")

    def refresh(self, keys: Iterable[Hashable], states: WatchedStates) -> None:
        """Update the storages of states: new ones get a host block, those that are gone give theirs back.

        A storage that is also held from outside these states (a flat buffer, a parameter, a kept state
        dictionary) stays on the device: it would not be freed, and its holder may rely on seeing new values.

        Args:
            keys: the keys in ``states`` to update.
            states: the optimizer's states.
        """
        found = {key: self._tensors(states.unwatched(key)) for key in keys}
        addresses = (tensor.untyped_storage()._cdata for tensors in found.values() for tensor in tensors)
        held = Counter(addresses)
        for key, tensors in found.items():
            self._refresh(key, tensors, held)

    def _tensors(self, state: object) -> list[torch.Tensor]:
        here = (item for item in plain_tensors(state) if item.device == self._device)
        return list({id(item): item for item in here}.values())

    def forget_all(self) -> None:
        """Give back every host block; states that are on the host are lost."""
        for storage in self.all():
            self._discard(storage)
        self._of.clear()

    def leave(self, storage: StateStorage) -> None:
        """Start the copy out of a storage; if the host has its bytes already, free it at once.

        Does nothing unless it is on the device.
        """
        if storage.place != "device":
            return
        address = storage.address()
        storage.leave()
        if storage.on_device_bytes:
            self._leaving.append(storage)
        else:
            self._gone(storage, address)

    def release(self, down_to_bytes: int) -> None:
        """Free leaving storages, the oldest first, until ``device_bytes`` is at most ``down_to_bytes``."""
        while self._leaving and self.device_bytes > down_to_bytes:
            storage = self._leaving.popleft()
            if storage.place == "leaving":
                address = storage.address()
                storage.release()
                self._gone(storage, address)

    def start_return(self, storage: StateStorage) -> None:
        """Start the copy in of a storage. Does nothing unless it is on the host."""
        if storage.place == "host":
            storage.start_return()
            self.device_bytes += storage.size_bytes

    def turn_back(self, storage: StateStorage) -> None:
        """Drop the copy in of a storage that nothing has read. Does nothing unless it is returning."""
        if storage.place == "returning":
            storage.turn_back()
            self.device_bytes -= storage.size_bytes

    def bring(self, storage: StateStorage, will_change: bool = True) -> None:
        """Bring a storage to the device from any place; ``will_change``: the host's copy becomes invalid."""
        before = storage.on_device_bytes
        if storage.place != "device":
            storage.bring()
            self.device_bytes += storage.size_bytes - before
            self._home[storage.address()] = storage
        if will_change:
            storage.unchanged = False

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
                own.tensors.setdefault(key, []).append((tensor, Geometry.of(tensor)))
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
        known = self._home.get(raw._cdata)
        if known is not None and known.size_bytes == size_bytes:
            known.drop_strangers(raw._cdata)
            return known
        if holders(raw) > held[raw._cdata]:
            self._counters.rejected[SHARED] += size_bytes
            return None
        host = self._pool.take(size_bytes)
        if host is None:
            self._counters.rejected[NO_HOST_MEMORY] += size_bytes
            if not self._warned:
                self._warned = True
                logger.warning("Optimizer states stay on the device where host memory has no room for them.")
            return None
        storage = StateStorage(raw, host, self._transfer, self._counters, self.absent)
        self._home[raw._cdata] = storage
        self.total_bytes += size_bytes
        self.device_bytes += size_bytes
        return storage

    def _discard(self, storage: StateStorage) -> None:
        self._home = {key: item for key, item in self._home.items() if item is not storage}
        self.device_bytes -= storage.on_device_bytes
        self.total_bytes -= storage.size_bytes
        storage.abandon()
        self._transfer.host_reader_done(storage.host)
        self._pool.give_back(storage.host)

    def _gone(self, storage: StateStorage, address: int) -> None:
        self._home.pop(address, None)
        self.device_bytes -= storage.size_bytes


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]
