"""Transfers that watch, delay or break, for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_actswap.engine import BlockingTransfer, Copy, HostBuffer
from tests.engine.recording_transfer import RecordingTransfer


class WatchingTransfer(BlockingTransfer):
    """Blocking copies; remembers what left and what came back.

    Args:
        hold: keep every source alive, which a transfer must not do: to poison it.
    """

    def __init__(self, hold: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._hold = hold
        self.held: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.sizes_bytes: list[int] = []
        self.sources: list[StorageWeakRef] = []
        self.blocks: list[StorageWeakRef] = []

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        self.addresses.append(source.data_ptr())
        self.sizes_bytes.append(source.nbytes)
        self.sources.append(StorageWeakRef(source.untyped_storage()))
        if self._hold:
            self.held.append(source)
        return super().offload(source, host)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        block, copy = super().reload(host, after)
        self.blocks.append(StorageWeakRef(block.untyped_storage()))
        return block, copy

    def poison(self) -> None:
        """Overwrite every source that was held with NaN, behind autograd's back."""
        for source in self.held:
            poison(source)


class ErraticTransfer(RecordingTransfer):
    """Lets ``counts[i]`` of the oldest copies complete at its i-th call, round and round."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__()
        self._counts = counts
        self._calls = 0

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        copy = super().offload(source, host)
        self._some_complete()
        return copy

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        block_and_copy = super().reload(host, after)
        self._some_complete()
        return block_and_copy

    def _some_complete(self) -> None:
        self.complete(self._counts[self._calls % len(self._counts)])
        self._calls += 1


def poison(tensor: torch.Tensor) -> None:
    """Fill the storage with 0xFF bytes (NaN in every floating type), without a new version."""
    storage = tensor.untyped_storage()
    ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
