"""The shapes that are run, as data, and what they need, as arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

_SHARE_OF_FREE_MEMORY = 0.7
"""Left over: fragmentation, and the allocations inside one layer's backward."""


@dataclass(frozen=True)
class Workload:
    """Shape of the model and of its input.

    Args:
        name: of the preset.
        model: whose shapes these are.
        layers: decoder layers.
        tokens: length of the one sequence.
        hidden, intermediate, heads, kv_heads, vocab: as in ``LlamaConfig``.
        head: the whole model; otherwise the decoder stack.
        dtype: ``float32`` or ``bfloat16``.
        steps: timed steps.
        warmup_steps: steps before them.
        expected_ms: of an eager step on an H200, to plan the minutes of a run with.
        handicap: how much less its rows matter than those of other workloads when minutes are short.
    """

    name: str
    model: str
    layers: int
    tokens: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head: bool = False
    dtype: str = "bfloat16"
    steps: int = 10
    warmup_steps: int = 5
    expected_ms: float = 10.0
    handicap: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def title(self) -> str:
        """For people, one line."""
        form = "whole model" if self.head else "decoder stack"
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        return f"{self.model}, {layers}, {self.tokens:,} tokens, {form}, {self.dtype}"


_TINY: dict[str, Any] = {
    "model": "tiny",
    "layers": 4,
    "tokens": 256,
    "hidden": 256,
    "intermediate": 688,
    "heads": 8,
    "kv_heads": 8,
    "vocab": 512,
    "dtype": "float32",
    "steps": 5,
    "warmup_steps": 2,
}
_7B: dict[str, Any] = {
    "model": "Llama-2-7B",
    "hidden": 4096,
    "intermediate": 11008,
    "heads": 32,
    "kv_heads": 32,
    "vocab": 32000,
}
_8B: dict[str, Any] = {
    "model": "Llama-3-8B",
    "hidden": 4096,
    "intermediate": 14336,
    "heads": 32,
    "kv_heads": 8,
    "vocab": 128256,
}

PRESETS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("cpu", **_TINY),
        Workload("cpu-model", **{**_TINY, "layers": 2}, head=True),
        Workload("7b-8k", **_7B, layers=16, tokens=8192, expected_ms=390),
        Workload("7b-32k", **_7B, layers=6, tokens=32768, expected_ms=840, handicap=2),
        Workload("8b-8k-model", **_8B, layers=8, tokens=8192, head=True, expected_ms=330, handicap=1),
        Workload("8b-8k", **_8B, layers=16, tokens=8192, expected_ms=420, handicap=4),
        Workload("8b-32k", **_8B, layers=6, tokens=32768, expected_ms=850, handicap=5),
    )
}
DEFAULT_PRESETS = {"cpu": ("cpu", "cpu-model"), "accelerator": ("7b-8k", "7b-32k", "8b-8k-model")}
"""What a run without ``--preset`` measures: more does not fit into its minutes."""


def layer_saved_bytes(workload: Workload) -> int:
    """Bytes that autograd saves in one eager layer, each storage once.

    Per token: both norms keep their input in fp32, their output and the normed value; attention keeps q, k, v
    and its output; the feed-forward keeps its four inner values.
    """
    kv_width = workload.hidden * workload.kv_heads // workload.heads
    values = 6 * workload.hidden + 2 * kv_width + 4 * workload.intermediate
    return workload.tokens * (workload.torch_dtype.itemsize * values + 2 * 4 * workload.hidden)


def layer_weight_bytes(workload: Workload) -> int:
    """Bytes of one layer's matrices."""
    kv_width = workload.hidden * workload.kv_heads // workload.heads
    attention = 2 * workload.hidden * (workload.hidden + kv_width)
    return (attention + 3 * workload.hidden * workload.intermediate) * workload.torch_dtype.itemsize


def layer_bytes(workload: Workload) -> int:
    """Bytes that one layer needs while everything is kept: weights, gradients, saved tensors."""
    return 2 * layer_weight_bytes(workload) + layer_saved_bytes(workload)


def head_bytes(workload: Workload) -> int:
    """Bytes of embedding and head with their gradients, and of four fp32 copies of the logits at the loss."""
    if not workload.head:
        return 0
    weights = 2 * workload.vocab * workload.hidden * workload.torch_dtype.itemsize
    return 2 * weights + 4 * 4 * workload.tokens * workload.vocab


def fitted(workload: Workload, free_bytes: int) -> Workload:
    """Return the workload with as many layers as fit, and with fewer tokens where two layers do not."""
    usable = int(free_bytes * _SHARE_OF_FREE_MEMORY)
    while head_bytes(workload) + 2 * layer_bytes(workload) > usable and workload.tokens > 128:
        workload = replace(workload, tokens=workload.tokens // 2)
    fit = (usable - head_bytes(workload)) // layer_bytes(workload)
    return replace(workload, layers=max(1, min(workload.layers, fit)))
