"""What is run: the decoder layers of a Llama, one sequence, forward and backward, nothing else.

No loss, no head and no final norm: their memory and time would blur what happens in the layers. The stack
is still a stock Hugging Face model (``LlamaModel`` fed with embeddings), so everything that works on one
works here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

_SHARE_OF_FREE_MEMORY = 0.7
"""Left over: fragmentation, the allocations inside one layer's backward, and the gradients' reference."""


@dataclass(frozen=True)
class Workload:
    """Shape of the stack and of its input.

    Args:
        name: of the preset.
        layers: decoder layers.
        tokens: length of the one sequence.
        hidden, intermediate, heads: as in ``LlamaConfig``; as many key-value heads as heads.
        dtype: ``float32`` or ``bfloat16``.
        steps: timed steps.
        warmup_steps: steps before them.
    """

    name: str
    layers: int
    tokens: int
    hidden: int
    intermediate: int
    heads: int
    dtype: str
    steps: int
    warmup_steps: int = 2

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


_LLAMA_2_7B = {"hidden": 4096, "intermediate": 11008, "heads": 32, "dtype": "bfloat16", "steps": 10}

PRESETS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("cpu", 4, 256, 256, 688, 8, "float32", 5),
        Workload("h200-8k", layers=16, tokens=8192, **_LLAMA_2_7B),  # type: ignore[arg-type]
        Workload("h200-32k", layers=6, tokens=32768, **_LLAMA_2_7B),  # type: ignore[arg-type]
    )
}


def layer_bytes(workload: Workload) -> int:
    """Bytes that one layer needs while everything is kept: weights, gradients, saved tensors.

    Saved per token, each storage once: both norms keep their input in fp32, their output and the normed
    value; attention keeps q, k, v and its output; the feed-forward keeps its four inner values.
    """
    size = workload.torch_dtype.itemsize
    weights = 4 * workload.hidden**2 + 3 * workload.hidden * workload.intermediate
    saved = size * (8 * workload.hidden + 4 * workload.intermediate) + 2 * 4 * workload.hidden
    return 2 * weights * size + workload.tokens * saved


def fitted(workload: Workload, free_bytes: int) -> Workload:
    """Return the workload with as many layers as fit, and with fewer tokens where two layers do not."""
    usable = int(free_bytes * _SHARE_OF_FREE_MEMORY)
    while 2 * layer_bytes(workload) > usable and workload.tokens > 128:
        workload = replace(workload, tokens=workload.tokens // 2)
    return replace(workload, layers=max(1, min(workload.layers, usable // layer_bytes(workload))))


class DecoderStack:
    """The model, its input, the gradient at its output, and one step.

    All values are drawn from a fixed seed. Gradients of weights are allocated once and added to, as in
    gradient accumulation, so they belong to the resting state and not to a step's memory.

    Args:
        workload: shape.
        device: where everything lives.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.workload, self.device = workload, device
        config = LlamaConfig(
            vocab_size=32,  # the embedding is not used
            hidden_size=workload.hidden,
            intermediate_size=workload.intermediate,
            num_hidden_layers=workload.layers,
            num_attention_heads=workload.heads,
            num_key_value_heads=workload.heads,
            max_position_embeddings=workload.tokens,
            attn_implementation="sdpa",
            dtype=workload.torch_dtype,
        )
        with device:
            self.model: Any = LlamaModel(config).to(workload.torch_dtype).train()
        self.model.norm = nn.Identity()
        self.model.embed_tokens.requires_grad_(False)
        shape = (1, workload.tokens, workload.hidden)
        self.hidden = torch.randn(shape, device=device, dtype=workload.torch_dtype).requires_grad_()
        self.output_gradient = torch.randn_like(self.hidden)
        for leaf in self.leaves().values():
            leaf.grad = torch.zeros_like(leaf)

    def leaves(self) -> dict[str, torch.Tensor]:
        """Everything that receives a gradient."""
        weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        return {"input": self.hidden, **weights}

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in place."""
        for leaf in self.leaves().values():
            if leaf.grad is not None:
                leaf.grad.zero_()

    def forward(self) -> torch.Tensor:
        """Return the last layer's hidden state, shape (1, tokens, hidden)."""
        output: torch.Tensor = self.model(inputs_embeds=self.hidden, use_cache=False).last_hidden_state
        return output

    def backward(self, output: torch.Tensor) -> None:
        """Run backward from `forward`'s result."""
        output.backward(self.output_gradient)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
