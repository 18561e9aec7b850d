"""Calls of a module with other tensors in the place of its weights.

`torch.func.functional_call` goes by names. A module at two paths (``model.alias = model.embed_tokens``) has
two names for one place. What `functional_call` finds there by the second name is the stand-in, which it puts
back at the end. This exchange goes by places: each is filled and put back once, whatever paths lead to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ..interrupts import uninterrupted


@contextmanager
def exchanged(module: nn.Module, named: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put other tensors in the place of parameters and buffers; put the module's own back at the end.

    A tensor that is in several places (tied weights, a module at two paths) is replaced in all of them. At
    the end each of these places has the tensor from before, whatever the calls inside have put there.

    Args:
        module: a module that is called inside the block.
        named: the tensors to use instead, by one name of each parameter or buffer.

    Raises:
        AttributeError: the module has no parameter or buffer of a name in ``named``.
    """
    instead = {id(_tensor_at(module, name)): tensor for name, tensor in named.items()}
    before = [
        (place, name, tensor)
        for inner in module.modules()
        for place in _places(inner)
        for name, tensor in place.items()
        if tensor is not None and id(tensor) in instead
    ]
    try:
        for place, name, tensor in before:
            place[name] = instead[id(tensor)]
        yield
    finally:
        with uninterrupted():
            for place, name, tensor in before:
                place[name] = tensor


def _places(module: nn.Module) -> tuple[dict[str, torch.Tensor | None], ...]:
    own = vars(module)  # a compiled module answers for the one inside it when asked by name
    return own.get("_parameters", {}), own.get("_buffers", {})


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    for place in _places(owner):
        if (held := place.get(last)) is not None:
            return held
    raise AttributeError(f"{type(owner).__name__} has no parameter or buffer {name!r}")
