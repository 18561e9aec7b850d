"""Views: what it takes to make a tensor again from the bytes of its storage."""

from __future__ import annotations

from typing import NamedTuple

import torch


class View(NamedTuple):
    """A tensor's dtype, shape, stride and byte offset on its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        # Faster than the constructor of `NamedTuple`: one is made for each swapped tensor.
        return tuple.__new__(cls, (tensor.dtype, tensor.shape, tensor.stride(), offset_bytes))

    def on(self, block: torch.Tensor, start_bytes: int) -> torch.Tensor:
        """Return this view of ``block``, whose first byte is byte ``start_bytes`` of the original storage.

        It shares the version counter of ``block``, so that a write through one view is seen by the readers
        of the others, as autograd has it. (An offset that the dtype does not divide cannot share it.)
        """
        size = self.dtype.itemsize
        offset = (self.offset_bytes - start_bytes) // size
        if block.dtype != self.dtype:
            first = int(block.storage_offset()) * block.element_size()
            usable = block.numel() * block.element_size() // size * size
            if first % size or not block.is_contiguous():
                empty = torch.empty(0, dtype=self.dtype, device=block.device)
                return empty.set_(block.untyped_storage(), offset, self.shape, self.stride)
            if block.dtype != torch.uint8 or block.dim() != 1:
                block = block.view(-1).view(torch.uint8)
            block = (block if usable == block.numel() else block[:usable]).view(self.dtype)
        return block.as_strided(self.shape, self.stride, offset)

    @property
    def range_bytes(self) -> tuple[int, int]:
        """The first byte of the storage that the view can reach, and the byte after the last."""
        if 0 in self.shape:
            return self.offset_bytes, self.offset_bytes
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset_bytes, self.offset_bytes + (last + 1) * self.dtype.itemsize
