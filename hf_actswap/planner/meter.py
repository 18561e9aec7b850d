"""Measures how much device memory is in use: asks the allocator, or counts storages.

An accelerator's allocator reports it. The CPU's reports nothing and has no limit, so there storages are
counted from their creation to their end, and exceeding a set limit raises what an accelerator would raise. So
tests on the CPU check the planner's code for memory byte by byte. A step on fake tensors is measured in the
same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..engine.device_allocator import limit_memory, usable_bytes
from ..engine.hook_wrappers import Undo
from ..engine.owners import inner_tensors
from .states.state_storages import state_tensors


def runs_its_own_dispatch(types: Iterable[type]) -> bool:
    """Return whether a tensor subclass among ``types`` turns an op into others (DTensor, quantised weights).

    A dispatch mode that returns ``NotImplemented`` for such an op then sees the ops that it is turned into.
    Fake tensors are not such subclasses: each stands for its storage itself.
    """
    disabled = torch._C._disabled_torch_dispatch_impl
    return any(
        kind.__torch_dispatch__ is not disabled and not issubclass(kind, FakeTensor)
        for kind in types
        if kind is not torch.Tensor and hasattr(kind, "__torch_dispatch__")
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def baseline_tensors(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield what a training holds between its steps: weights, buffers, gradients, the optimizer's states."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.detach()
        if tensor.grad is not None:
            yield tensor.grad
    yield from (tensor for _, tensor in state_tensors(optimizer))


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the gradients that the model's parameters have now, on this rank."""
    found = [
        part for item in model.parameters() if item.grad is not None for part in inner_tensors(item.grad)
    ]
    return sum(storage.nbytes() for storage in _storages(found).values())


def others_bytes(allocated_bytes: int, own: Iterable[Any]) -> int:
    """Return how much of what is allocated belongs to none of the tensors ``own``, which may be elsewhere."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    known = sum(item.nbytes() for item in _storages(own).values() if item.device.type == kind)
    return max(allocated_bytes - known, 0)


class Meter(Protocol):
    """Measures the device memory of this process."""

    def start(self) -> None:
        """Begin to measure. Dispatch modes that are entered later see ops first."""

    def stop(self) -> None:
        """Stop measuring; several modes stop in the reverse order of their start. Safe to call again."""

    def limit_bytes(self) -> int:
        """Return the most bytes that this process can use."""

    def allocated_bytes(self) -> int:
        """Return the bytes in use now."""

    def peak_bytes(self) -> int:
        """Return the most bytes in use since `reset_peak`."""

    def reserved_peak_bytes(self) -> int:
        """Return the most bytes that the allocator held since `reset_peak`, fragments included."""

    def reset_peak(self) -> None:
        """Forget the peak."""

    def give_back(self) -> None:
        """Free cached memory that is not in use, so that an earlier plan's peak is not the next one's."""

    def hold_to(self, limit_bytes: int) -> None:
        """Let the allocator free what it caches before it holds more than ``limit_bytes``, until `let_go`.

        An allocator that has room does not free what it could: what it holds then says little about what a
        step needs. An allocation that does not fit raises ``torch.OutOfMemoryError``.
        """

    def let_go(self) -> bool:
        """Undo `hold_to`; return whether there was anything to undo."""

    def lift(self) -> None:
        """Reject nothing from now on."""


class StartedMode(TorchDispatchMode):
    """A dispatch mode that sees ops from its start to its end, and leaves compiled regions compiled."""

    supports_higher_order_operators = True
    """Compiled backwards that repeat the forward's random numbers reach a mode as such an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.running = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return true: what compiled regions do inside is not seen.

        With false, a function that is called under this mode before it is compiled would never be compiled.
        """
        return True

    def start(self) -> None:
        """See the ops of this thread from now on, and those of the backwards that it calls."""
        if not self.running:
            self.running = True
            self.__enter__()

    def stop(self) -> None:
        """End; several modes stop in the reverse order of their start. Safe to call again."""
        if self.running:
            self.running = False
            self.__exit__(None, None, None)


class CountingMeter(StartedMode):
    """Counts the storages that ops make, from their creation to their end.

    What an op needs only while it runs is not seen. Views and in-place ops make no storage, tensors on
    ``meta`` have no memory. What existed before the meter, and what no op returned (copies on the host), is
    counted only if it is passed to `own`.

    Args:
        limit_bytes: an op whose results would exceed it raises ``torch.OutOfMemoryError``; ``None``: nothing
            is rejected, and `Meter.limit_bytes` returns ``unlimited_bytes``.
        unlimited_bytes: the memory that the device is assumed to have where nothing is rejected.

    Attributes:
        rejections: number of ops that were rejected.
    """

    def __init__(self, limit_bytes: int | None = None, unlimited_bytes: int = 2**63 - 1) -> None:
        super().__init__()
        self.limit, self._unlimited_bytes = limit_bytes, unlimited_bytes
        self._sizes: dict[int, int] = {}
        self._allocated_bytes = self._peak_bytes = 0
        self.rejections = 0

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what exists already: parameters, gradients, optimizer states."""
        for tensor in tensors:
            for part in inner_tensors(tensor):
                if not runs_its_own_dispatch([type(part)]):
                    for storage in self._unknown([part]).values():
                        self._count_storage(storage)

    def limit_bytes(self) -> int:
        return self._unlimited_bytes if self.limit is None else self.limit

    def allocated_bytes(self) -> int:
        return self._allocated_bytes

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reserved_peak_bytes(self) -> int:
        return self._peak_bytes  # no allocator holds more than is in use

    def reset_peak(self) -> None:
        self._peak_bytes = self._allocated_bytes

    def give_back(self) -> None:
        pass  # no allocator caches memory

    def hold_to(self, limit_bytes: int) -> None:
        pass

    def let_go(self) -> bool:
        return False

    def lift(self) -> None:
        self.limit = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if types and runs_its_own_dispatch(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if unknown := self._unknown(tree_leaves(result)):
            given = _storages(tree_leaves((args, kwargs)))
            unknown = {key: storage for key, storage in unknown.items() if key not in given}
        wanted = sum(storage.nbytes() for storage in unknown.values())
        if self.limit is not None and wanted and self._allocated_bytes + wanted > self.limit:
            self.rejections += 1
            used = f"{self._allocated_bytes:,} bytes are in use of {self.limit:,}"
            raise torch.OutOfMemoryError(f"{func} asks for {wanted:,} bytes, and {used} (a counted limit).")
        for storage in unknown.values():
            self._count_storage(storage)
        return result

    def _unknown(self, values: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
        return {key: item for key, item in _storages(values).items() if key not in self._sizes}

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if not size_bytes:
            return
        self._sizes[key] = size_bytes
        self._allocated_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self._allocated_bytes -= self._sizes.pop(key)


def _storages(values: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    tensors = [item for item in values if isinstance(item, torch.Tensor) and item.layout is torch.strided]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta"]
    return {storage._cdata: storage for storage in storages}


class AllocatorMeter:
    """Asks the accelerator's allocator how much memory is in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._undo: Undo | None = None

    def start(self) -> None:
        pass  # the allocator always counts

    def stop(self) -> None:
        pass

    def limit_bytes(self) -> int:
        return usable_bytes(self._device)

    def allocated_bytes(self) -> int:
        return int(torch.accelerator.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device))

    def reserved_peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_reserved(self._device))

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        torch.accelerator.empty_cache()

    def hold_to(self, limit_bytes: int) -> None:
        """Limit the allocator on CUDA; do nothing on other accelerators."""
        self.let_go()
        self._undo = limit_memory(self._device, limit_bytes)

    def let_go(self) -> bool:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        return undo is not None

    def lift(self) -> None:
        self.let_go()
