"""``torch.nn.LayerNorm`` whose parameters carry NxD's tag."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .sharded_module import TaggedModule


class LayerNorm(TaggedModule, nn.LayerNorm):
    """``torch.nn.LayerNorm``; weight and bias carry the attribute ``sequence_parallel_enabled``.

    Under sequence parallelism a norm sees the rank's tokens only, so the gradients of its parameters are
    summed over the ranks before the optimizer's step, which the attribute marks.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as ``torch.nn.LayerNorm``.
        sequence_parallel_enabled: value of the attribute.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        for name in ("weight", "bias"):
            self.tag(name, sequence_parallel_enabled=sequence_parallel_enabled)
