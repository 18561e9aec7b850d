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

Half of what a layer saves need not be read: a gate's activation and its product with the other projection,
a norm's result. They are elementwise results, without state, of tensors that are saved too (`Derivations`).
Equal ones give equal results, unless something writes into these through ``.data``, or without gradients
between two functions. Nor is read what is only the input of another operator that runs again: a difference
there shows in what is computed of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..config import Verify
from ..plan.actions import OpCall
from .autograd_state import node_number, packing_node_number, result_dtype

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


Derivation = tuple[tuple[str, torch.dtype, str], ...]
"""The nodes that computed a tensor from others: their names, dtypes of results, and kind of GELU."""


class Checksums(NamedTuple):
    """Of what one run of a layer saves: a checksum for each device, and how tensors in none were computed."""

    sums: tuple[torch.Tensor, ...]
    derived: tuple[Derivation | None, ...]


class Derivations:
    """How saved tensors were computed, if only elementwise, from tensors that are saved themselves.

    The functions known here read nothing but their inputs: a product saves each input that the gradient of
    the other needs, an activation its input, and casts and views save none.
    """

    _RESULTS = frozenset({"GeluBackward0", "MulBackward0", "SiluBackward0"})
    _COPIES = frozenset({"ToCopyBackward0", "UnsafeViewBackward0", "ViewBackward0"})

    def __init__(self) -> None:
        self._saved: Counter[int] = Counter()

    def saved(self) -> None:
        """Note that the node that is being built saves a tensor that is right in backward."""
        self._saved[packing_node_number()] += 1

    def follows(self, tensor: torch.Tensor) -> bool:
        """Take in a tensor that the node that is being built saves; return whether it follows from others.

        What is no result of the forward and no weight may be written unseen: nothing follows from it.
        """
        follows = self.of(tensor) is not None
        if tensor.grad_fn is not None or _is_weight(tensor):
            self.saved()
        return follows

    def of(self, tensor: torch.Tensor) -> Derivation | None:
        """Return how ``tensor`` was computed; ``None``: it is no result of saved tensors alone."""
        # What was written in place is no longer what its node computed.
        return None if tensor._version else self._of_node(tensor.grad_fn)

    def _of_node(self, node: Any) -> Derivation | None:
        name = "" if node is None else node.name()
        if name in self._RESULTS:
            saved = self._saved[node_number(node)]
        elif name in self._COPIES:
            saved = 0
        else:
            return None
        inputs = [function for function, _ in node.next_functions]
        own = (name, result_dtype(node), getattr(node, "_saved_approximate", ""))
        if saved == len(inputs):
            return (own,)
        unsaved = [one for one in inputs if one is not None]
        if len(unsaved) + saved != len(inputs):
            return None  # a number, or a tensor that nobody saved
        before = [self._of_node(one) for one in unsaved]
        return None if None in before else (own, *chain.from_iterable(filter(None, before)))


class SavedByRun:
    """Takes the checksums of what one run of a layer, or of a module in it, saves.

    A tensor is read once, however many operators save it, and not at all if it follows from others.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self._derivations = verifier, Derivations()
        # A weak reference keeps the address of a storage from being given to another, and not its memory.
        self._read: dict[tuple[Any, ...], tuple[StorageWeakRef, torch.Tensor]] = {}
        self._rows: dict[torch.device, list[torch.Tensor]] = {}
        self._derived: list[Derivation | None] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Take in a tensor that the node that is being built saves."""
        if not _is_weight(tensor):
            if not _has_bits(tensor):
                return
            self._derived.append(self._derivations.of(tensor))
            if self._derived[-1] is None:
                self._read_once(tensor)
        self._derivations.saved()

    def add_outside(self, tensor: torch.Tensor) -> None:
        """Take in a tensor that nobody rebuilds, as the run was given it; a buffer may be written unseen."""
        if tensor.requires_grad or _is_weight(tensor):
            self._derivations.saved()

    def checksums(self) -> Checksums:
        """Return the checksums of all tensors that were added."""
        devices = sorted(self._rows, key=str)
        with torch._C.DisableTorchFunction():  # at the end of a module, these are no functions of its layer
            sums = tuple(self._verifier.weighted(torch.cat(self._rows[device])) for device in devices)
        return Checksums(sums, tuple(self._derived))

    def _read_once(self, tensor: torch.Tensor) -> None:
        ref = StorageWeakRef(tensor.untyped_storage())
        place = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor._version
        key = ref.cdata, *place
        if key not in self._read:
            self._read[key] = ref, row_sums(tensor)
        # Counted each time: under autocast two casts in forward may be one, cached, in backward.
        self._rows.setdefault(tensor.device, []).append(self._read[key][1])


class ComparedRuns:
    """Compares what a layer or module saves in forward with what its runs in backward save.

    Backward may end a run as soon as all is there that it still needs; such a run is not compared.

    Args:
        made: of a run in backward: numbers of the saved tensors that the module made in forward.
    """

    def __init__(self, verifier: Verifier, call: OpCall, made: frozenset[int] = frozenset()) -> None:
        self._verifier, self._call, self._made = verifier, call, made
        self._saved = SavedByRun(verifier)
        self._checksums: Checksums | None = None
        self._numbers: list[int] = []

    def saves(self, tensor: torch.Tensor, number: int, makes: bool) -> None:
        """Take in saved tensor ``number`` of the run in forward; ``makes``: the module makes it."""
        if makes:
            self._numbers.append(number)
            self._saved.add(tensor)
        else:
            self._saved.add_outside(tensor)

    def forward_ends(self) -> None:
        self._made, self._checksums = frozenset(self._numbers), self._saved.checksums()
        self._saved = SavedByRun(self._verifier)

    def again(self) -> ComparedRuns:
        """Return what takes in a run in backward."""
        return ComparedRuns(self._verifier, self._call, self._made)

    def sees(self, tensor: torch.Tensor, number: int) -> None:
        """Take in saved tensor ``number`` of a run in backward."""
        self.saves(tensor, number, number in self._made)

    def compare(self, again: ComparedRuns) -> None:
        if self._checksums is not None and len(again._numbers) == len(self._made):
            self._verifier.compare(self._call, self._checksums, again._saved.checksums())


class Verifier:
    """The comparisons of one applied plan.

    Args:
        when: ``first``: until those of a step have been read; ``always``; ``off``.

    Attributes:
        on: whether anything is compared now.
    """

    def __init__(self, when: Verify) -> None:
        self.begin(when)
        self._compared: list[tuple[OpCall, torch.Tensor, torch.Tensor]] = []
        self._differ: list[OpCall] = []
        self._weights: dict[tuple[int, torch.device], torch.Tensor] = {}

    def begin(self, when: Verify) -> None:
        """Compare from the next forward on, as if the plan had just been applied."""
        self._always, self.on = when == "always", when != "off"
        self._forwards, self._expects = 0, False

    def of_call(self, call: OpCall) -> Expect | None:
        """Return what is to be called with each tensor that ``call`` has in forward, and will rebuild.

        It returns what is to be called with the rebuilt one. ``None``: nothing is compared. Weights, sparse
        and packed tensors, those of subclasses (fake ones too), and a compiler's, never are.
        """
        return partial(self._expect, call) if self.on else None

    def _expect(self, call: OpCall, tensor: torch.Tensor) -> Compare | None:
        if not _has_bits(tensor) or _is_weight(tensor):
            return None
        self._expects, expected = True, self.checksum(tensor)

        def compare(rebuilt: torch.Tensor) -> None:
            self._compared.append((call, expected, self.checksum(rebuilt)))

        return compare

    def runs_of(self, call: OpCall) -> ComparedRuns | None:
        """Return what compares the runs of ``call``, a layer or module; ``None``: nothing is compared."""
        self._expects = True
        return ComparedRuns(self, call) if self.on else None

    def compare(self, call: OpCall, before: Checksums, again: Checksums) -> None:
        """Compare what ``call`` saved in forward with what a run in backward saved."""
        if before.derived == again.derived and len(before.sums) == len(again.sums):
            self._compared += [(call, *sums) for sums in zip(before.sums, again.sums, strict=True)]
        else:  # other operators, or on other devices
            self._differ.append(call)

    def differing(self) -> tuple[OpCall, ...]:
        """Return the calls that gave something else, of those compared since this was last called.

        It is called at the start of each forward, and ends comparing as ``memory.verify`` says. Waits for the
        device if anything was compared.
        """
        compared, self._compared = self._compared, []
        differ, self._differ = self._differ, []
        nothing_to_compare = self._forwards > 0 and not self._expects
        self._forwards += 1
        if compared or differ or nothing_to_compare:
            self.on = self._always
        if not compared:
            return tuple(dict.fromkeys(differ))
        self._weights.clear()
        # Some tensors may be on the CPU: tables of positions, say.
        device = max((one.device for _, one, _ in compared), key=lambda device: device.type != "cpu")
        expected, found = (
            torch.stack([sums[at].to(device) for _, *sums in compared]).tolist() for at in (0, 1)
        )
        pairs = zip(compared, expected, found, strict=True)
        return tuple(dict.fromkeys([*differ, *(call for (call, *_), one, other in pairs if one != other)]))

    def checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a number, int64, for a tensor of any shape."""
        return self.weighted(row_sums(tensor))

    @torch.no_grad()
    def weighted(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``rows``, shape [rows], each multiplied by a number that depends on its place."""
        return (rows * self._weights_of(rows)).sum()

    def _weights_of(self, rows: torch.Tensor) -> torch.Tensor:
        key = len(rows), rows.device
        if key not in self._weights:
            places = torch.arange(1, len(rows) + 1, device=rows.device)
            self._weights[key] = (places * _FACTOR + places * places) * 2 + 1
        return self._weights[key]


@torch.no_grad()
def row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's bits, int64, row by row."""
    bits = _words(tensor.detach())
    counts = accumulate(bits.shape[:-1] if bits.dim() > 1 else bits.shape, mul, initial=1)
    first = max(at for at, rows in enumerate(counts) if rows <= _MOST_ROWS or not at)
    inside = tuple(range(first, bits.dim()))
    return (bits.sum(inside, dtype=torch.int64) if inside else bits.long()).reshape(-1)


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
