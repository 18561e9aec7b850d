"""NxD's norms, whose parameters carry its tag: ``nn.LayerNorm``, and RMSNorm as in Hugging Face's models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .weights import TaggedModule, tag


class LayerNorm(TaggedModule, nn.LayerNorm):
    """``torch.nn.LayerNorm``; weight and bias carry the attribute ``sequence_parallel_enabled``.

    Under sequence parallelism a norm sees the rank's tokens only, so the gradients of its parameters are
    summed over the ranks before the optimizer's step, which the attribute marks.
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
            tag(self, name, sequence_parallel_enabled=sequence_parallel_enabled)


class RMSNorm(TaggedModule):
    """Root mean square norm over the last dim, in float32; cast back *before* the weight is multiplied.

    transformers' ``LlamaRMSNorm`` does the same. NxD's norm casts after the product, which differs by one
    rounding in bfloat16. ``eps`` is added to the mean square.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel_enabled: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.sequence_parallel_enabled = eps, sequence_parallel_enabled
        tag(self, "weight", sequence_parallel_enabled=sequence_parallel_enabled)
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
