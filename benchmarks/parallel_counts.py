"""What one step of one rank communicates, saves for backward and holds: counted, for any implementation.

Collectives are seen where PyTorch dispatches them, below both ``torch.distributed``'s calls and DTensor's
functional ones, so that two implementations are counted by one rule. Bytes on the wire are those that a rank
sends in a ring: ``(n - 1) / n`` of the whole for an all-gather or a reduce-scatter, twice that for an
all-reduce, which is one after the other (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms";
the same factors as in the documentation of ``nccl-tests``).
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_RING_FACTOR = {"all_reduce": 2}
"""How often ``(n - 1) / n`` of a collective's whole bytes pass; 1 where a kind is not named."""

REGATHER = "re-gather"
"""The kind under which gathers of saved shards in backward are counted, apart from all others."""


def ring_bytes(kind: str, whole_bytes: int, ranks: int) -> int:
    """Return what a rank sends in a collective whose larger side has ``whole_bytes``."""
    return _RING_FACTOR.get(kind, 1) * whole_bytes * (ranks - 1) // ranks


def kind_of(operator: Any) -> str | None:
    """Return the kind of collective that an operator is, or ``None``."""
    if operator.namespace not in _NAMESPACES:
        return None
    name = operator._schema.name.split("::")[1].replace("_", "")
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), None)


class Collectives(TorchDispatchMode):
    """Counts collectives by (phase, kind).

    Attributes:
        phase: of the step, set by whoever runs it.
        calls: how many; ``whole_bytes``: of the larger side of each, summed.
    """

    def __init__(self, phase: str = "forward") -> None:
        super().__init__()
        self.phase = phase
        self.calls: Counter[tuple[str, str]] = Counter()
        self.whole_bytes: Counter[tuple[str, str]] = Counter()
        self._again = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # what they are made of comes by again
        result = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind is not None:
            leaves = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            key = self.phase, REGATHER if self._again else kind
            self.calls[key] += 1
            self.whole_bytes[key] += max(leaf.nbytes for leaf in leaves)
        return result

    @contextmanager
    def telling_regathers(self) -> Iterator[None]:
        """Count the gathers that a column-parallel layer starts in backward as `REGATHER`."""
        module: Any = importlib.import_module(
            "hf_actswap.parallel.column_input"
        )  # the package's name is a function
        own = module.begin_gather

        def begin(*args: Any) -> Any:
            self._again = True
            try:
                return own(*args)
            finally:
                self._again = False

        module.begin_gather = begin
        try:
            yield
        finally:
            module.begin_gather = own

    def wire_bytes(self, ranks: int) -> dict[tuple[str, str], int]:
        """Return what this rank sends, by (phase, kind)."""
        return {
            (phase, kind): ring_bytes(kind, whole, ranks) for (phase, kind), whole in self.whole_bytes.items()
        }


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or what an asynchronous collective wrote."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return plain(tensor.elem) if isinstance(tensor, AsyncCollectiveTensor) else tensor


class SavedBytes:
    """Bytes that autograd saves for backward: each storage once, parameters excluded.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._excluded = {_key(plain(p.detach())) for p in parameters}
        self._found: dict[int, torch.Tensor] = {}
        """Kept, so that no address comes twice."""

    def hooks(self) -> saved_tensors_hooks:
        """Return the context to run the forward in."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def total_bytes(self) -> int:
        """Return the sum."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        found = plain(tensor)
        if found.untyped_storage().nbytes() and _key(found) not in self._excluded:
            self._found.setdefault(_key(found), found.detach())
        return tensor


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class PeakBytes(TorchDispatchMode):
    """Most bytes alive at one time, of storages made inside: all, and those as wide as the vocabulary.

    Args:
        widths: last sizes of a tensor that make it one of logits.
    """

    def __init__(self, widths: Iterable[int]) -> None:
        super().__init__()
        self.peak_bytes = self.peak_logits_bytes = 0
        self._widths = frozenset(widths)
        self._alive: dict[int, tuple[StorageWeakRef, int, bool]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if type(leaf) is torch.Tensor}
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor and _key(leaf) not in given:
                storage = leaf.untyped_storage()
                is_logits = leaf.dim() > 1 and leaf.shape[-1] in self._widths
                self._alive[_key(leaf)] = StorageWeakRef(storage), storage.nbytes(), is_logits
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size, _ in self._alive.values()))
        logits = sum(size for _, size, is_logits in self._alive.values() if is_logits)
        self.peak_logits_bytes = max(self.peak_logits_bytes, logits)
        return result
