"""What `overhead` measures: two tiny models, and what is put on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap.engine import RecordingTransfer
from hf_actswap.engine.blocks import HostBuffer
from hf_actswap.engine.transfer import Copy
from hf_actswap.plan import PlanRow, Windows

LAYERS = 4
OPS_PER_MODULE = 100
NOTHING, IDENTITY = "nothing installed", "identity hooks"
REFERENCE_IDENTITY_US = 0.9
"""What bare identity hooks cost where the bounds were set; ratios are scaled to it."""


@dataclass(frozen=True)
class Case:
    """A plan, or hooks that do nothing, on a model.

    Args:
        name: in the results.
        rows: of the plan; ``None``: no plan.
        min_tensor_bytes: of the plan.
        bare_copies: copies that do nothing (CPU).
        bound_us: what a saved tensor may cost, where identity hooks cost `REFERENCE_IDENTITY_US`.
    """

    name: str
    rows: tuple[PlanRow, ...] | None = None
    min_tensor_bytes: int = 0
    bare_copies: bool = False
    bound_us: float | None = None


def _swap(path: str) -> tuple[PlanRow, ...]:
    windows = Windows.of_prefetch(10)
    return tuple(PlanRow(layer, path, "swap", windows=windows) for layer in range(LAYERS))


def _swap_by_op() -> tuple[PlanRow, ...]:
    return (*_swap(""), *_swap("self_attn"))


# A row that nothing matches puts the hooks on and leaves every tensor where it is.
_ELSEWHERE = (PlanRow("head", "", "swap", windows=Windows.of_prefetch(10)),)
_HUGE_BYTES = 2**40

CASES = (
    Case(NOTHING),
    Case(IDENTITY),
    Case("keep, layer rules", _ELSEWHERE, _HUGE_BYTES, bound_us=2.0),
    Case("keep, layer rules, too small to swap", _swap(""), _HUGE_BYTES, bound_us=2.0),
    Case("keep, op rules", _swap("unmatched"), bound_us=5.0),
    Case("swap, layer rules", _swap(""), bound_us=20.0),
    Case("swap, op rules", _swap_by_op(), bound_us=20.0),
    Case("swap, bare copies", _swap(""), bare_copies=True, bound_us=20.0),
)


class _Half(nn.Module):
    def __init__(self, ops: int) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(self.ops):
            hidden = hidden.sin()  # saves its input, and nothing else
        return hidden


class _ChainLayer(nn.Module):
    """A decoder layer by its names: two modules of cheap ops."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Half(ops), _Half(ops)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mlp(self.self_attn(hidden))
        return result


class Chain(nn.Module):
    """Layers of cheap ops, ``ops`` in each of their modules, on a tensor of shape (8, 8)."""

    def __init__(self, ops: int = OPS_PER_MODULE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.layers = nn.ModuleList(_ChainLayer(ops) for _ in range(LAYERS))

    def forward(self) -> torch.Tensor:
        hidden = self.weight + 0
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


class TinyLlama(nn.Module):
    """A Llama of hidden size 32 on 16 tokens, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
        self.register_buffer("ids", torch.arange(32).view(2, 16))

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        return loss


WORKLOADS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "long chain": partial(Chain, 3 * OPS_PER_MODULE),
    "llama": TinyLlama,
}


class _Never:
    def wait(self) -> None:
        return None


class BareTransfer(RecordingTransfer):
    """Copies nothing. Gradients are wrong."""

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        return _Never()

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        return torch.empty(host.size_bytes, dtype=torch.uint8), _Never()

    def host_reader_done(self, host: HostBuffer) -> None:
        """Nothing is in flight."""


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is given: a hook that does nothing."""
    return tensor


def saved_tensors(model: nn.Module) -> int:
    """Return how many tensors one forward saves."""
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor

    with saved_tensors_hooks(pack, same):
        model()
    return count
