"""Compares what recomputation rebuilds with what forward had, by checksums that are made on the device.

Recomputation is right if a piece of the model that runs again does the same as before. What it reads is
restored (`engine.replay`), but no rule knows all that a model's code reads: objects in its attributes,
globals, files, a kernel whose results depend on timing. So the first step under a plan tests it
(``memory.verify``): a checksum of each tensor that will be dropped is made in forward, and one of the rebuilt
tensor in backward. The host compares them once, when the next forward starts.

A checksum is two numbers of 64 bits. A tensor's bits, taken as integers, are summed up by rows, and by
columns; sums are multiplied by weights that depend on their places, and added up. Integer sums do not depend
on the order of adding, so equal tensors have equal checksums. A single element that differs always changes
them; that several cancel each other out, by rows and by columns, is as good as impossible. The tensor is read
twice, no copy of it is made, and 16 bytes are held until backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..config import Verify
from ..plan.actions import OpCall

Compare = Callable[[torch.Tensor], None]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x1E3779B97F4A7C15
"""Odd, so that multiplying by it modulo 2**64 loses nothing."""


class Verifier:
    """The comparisons of one applied plan.

    Args:
        when: ``first``: until those of a step have been read; ``always``; ``off``.
    """

    def __init__(self, when: Verify) -> None:
        self._always, self._on = when == "always", when != "off"
        self._compared: list[tuple[OpCall, torch.Tensor, torch.Tensor]] = []
        self._weights: dict[tuple[int, torch.device], torch.Tensor] = {}

    @property
    def on(self) -> bool:
        """Whether checksums are made at present."""
        return self._on

    def expect(self, call: OpCall, tensor: torch.Tensor) -> Compare | None:
        """Return what is to be called with the rebuilt tensor; ``None``: nothing is compared.

        ``call`` is what runs again, ``tensor`` what it had in forward. Weights, sparse and packed tensors,
        those of subclasses (fake ones too), and a compiler's, are not compared.
        """
        if not self._on or not _has_bits(tensor) or _is_weight(tensor):
            return None
        expected = self.checksum(tensor)

        def compare(rebuilt: torch.Tensor) -> None:
            self._compared.append((call, expected, self.checksum(rebuilt)))

        return compare

    def differing(self) -> tuple[OpCall, ...]:
        """Return the calls that gave something else, of those compared since this was last called.

        Waits for the device if anything was compared.
        """
        compared, self._compared = self._compared, []
        if not compared:
            return ()
        self._on = self._always
        self._weights.clear()
        expected, found = (torch.stack(sums).tolist() for sums in list(zip(*compared, strict=True))[1:])
        calls = (call for call, *_ in compared)
        differ = (call for call, one, other in zip(calls, expected, found, strict=True) if one != other)
        return tuple(dict.fromkeys(differ))

    @torch.no_grad()
    def checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return two numbers, int64 of shape (2,), for a tensor of any shape."""
        bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
        if bits.dim() < 2:
            bits = bits.reshape(1, -1)
        rows = bits.sum(-1, dtype=torch.int64).reshape(-1)
        columns = bits.sum(tuple(range(bits.dim() - 1)), dtype=torch.int64)
        return torch.stack([(sums * self._weights_of(sums)).sum() for sums in (rows, columns)])

    def _weights_of(self, sums: torch.Tensor) -> torch.Tensor:
        key = len(sums), sums.device
        if key not in self._weights:
            places = torch.arange(1, len(sums) + 1, device=sums.device)
            self._weights[key] = (places * _FACTOR + places * places) * 2 + 1
        return self._weights[key]


def _has_bits(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.is_meta or torch.compiler.is_compiling():
        return False
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.element_size() in _INTEGERS


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter)
