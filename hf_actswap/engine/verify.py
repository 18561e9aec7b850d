"""Compares what recomputation rebuilds with what forward had, by checksums that are made on the device.

Recomputation is right if a piece of the model that runs again does the same as before. What it reads is
restored (`module_state`, `call_state`), but no rule knows all that a model's code reads: objects in its
attributes, globals, files, a kernel whose results depend on timing. So the first step under a plan tests it
(``memory.verify``): a checksum of each tensor that will be dropped is made in forward, and one of the rebuilt
tensor in backward. The host compares them once, when the next forward starts.

A checksum is a number of 64 bits. A tensor's bits, taken as integers of 64 bits, are summed up row by row;
the sums are multiplied by weights that depend on the row, and added up. Integer sums do not depend on the
order of adding, so equal tensors have equal checksums. A single element that differs always changes it, and
so do rows that changed places; differences go unseen that cancel each other out within every row. The tensor
is read once, and 8 bytes are held until backward. No copy is made of it, unless its elements do not lie side
by side or its last dimension is no multiple of 64 bits. Rows are those of as many of the first dimensions as
leave few of them: their sums must not need memory that a plan has given away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import nn

from ..config import Verify
from ..plan.actions import OpCall

Compare = Callable[[torch.Tensor], None]
Expect = Callable[[torch.Tensor], Compare | None]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_ROWS = 16_384

_FACTOR = 0x1E3779B97F4A7C15
"""Odd, so that multiplying by it modulo 2**64 loses nothing."""


class RecomputeError(RuntimeError):
    """What runs again in backward cannot, or did not save the same tensors as in forward."""


SAME = "it must do the same work each time (data-dependent control flow? a changed module?)"


class SavedForm(NamedTuple):
    """What a tensor that is rebuilt in backward was in forward; ``compare`` as `Verifier.of_call` has it."""

    shape: torch.Size
    dtype: torch.dtype
    compare: Compare | None

    @classmethod
    def of(cls, tensor: torch.Tensor, expect: Expect | None) -> SavedForm:
        return cls(tensor.shape, tensor.dtype, None if expect is None else expect(tensor))

    def check(self, rebuilt: torch.Tensor, name: str, index: int) -> None:
        """Raise `RecomputeError` if ``rebuilt``, saved tensor ``index`` of ``name``, is of another form."""
        if (rebuilt.shape, rebuilt.dtype) != (self.shape, self.dtype):
            raise RecomputeError(
                f"{name}: run again, saved tensor {index} is {list(rebuilt.shape)} {rebuilt.dtype}; "
                f"in forward it was {list(self.shape)} {self.dtype}"
            )
        if self.compare is not None:
            self.compare(rebuilt)


class Verifier:
    """The comparisons of one applied plan.

    Args:
        when: ``first``: until those of a step have been read; ``always``; ``off``.
    """

    def __init__(self, when: Verify) -> None:
        self.begin(when)
        self._compared: list[tuple[OpCall, torch.Tensor, torch.Tensor]] = []
        self._weights: dict[tuple[int, torch.device], torch.Tensor] = {}

    def begin(self, when: Verify) -> None:
        """Compare from the next forward on, as if the plan had just been applied."""
        self._always, self._on = when == "always", when != "off"

    def of_call(self, call: OpCall) -> Expect | None:
        """Return what is to be called with each tensor that ``call`` has in forward, and will rebuild.

        It returns what is to be called with the rebuilt one. ``None``: nothing is compared. Weights, sparse
        and packed tensors, those of subclasses (fake ones too), and a compiler's, never are.
        """
        return partial(self._expect, call) if self._on else None

    def _expect(self, call: OpCall, tensor: torch.Tensor) -> Compare | None:
        if not _has_bits(tensor) or _is_weight(tensor):
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
        # Some tensors may be on the CPU: tables of positions, say.
        device = max((one.device for _, one, _ in compared), key=lambda device: device.type != "cpu")
        expected, found = (
            torch.stack([sums[at].to(device) for _, *sums in compared]).tolist() for at in (0, 1)
        )
        pairs = zip(compared, expected, found, strict=True)
        return tuple(dict.fromkeys(call for (call, *_), one, other in pairs if one != other))

    @torch.no_grad()
    def checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a number, int64, for a tensor of any shape."""
        bits = _words(tensor.detach())
        counts = accumulate(bits.shape[:-1] if bits.dim() > 1 else bits.shape, mul, initial=1)
        first = max(at for at, rows in enumerate(counts) if rows <= _MOST_ROWS or not at)
        inside = tuple(range(first, bits.dim()))
        rows = (bits.sum(inside, dtype=torch.int64) if inside else bits.long()).reshape(-1)
        return (rows * self._weights_of(rows)).sum()

    def _weights_of(self, rows: torch.Tensor) -> torch.Tensor:
        key = len(rows), rows.device
        if key not in self._weights:
            places = torch.arange(1, len(rows) + 1, device=rows.device)
            self._weights[key] = (places * _FACTOR + places * places) * 2 + 1
        return self._weights[key]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers: of 64 bits where its last dimension is a multiple of them.

    Integers of another size are cast before they are added up (``make_reduction`` in PyTorch's
    ``aten/src/ATen/native/ReduceOpsUtils.h``): four times the bytes of a tensor in half precision.
    """
    size = tensor.element_size()
    bits = tensor.view(_INTEGERS[size])
    if not tensor.dim() or size * tensor.shape[-1] % 8:
        return bits
    aligned = (bits.storage_offset(), *bits.stride()[:-1])
    if bits.stride(-1) != 1 or any(size * place % 8 for place in aligned):
        # So that a checksum does not depend on how a tensor lies in memory. `contiguous` copies none whose
        # odd strides are of dimensions of size 1.
        bits = bits.clone(memory_format=torch.contiguous_format)
    return bits.view(torch.int64)


def _has_bits(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.is_meta or torch.compiler.is_compiling():
        return False
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.element_size() in _INTEGERS


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter)
