"""Divides LoRA adapters (of PEFT) along with their projections; adapters are recognised by their attributes.

An adapter adds ``B (A x)`` to a projection's output. On a column-parallel projection B is divided like the
weight, and A is whole. On a row-parallel one A is divided like the weight, B is whole, and one sum over the
ranks is taken of projection and adapter together. A whole A gets a part of its gradient from each rank's part
of B, and a whole B reads a part of ``A x``: both are tagged, with or without sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import Problem
from .block_hooks import ReduceHook
from .column_input import linear
from .layers import ColumnParallelLinear, RowParallelLinear
from .sequence_region import SequenceRegion
from .weights import ParameterTags

_EXPECTED = "a plain LoRA adapter"


class SharedInputLinear(nn.Linear):
    """A whole linear layer in a divided block, which may read the same input as the divided layers.

    Args:
        full: the linear layer whose weight it takes.
        region: says where the model's hidden states are parts of the sequence.
    """

    def __init__(self, full: nn.Linear, region: SequenceRegion) -> None:
        super().__init__(full.in_features, full.out_features, bias=False, device="meta")
        self.weight, self.bias = full.weight, full.bias
        self._region = region

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S, r]``, alike on all ranks; the gradients that come back are this rank's part."""
        output = linear(input, self.weight, self._region.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class UnreducedRowLinear(RowParallelLinear):
    """A row-parallel layer that returns this rank's share; its caller sums shares and adds the bias."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return ``[.., output_size]`` of this rank's features ``[.., input_size / tp]``."""
        return F.linear(input_, self.weight)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a projection with adapters around it."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def base_of(module: nn.Module) -> nn.Module:
    """Return the projection without its adapters."""
    return module.get_submodule("base_layer") if is_adapted(module) else module


def problems_of_adapter(where: str, module: nn.Module, is_row: bool) -> Iterator[Problem]:
    """Yield a problem for each part of an adapter that is not supported: anything besides A and B."""
    if not is_adapted(module):
        return
    lora_a, lora_b = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
    if not isinstance(lora_a, nn.ModuleDict) or not isinstance(lora_b, nn.ModuleDict):
        hint = "Of PEFT's methods LoRA is supported."
        yield Problem(where, _EXPECTED, type(module).__name__, hint)
        return
    if getattr(module, "merged", False):
        yield Problem(where, "an adapter that is not merged", "a merged one", "Call unmerge_adapter() first.")
    variants = getattr(module, "lora_variant", None)
    if variants:
        yield Problem(where, _EXPECTED, f"the variant {next(iter(variants.values()))}", "Leave it out.")
    for part in (*lora_a.values(), *lora_b.values()):
        if type(part) is not nn.Linear:
            yield Problem(where, _EXPECTED, f"{type(part).__name__} inside")
        elif is_row and part.bias is not None:
            yield Problem(where, "an adapter without bias", "lora_bias=True", "Set lora_bias=False.")


def divide_column_adapters(
    module: Any,
    base: ColumnParallelLinear,
    settings: dict[str, Any],
    region: SequenceRegion,
    tags: ParameterTags,
) -> list[nn.Module]:
    """Put ``base`` into an adapted projection, and divide each B like it; return each A, for its input."""
    module.base_layer = base
    readers: list[nn.Module] = []
    for name, lora_a in module.lora_A.items():
        module.lora_A[name] = SharedInputLinear(lora_a, region).train(lora_a.training)
        tags.add_summed(module.lora_A[name])
        module.lora_B[name] = ColumnParallelLinear.from_linear(module.lora_B[name], **settings)
        readers.append(module.lora_A[name])
    return readers


def divide_row_adapters(
    module: Any, settings: dict[str, Any], region: SequenceRegion, tags: ParameterTags
) -> UnreducedRowLinear:
    """Divide an adapted projection and each A by input features; a hook sums the output over the ranks."""
    base = module.base_layer = UnreducedRowLinear.from_linear(module.base_layer, **settings)
    for name, lora_a in module.lora_A.items():
        module.lora_A[name] = UnreducedRowLinear.from_linear(lora_a, **settings)
        tags.add_summed(module.lora_B[name])
    module.register_forward_hook(ReduceHook(region))
    return base
