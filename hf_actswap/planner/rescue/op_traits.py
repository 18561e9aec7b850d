"""What must be known of an op before it is run a second time: read off its schema, once for each op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem")
_FLATTENING = ("allgather_", "reduce_scatter_", "alltoall_")
"""Collectives on lists, which the backend may flatten into a tensor of its own first."""
_BUILT_IN = ("aten", "prims", "prim")
BRACKETS: Mapping[str, Literal["begin", "end"]] = {
    "hf_actswap::op_begin": "begin",
    "hf_actswap::op_end": "end",
}
"""The marks of `op_hook`."""


def tensor_bytes(values: Any) -> int:
    """Bytes of all tensors in ``values``, nested as it may be; one that appears twice counts twice."""
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True, slots=True)
class OpTraits:
    """Of one overload of an op.

    Args:
        name: with overload.
        why_once: why it must not be run twice; empty: it may.
        random: whether it may draw random numbers.
        allocates: whether it makes tensors although it must not be run twice.
        gathers: whether its results are larger than its inputs by the number of ranks.
        resizes: whether it grows its first argument to the size of its second.
        bracket: which mark of an `op_hook` it is.
    """

    name: str
    why_once: str
    random: bool
    allocates: bool
    gathers: bool
    resizes: bool
    bracket: Literal["begin", "end"] | None

    @property
    def once(self) -> bool:
        """Whether it must not be run twice."""
        return bool(self.why_once)

    def needs_bytes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Guess what an op allocates that must not be run twice: as much as it reads."""
        if not self.allocates:
            return 0
        if self.resizes:
            return int(prod(args[1])) * args[0].element_size()
        ranks = next((item for item in args[1:] if isinstance(item, int)), 1) if self.gathers else 1
        return tensor_bytes((args, kwargs)) * ranks

    @staticmethod
    def sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Bytes of each input: with the name, what a call is remembered by."""
        return tuple(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def communicates(op: Any) -> bool:
    """Whether an ``OpOverload`` exchanges data with other ranks."""
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.name.partition("::")[0] in _COLLECTIVES


def traits_of(op: Any) -> OpTraits:
    """Read the traits of an ``OpOverload``; of anything else (a higher-order operator): it runs once."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return OpTraits(str(op), "nothing is known of what it does", False, False, False, False, None)
    namespace, _, short = schema.name.partition("::")
    why = ""
    if communicates(op):
        why = "the other ranks have done their part"
    elif schema.is_mutable:
        why = "it writes into its arguments"
    elif "batch_norm" in short and "backward" not in short:
        why = "it updates running statistics"
    # Whoever registers an op with random numbers may have forgotten the tag; torch itself has not.
    random = torch.Tag.nondeterministic_seeded in op.tags or namespace not in _BUILT_IN
    resizes = short == "resize_"
    if namespace == "c10d":
        allocates = short in _FLATTENING
    else:
        allocates = resizes or (short != "wait_tensor" and _makes_tensors(schema.returns))
    gathers = namespace in _COLLECTIVES and short.startswith("all_gather")
    return OpTraits(str(op), why, random, allocates, gathers, resizes, BRACKETS.get(schema.name))


def _makes_tensors(returns: Iterable[Any]) -> bool:
    return any(item.alias_info is None and "Tensor" in str(item.type) for item in returns)
