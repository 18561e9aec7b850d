"""RMSNorm in the order of Hugging Face's models, whose weight carries NxD's tag."""

from __future__ import annotations

import torch
from torch import nn

from .sharded_module import TaggedModule


class RMSNorm(TaggedModule):
    """Root mean square norm over the last dim, in float32; cast back *before* the weight is multiplied.

    transformers' ``LlamaRMSNorm`` does the same. NxD's norm casts after the product, which differs by one
    rounding in bfloat16.

    Args:
        normalized_shape: size of the last dim.
        eps: added to the mean square.
        sequence_parallel_enabled: value of the weight's attribute (see `layer_norm.LayerNorm`).
        device, dtype: device and dtype of the weight.
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
        self.tag("weight", sequence_parallel_enabled=sequence_parallel_enabled)
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised ``[.., H]``."""
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
