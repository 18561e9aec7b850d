"""Hooks at the ends of a block: its input gathered once for all readers, its output summed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..plan.gradient_checkpointing import is_checkpointed
from .column_input import column_input
from .communication import sum_of_shares
from .random_streams import rank_stream
from .sequence_region import SEQUENCE_DIM, SequenceRegion


class GatherHook:
    """Hook of the norm before a block: what the block reads.

    The block is given the whole sequence, because attention takes the shape of its heads from it.

    In a layer that is run again in backward as a whole, the gather is run again with it. Its result is kept
    then, from there to the products that read it, or it would be gathered a third time.

    Args:
        region: of the model.
        readers: column-parallel projections; with none, ordinary autograd saves what it needs.
        in_autocast_dtype: see `column_input`.
        layer: the decoder layer that it is in.

    Attributes:
        keep_gathered: see `column_input`; besides, it is kept where Hugging Face's gradient checkpointing is
            on for the layer.
    """

    part_of_the_model = True

    def __init__(
        self,
        region: SequenceRegion,
        readers: Sequence[nn.Module],
        layer: nn.Module,
        in_autocast_dtype: bool = False,
    ) -> None:
        self._region, self._readers, self._layer = region, tuple(readers), layer
        self._in_autocast_dtype = in_autocast_dtype
        self.keep_gathered = False

    def __call__(self, _norm: nn.Module, _args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return self.gathered(output)

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S, H]`` of ``[B, S / tp, H]``, or of the whole itself."""
        weights = [reader.get_parameter("weight") for reader in self._readers]
        runs_again = self._layer.training and is_checkpointed(self._layer)
        keep_gathered = self.keep_gathered or runs_again
        return column_input(hidden, weights, self._region.settings(self._in_autocast_dtype, keep_gathered))


class BlockInputHook:
    """Pre-hook of a block, where it is not known which norm it reads: gathers at the block itself."""

    part_of_the_model = True

    def __init__(self, gather: GatherHook) -> None:
        self.gather = gather

    def __call__(
        self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.gather.gathered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.gather.gathered(kwargs["hidden_states"])}


class ReduceHook:
    """Hook of a module whose output is this rank's share ``[B, S, H]`` of a sum: adds the shares up."""

    part_of_the_model = True

    def __init__(self, region: SequenceRegion) -> None:
        self._region = region

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        region = self._region
        dim = SEQUENCE_DIM if region.is_active else None
        total = sum_of_shares(output, region.group, dim, region.reduce_dtype)
        bias: torch.Tensor | None = getattr(getattr(module, "base_layer", None), "bias", None)
        return total if bias is None else total + bias.to(total.dtype)


class RankStreamHooks:
    """Around a module that trains: what it drops differs on each rank, and is the same if it runs again.

    Args:
        region: of the model.
        on_parts: the module is a layer, which holds parts of the sequence while the region is active; else
            attention, whose heads are divided always, and which is covered by its layer in an active region.
    """

    part_of_the_model = True

    def __init__(self, region: SequenceRegion, on_parts: bool) -> None:
        self._region, self._on_parts = region, on_parts
        self._open: list[ExitStack] = []

    def attach(self, module: nn.Module) -> None:
        """Put both hooks on the module."""
        module.register_forward_pre_hook(_Enter(self))
        module.register_forward_hook(_Leave(self), always_call=True)

    def enter(self, module: nn.Module) -> None:
        """Before the module runs."""
        stack = ExitStack()
        if module.training and self._region.is_active == self._on_parts and not _is_traced():
            stack.enter_context(rank_stream(self._region.group))
        self._open.append(stack)

    def leave(self) -> None:
        """After the module ran, also if it failed."""
        if self._open:
            self._open.pop().close()


class _Enter:
    part_of_the_model = True

    def __init__(self, hooks: RankStreamHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        self._hooks.enter(module)


class _Leave:
    part_of_the_model = True

    def __init__(self, hooks: RankStreamHooks) -> None:
        self._hooks = hooks

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        self._hooks.leave()


def _is_traced() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )
