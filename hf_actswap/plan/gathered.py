"""Reads in which types FSDP2 gathers the weights that it shards, and sums their gradients.

Imports no PyTorch: plans are read without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def gathered_dtypes(model: nn.Module) -> Iterator[tuple[str, torch.dtype | None]]:
    """Yield (module path, dtype to which FSDP2 casts the module's own parameters; ``None``: no cast)."""
    return ((name, getattr(policy, "param_dtype", None)) for name, policy in _policies(model))


def summed_dtypes(model: nn.Module) -> Iterator[tuple[str, torch.dtype | None]]:
    """Yield (module path, dtype in which FSDP2 sums its parameters' gradients; ``None``: no cast)."""
    return ((name, getattr(policy, "reduce_dtype", None)) for name, policy in _policies(model))


def _policies(model: nn.Module) -> Iterator[tuple[str, Any]]:
    nearest: dict[str, Any] = {}
    for name, module in model.named_modules():
        sharded: Any = module
        policy = nearest.get(name.rpartition(".")[0]) if name else None
        if hasattr(module, "_get_fsdp_state"):
            policy = getattr(sharded._get_fsdp_state(), "_mp_policy", None)
        nearest[name] = policy
        yield name, policy
