"""One storage of optimizer states, on the device or on the host.

The states' tensor objects stay the same; the storages to which they refer change. While its values are on the
host, a tensor refers to a single NaN (of integers: to a single largest value), expanded to its shape. Code
that has kept the tensor cannot take what it reads for a state; what it writes is lost, or the write raises.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from ...engine.blocks import HostBuffer
from ...engine.stats import Counters
from ...engine.transfer import Copy, Transfer

Place = Literal["device", "leaving", "host", "returning"]
"""``leaving``: on the device, unchanged, being copied out. ``returning``: on the host, being copied in."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Type, shape, strides and offset of a tensor in its storage; strides and offset in elements.

    (`engine.views.View` does the same for saved tensors, in bytes, as these may get a part of a storage back.
    A state's tensor gets a whole storage back, and `set_` takes elements.)
    """

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return the geometry of a strided tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor with this geometry in ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


class Placeholders:
    """The placeholders to which tensors refer while their values are on the host: one element per dtype.

    Args:
        device: the device of the placeholders.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elements: dict[torch.dtype, torch.Tensor] = {}

    def like(self, geometry: Geometry) -> torch.Tensor:
        """Return a placeholder of the dtype and shape of ``geometry``."""
        dtype = geometry.dtype
        if dtype not in self._elements:
            known = not (dtype.is_floating_point or dtype.is_complex)
            value: Any = True if dtype is torch.bool else torch.iinfo(dtype).max if known else float("nan")
            self._elements[dtype] = torch.full((), value, dtype=torch.float32 if not known else dtype).to(
                device=self._device, dtype=dtype
            )
        return self._elements[dtype].expand(geometry.shape)

    def is_(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` refers to a placeholder."""
        element = self._elements.get(tensor.dtype)
        return element is not None and tensor.untyped_storage()._cdata == element.untyped_storage()._cdata


class StateStorage:
    """A storage of optimizer states, which moves as a whole, whichever tensors share it.

    It goes to the host and comes back in each step, ahead of time and beside compute. Its tensors belong to
    the optimizer, and refer to placeholders meanwhile. (`engine.evictable.EvictableStorage`, in contrast, is
    owned by autograd's tickets and leaves at most once, when memory runs out.)

    Args:
        storage: the storage, on the device.
        host: a host block of its size, which the caller takes from a pool and gives back.
        transfer: copies it.
        counters: count the copies.
        absent: placeholders for its tensors.
    """

    def __init__(
        self,
        storage: torch.UntypedStorage,
        host: HostBuffer,
        transfer: Transfer,
        counters: Counters,
        absent: Placeholders,
    ) -> None:
        self.size_bytes = storage.nbytes()
        self.host = host
        self.place: Place = "device"
        self.tensors: dict[Hashable, list[tuple[torch.Tensor, Geometry]]] = {}
        """By the key in ``optimizer.state``: plain tensors that share the storage."""
        self.unchanged = False
        """Whether the host has the same bytes; known only while the storage is on the device."""
        host.hold(torch.uint8, torch.Size([self.size_bytes]))
        self._transfer, self._counters, self._absent = transfer, counters, absent
        self._copy: Copy | None = None
        self._held: torch.Tensor | None = None

    @property
    def on_device_bytes(self) -> int:
        """Bytes of device memory that it takes up."""
        return 0 if self.place == "host" else self.size_bytes

    def leave(self) -> None:
        """Start the copy out, or leave at once if the host has the bytes already; call it at ``device``."""
        if self.unchanged:
            self._let_go()
            return
        source = _bytes_of(self._storage())
        self._copy = self._transfer.offload(source, self.host)
        self._counters.offloads += 1
        self._counters.offloaded_bytes += self.size_bytes
        self._held, self.place = source, "leaving"

    def stay(self) -> None:
        """Stay on the device after all, because it will be read or written; call it at ``leaving``."""
        self._wait()
        self._held, self.place, self.unchanged = None, "device", False

    def release(self) -> None:
        """Wait for the copy out and free the device memory; call it at ``leaving``."""
        self._wait()
        self._held = None
        self._let_go()

    def start_return(self) -> None:
        """Start the copy in; call it at ``host``.

        Raises:
            torch.OutOfMemoryError: the device has no room; the storage is still on the host.
        """
        self._held, self._copy = self._transfer.reload(self.host, _COMPLETE)
        self._counters.prefetches += 1
        self._counters.prefetched_bytes += self.size_bytes
        self.place = "returning"

    def arrive(self) -> None:
        """Wait for the copy in and let the tensors refer to their values again; call it at ``returning``."""
        block = self._held
        assert block is not None
        self._wait()
        storage = block.untyped_storage()
        for tensor, geometry in self._members():
            tensor.data = geometry.on(storage)
        self._held, self.place, self.unchanged = None, "device", True

    def turn_back(self) -> None:
        """Drop the copy in, which nothing has read, and be on the host again; call it at ``returning``."""
        self._wait()
        self._held, self.place = None, "host"

    def bring(self) -> None:
        """Come to the device from any place, and wait for the copy if there is one."""
        if self.place == "host":
            self._counters.late_prefetches += 1
            self.start_return()
        if self.place == "returning":
            self.arrive()
        elif self.place == "leaving":
            self.stay()

    def abandon(self) -> None:
        """Wait for running copies to end and forget the tensors: the storage is not needed any more."""
        self._wait()
        self._held, self.place = None, "device"
        self.tensors.clear()

    def address(self) -> int:
        """Return the address of the storage object; call it at ``device`` or ``leaving``."""
        return int(self._storage()._cdata)

    def drop_strangers(self, address: int) -> None:
        """Forget tensors that by now refer to another storage than the one at ``address``."""
        for key, entries in list(self.tensors.items()):
            own = [entry for entry in entries if entry[0].untyped_storage()._cdata == address]
            if own:
                self.tensors[key] = own
            else:
                del self.tensors[key]

    def host_copy(self) -> torch.Tensor:
        """Return its bytes in ordinary memory: uint8, shape (bytes,).

        Call it at ``host`` or ``returning``, after a synchronization.
        """
        copy = torch.empty(self.size_bytes, dtype=torch.uint8)
        torch.cat(self.host.pieces, out=copy)
        return copy

    def _members(self) -> Iterator[tuple[torch.Tensor, Geometry]]:
        for tensors in self.tensors.values():
            yield from tensors

    def _storage(self) -> torch.UntypedStorage:
        tensor, _ = next(self._members())
        return tensor.untyped_storage()

    def _let_go(self) -> None:
        for tensor, geometry in self._members():
            tensor.data = self._absent.like(geometry)
        self.place = "host"

    def _wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            self._counters.stalled(copy.wait())


class _Complete:
    """A copy out that has ended."""

    def wait(self) -> None:
        return None


_COMPLETE = _Complete()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a parameter's state, also in nested dictionaries, lists and tuples.

    Yields:
        Plain tensors; for a ``DTensor`` this rank's part. Other subclasses are left out.
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
