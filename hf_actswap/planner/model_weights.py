"""What the weights of a model's modules need on the device while a step runs, beside lying there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..plan.actions import Scope
from ..plan.compiled import called_modules, uncompiled
from ..plan.outline import Outline
from .shape_buckets import Module, ModuleWeights

_GATHERED = 3
"""Of sharded weights: a layer's, gathered, the next layer's beside it, and gradients not yet scattered."""

_DEQUANTISED = 4
"""Bytes of a dequantised weight for each byte of a quantised one (4 bits to 16)."""


def module_weights(root: nn.Module, outline: Outline) -> dict[Module, ModuleWeights]:
    """Return it for the modules of all scopes, as things are ahead of a forward.

    Args:
        root: the model inside its wrappers.
        outline: of it.
    """
    seen: set[int] = set()
    found: dict[Module, ModuleWeights] = {}
    for scope, module in _scopes(root, outline):
        sharded_bytes = _GATHERED * _bytes(module, True) if outline.sharded else 0
        whole = uncompiled(module)
        for path, child in [("", whole), *called_modules(whole)]:
            new, passing = 0, sharded_bytes
            for weight in child._parameters.values():
                if weight is None:
                    continue
                if weight.requires_grad and weight.grad is None and id(weight) not in seen:
                    new += weight.nbytes // _ranks_of(weight)
                elif weight.requires_grad:
                    passing += weight.nbytes
                elif not weight.is_floating_point():
                    passing += _DEQUANTISED * weight.nbytes
                seen.add(id(weight))
            if new or passing:
                found[scope, path] = ModuleWeights(new, passing)
    return found


def _scopes(root: nn.Module, outline: Outline) -> Iterator[tuple[Scope, nn.Module]]:
    """In the order of backward: a weight that two modules share gets its gradient from the first."""
    around: dict[Scope, str | None] = {"head": outline.head, "final_norm": outline.final_norm}
    for scope, path in around.items():
        if path is not None:
            yield scope, root.get_submodule(path)
    for layer in reversed(outline.layers):
        yield layer.index, root.get_submodule(layer.module_path)
    if outline.embedding is not None:
        yield "embedding", root.get_submodule(outline.embedding)


def _bytes(module: nn.Module, recurse: bool) -> int:
    return sum(weight.nbytes for weight in module.parameters(recurse))


def _ranks_of(weight: torch.Tensor) -> int:
    """Over how many ranks a weight is sharded: ``nbytes`` is that of all of it."""
    mesh = getattr(weight, "device_mesh", None)
    return 1 if mesh is None else int(mesh.size())
