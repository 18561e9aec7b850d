"""The workloads: Llamas of real shapes, one sequence, forward and backward, nothing else.

Memory needs are computed from the shapes. There are two forms. The *decoder stack* is the decoder layers
alone, without loss, head, final norm and embedding, whose memory and time would hide effects in the layers.
The *whole model* has them all. Both are stock Hugging Face models, so every method that works on one works
here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

_SHARE_OF_FREE_MEMORY = 0.7
"""The rest is for fragmentation, and for allocations inside one layer's backward."""


@dataclass(frozen=True)
class Workload:
    """Shape of the model and of its input: one sequence of ``tokens``.

    ``head``: whether the whole model runs; otherwise the decoder stack. ``expected_ms``: estimated time of an
    eager step on an H200, to plan the time of a run. The other sizes are named as in ``LlamaConfig``.
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

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def kv_width(self) -> int:
        return self.hidden * self.kv_heads // self.heads

    @property
    def title(self) -> str:
        """Model, sizes and form as one line of text."""
        form = "whole model" if self.head else "decoder stack"
        layers = f"{self.layers} layer{'s' * (self.layers > 1)}"
        return f"{self.model}, {layers}, {self.tokens:,} tokens, {form}, {self.dtype}"


# Model, hidden and feed-forward sizes, heads, heads of keys and values, vocabulary.
_SIZES = ("model", "hidden", "intermediate", "heads", "kv_heads", "vocab")
_7B: dict[str, Any] = dict(zip(_SIZES, ("Llama-2-7B", 4096, 11008, 32, 32, 32000), strict=True))
_8B: dict[str, Any] = dict(zip(_SIZES, ("Llama-3-8B", 4096, 14336, 32, 8, 128256), strict=True))
_TINY: dict[str, Any] = dict(zip(_SIZES, ("tiny", 256, 688, 8, 8, 512), strict=True))
_TINY |= {"tokens": 256, "dtype": "float32", "steps": 5, "warmup_steps": 2}

PRESETS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("cpu", **_TINY, layers=4),
        Workload("cpu-model", **_TINY, layers=2, head=True),
        Workload("7b-8k", **_7B, layers=16, tokens=8192, expected_ms=390),
        Workload("7b-32k", **_7B, layers=6, tokens=32768, expected_ms=840),
        Workload("8b-8k-model", **_8B, layers=8, tokens=8192, head=True, expected_ms=330),
        Workload("8b-8k", **_8B, layers=16, tokens=8192, expected_ms=420),
        Workload("8b-32k", **_8B, layers=6, tokens=32768, expected_ms=850),
    )
}
DEFAULT_PRESETS = {"cpu": ("cpu", "cpu-model"), "accelerator": ("7b-8k", "7b-32k", "8b-8k-model")}
"""Presets of a run without ``--preset``: more would take too long."""


def layer_saved_bytes(workload: Workload) -> int:
    """Return the bytes that autograd saves in one eager layer, each storage once.

    Per token: both norms keep their input in fp32, their output and the normed value; attention keeps q, k, v
    and its output; the feed-forward keeps its four inner values.
    """
    values = 6 * workload.hidden + 2 * workload.kv_width + 4 * workload.intermediate
    return workload.tokens * (workload.torch_dtype.itemsize * values + 2 * 4 * workload.hidden)


def layer_weight_bytes(workload: Workload) -> int:
    """Return the bytes of one layer's matrices."""
    attention = 2 * workload.hidden * (workload.hidden + workload.kv_width)
    return (attention + 3 * workload.hidden * workload.intermediate) * workload.torch_dtype.itemsize


def step_flop(workload: Workload) -> int:
    """Return the FLOP of a step, forward and backward.

    Matrix products take two for each weight and token in forward and twice that in backward. Attention takes
    two products over the pairs of tokens in forward and five in backward; each token sees those before it.
    """
    weights = workload.layers * layer_weight_bytes(workload) // workload.torch_dtype.itemsize
    weights += workload.vocab * workload.hidden if workload.head else 0
    pairs = workload.tokens**2 // 2
    return 6 * weights * workload.tokens + 14 * workload.layers * workload.hidden * pairs


def layer_bytes(workload: Workload) -> int:
    """Return the bytes that one layer needs if nothing is dropped: weights, gradients, saved tensors."""
    return 2 * layer_weight_bytes(workload) + layer_saved_bytes(workload)


def head_bytes(workload: Workload) -> int:
    """Return the bytes of embedding and head with their gradients, and of four fp32 copies of the logits."""
    if not workload.head:
        return 0
    weights = 2 * workload.vocab * workload.hidden * workload.torch_dtype.itemsize
    return 2 * weights + 4 * 4 * workload.tokens * workload.vocab


def fitted(workload: Workload, free_bytes: int) -> Workload:
    """Return the workload with as many layers as fit, and with fewer tokens if two layers do not fit."""
    usable = int(free_bytes * _SHARE_OF_FREE_MEMORY)
    while head_bytes(workload) + 2 * layer_bytes(workload) > usable and workload.tokens > 128:
        workload = replace(workload, tokens=workload.tokens // 2)
    fit = (usable - head_bytes(workload)) // layer_bytes(workload)
    return replace(workload, layers=max(1, min(workload.layers, fit)))


_TOKENS_AT_ONCE = 4096
"""Tokens in a piece of a stack's loss, which is summed in pieces so that it does not set the memory peak."""


def llama_config(workload: Workload) -> LlamaConfig:
    """Return the configuration of a workload's model."""
    return LlamaConfig(
        vocab_size=workload.vocab if workload.head else 32,  # a stack does not use its embedding
        hidden_size=workload.hidden,
        intermediate_size=workload.intermediate,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.kv_heads,
        max_position_embeddings=workload.tokens,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        dtype=workload.torch_dtype,
    )


def timed_step_ms(step: TrainingStep) -> float:
    """Run forward and backward on zeroed gradients; return their time in ms."""
    step.zero_gradients()
    step.synchronize()
    start = time.perf_counter()
    with step.context():
        step.backward(step.forward())
    step.synchronize()
    return (time.perf_counter() - start) * 1e3


_Subject = TypeVar("_Subject")


def in_turns(subjects: Sequence[_Subject], rounds: int) -> Iterator[tuple[int, _Subject]]:
    """Yield a round's number and a subject: each subject once in a round, in an order that changes."""
    for number in range(rounds):
        first = number % len(subjects)
        for subject in (*subjects[first:], *subjects[:first]):
            yield number, subject


class TrainingStep:
    """A model, its input and one step of it: the whole model here, in `DecoderStack` its layers alone.

    All values are drawn from a fixed seed. Gradients are allocated once and added to, as in gradient
    accumulation, so they belong to the baseline state and not to a step's memory.

    Attributes:
        context: returns a context that is entered around forward and backward of every step; a method may
            replace it.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.workload, self.device = workload, device
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext
        with device:
            self.model: Any = self._build(llama_config(workload)).to(workload.torch_dtype).train()
        for leaf in self.leaves().values():
            leaf.grad = torch.zeros_like(leaf)

    def _build(self, config: LlamaConfig) -> Any:
        """Return the model; then make its input: random tokens."""
        model = LlamaForCausalLM(config)
        self.input_ids = torch.randint(self.workload.vocab, (1, self.workload.tokens))
        return model

    def forward(self) -> torch.Tensor:
        """Run forward; return the output, which `backward` and `loss` take: the loss, a scalar."""
        loss: torch.Tensor = self.model(input_ids=self.input_ids, labels=self.input_ids, use_cache=False).loss
        return loss

    def backward(self, output: torch.Tensor) -> None:
        """Run backward from `forward`'s result."""
        output.backward()

    def loss(self, output: torch.Tensor) -> float:
        """Return a number by which the results of two rows can be compared, summed in fp32."""
        return float(output.detach())

    @property
    def decoder_layers(self) -> list[nn.Module]:
        return list(self.model.get_decoder().layers if self.workload.head else self.model.layers)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name."""
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return all tensors that receive a gradient, by name."""
        return self.weights()

    def baseline_bytes(self) -> int:
        """Return the bytes of all tensors that receive a gradient, and of their gradients."""
        return 2 * sum(leaf.numel() * leaf.element_size() for leaf in self.leaves().values())

    def zero_gradients(self) -> None:
        for leaf in self.leaves().values():
            if leaf.grad is not None:
                leaf.grad.zero_()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class DecoderStack(TrainingStep):
    """The decoder layers alone; the input is a hidden state, and backward starts from a fixed gradient."""

    def _build(self, config: LlamaConfig) -> Any:
        model = LlamaModel(config)
        model.norm = nn.Identity()
        model.embed_tokens.requires_grad_(False)
        shape = (1, self.workload.tokens, self.workload.hidden)
        self.hidden = torch.randn(shape, dtype=self.workload.torch_dtype).requires_grad_()
        self.output_gradient = torch.randn_like(self.hidden)
        return model

    def leaves(self) -> dict[str, torch.Tensor]:
        return {"input": self.hidden, **self.weights()}

    def forward(self) -> torch.Tensor:
        """Return the last layer's hidden state, shape (1, tokens, hidden)."""
        output: torch.Tensor = self.model(inputs_embeds=self.hidden, use_cache=False).last_hidden_state
        return output

    def backward(self, output: torch.Tensor) -> None:
        output.backward(self.output_gradient)

    def loss(self, output: torch.Tensor) -> float:
        """Return the mean of output times the fixed gradient, from which backward starts."""
        total = torch.zeros((), device=output.device)
        pieces = (whole.split(_TOKENS_AT_ONCE, dim=1) for whole in (output.detach(), self.output_gradient))
        for piece, gradient in zip(*pieces, strict=True):
            total += (piece.float() * gradient.float()).sum()
        return float(total) / output.numel()


def training_step(workload: Workload, device: torch.device) -> TrainingStep:
    """Return a step of the whole model or of a `DecoderStack`, as the workload says."""
    return (TrainingStep if workload.head else DecoderStack)(workload, device)
