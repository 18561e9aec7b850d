"""Layers that a plan runs again as a whole keep what they gather there, and do not gather it again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import nn

from .block_hooks import BlockInputHook, GatherHook
from .routed_experts import ParallelExperts
from .shared_input import SharedInput

_Gather = GatherHook | SharedInput | ParallelExperts
"""What gathers an input, and may keep it (``keep_gathered``)."""


def keep_gathered_inputs(layer: nn.Module) -> Callable[[], None]:
    """Let the column-parallel projections in ``layer`` save their gathered input in place of the shard.

    For a layer that is recomputed whole: what is saved in the recomputation lives no longer than the layer's
    backward, and a gather is spared. It finds the gathers of a patched model, and each `SharedInput` that is
    an attribute of a module. Any other layer is left as it is.

    Returns:
        What restores the settings.
    """
    found = [(gather, gather.keep_gathered) for gather in _gathers(layer)]
    for gather, _ in found:
        gather.keep_gathered = True
    return functools.partial(_restore, found)


def _restore(found: list[tuple[_Gather, bool]]) -> None:
    for gather, before in found:
        gather.keep_gathered = before


def _gathers(layer: nn.Module) -> Iterator[_Gather]:
    for module in layer.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if isinstance(hook, GatherHook):
                yield hook
            elif isinstance(hook, BlockInputHook):
                yield hook.gather
        if isinstance(module, ParallelExperts):
            yield module
        yield from (held for held in vars(module).values() if isinstance(held, SharedInput))
