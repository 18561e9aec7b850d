"""Saved-tensor hooks of a recomputation: they hold the tensors that backward still needs, and no others."""

from __future__ import annotations

import torch

from .tickets import StaleTensorError


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
