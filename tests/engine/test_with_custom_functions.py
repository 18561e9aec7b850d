"""Custom autograd functions as kernel packages write them: what they save is swapped, and gradients hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan, adapt_mem_func_wrapper, model_structure
from tests.engine.pitfalls.odd_layers import llama_with, same_gradients
from tests.engine.spies import WatchingTransfer
from tests.engine.tiny_models import (
    NUM_LAYERS,
    on,
    one_step,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.quick_cases import each_value_once, quick_named

LAYERS = range(NUM_LAYERS)
TOKENS, HIDDEN, INNER, HEADS, WIDTH, SIZE = 32, 32, 48, 4, 8, 4


class PackagedAttention(torch.autograd.Function):
    """Causal attention as flash-attention packages build it: one node that saves q, k, v, out and lse.

    Shapes: (batch, heads, length, width); ``lse`` (batch, heads, length).
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # a kernel: no function of its own is seen
            scores = _scores(q, k)
            lse = scores.logsumexp(-1)
            out = (scores - lse.unsqueeze(-1)).exp() @ v
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        weights = (_scores(q, k) - lse.unsqueeze(-1)).exp()
        inner = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
        inner = inner / math.sqrt(q.shape[-1])
        return inner @ k, inner.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


class PackagedSelfAttention(nn.Module):
    """Projections around `PackagedAttention`, for the place of a Llama's ``self_attn``."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        split = (
            projection(hidden_states).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = PackagedAttention.apply(*split)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def with_packaged_attention() -> nn.Module:
    model = tiny_llama(use_cache=False)
    torch.manual_seed(4)
    for layer in model.model.layers:
        layer.self_attn = PackagedSelfAttention()
    return model


ROW, LSE = TOKENS * HIDDEN * SIZE, TOKENS * HEADS * SIZE
ATTENTION_BYTES = {
    "self_attn.flash_attention": [LSE, ROW],
    "self_attn": [LSE, ROW, ROW, ROW, ROW, ROW],  # q, k, v, out, and out again as o_proj's input: a copy
    "self_attn.q_proj": [ROW],
}


@pytest.mark.parametrize("path", ATTENTION_BYTES)
def test_a_packaged_attention_is_the_attention_core(path: str) -> None:
    """Catches a core that goes unseen because no visible function produced it: out and lse are its own."""
    model, transfer = with_packaged_attention(), WatchingTransfer()
    on(model, plan_of(*swap_rows([path], [1], 5)), transfer)
    one_step(model)
    assert sorted(transfer.sizes_bytes) == ATTENTION_BYTES[path]


PLANS: dict[str, MemoryPlan] = {
    "everything swapped": swap_everything(5),
    "fetched on use": swap_everything(0),
    "core swapped": plan_of(*swap_rows(["self_attn.flash_attention"], LAYERS, 5)),
    "attention recomputed": plan_of(*recompute_rows(["self_attn"], LAYERS), *swap_rows(["mlp"], LAYERS, 5)),
    "all but the core recomputed": plan_of(
        *recompute_rows([""], LAYERS), *swap_rows(["self_attn.flash_attention"], LAYERS, 5)
    ),
}
every_plan = pytest.mark.parametrize(
    "plan", quick_named(PLANS, ["everything swapped", "core swapped", "attention recomputed"])
)


@every_plan
def test_a_packaged_attention_keeps_its_gradients(plan: MemoryPlan) -> None:
    """Catches tensors of a custom node that come back wrong, or are caught in another order."""
    stats = same_gradients(with_packaged_attention, plan)
    assert stats.offloads > 0


class Hidden(torch.autograd.Function):
    """Sine that keeps its input on the context, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        cosine: torch.Tensor = ctx.x.cos()
        return grad * cosine


@every_plan
def test_a_tensor_on_the_context_stays_readable(plan: MemoryPlan) -> None:
    """Catches a release that takes the memory from under a tensor that the engine never saw."""
    same_gradients(lambda: llama_with(lambda x: Hidden.apply(x.exp()), LAYERS), plan)


def test_a_tensor_on_the_context_is_neither_counted_nor_moved() -> None:
    """Catches an engine that believes to have freed what a context holds."""
    transfer = WatchingTransfer()
    model = llama_with(lambda x: Hidden.apply(x * 2), [1])
    on(model, plan_of(*swap_rows(["mlp.mul"], [1], 5)), transfer)
    one_step(model)
    assert transfer.sizes_bytes == []


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up whose backward writes both gradients into what it saved (Liger's does).

    ``visibly``: through ATen, which counts versions. A Triton kernel writes without.
    """

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, visibly: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.visibly = visibly
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        of_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        of_up = grad * silu
        into = (gate, up) if ctx.visibly else (gate.data, up.data)
        return into[0].copy_(of_gate), into[1].copy_(of_up), None


def _halves(visibly: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gate and up are halves of one storage, as after a fused projection."""

    def function(x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.cat([x, x + 1], dim=-1).chunk(2, dim=-1)
        return SwiGlu.apply(gate, up, visibly)

    return function


WRITING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "storages of their own": lambda x: SwiGlu.apply(x + 1, x * 2, True),
    "of their own, invisibly": lambda x: SwiGlu.apply(x + 1, x * 2, False),
    "one storage": _halves(True),
    "one storage, invisibly": _halves(False),
}
MLPS = {
    "everything swapped": swap_everything(5),
    "fetched on use": swap_everything(0),
    "fetched at once": swap_everything(1000),
    "op": plan_of(*swap_rows(["mlp"], LAYERS, 5)),
    "recomputed": plan_of(*recompute_rows(["mlp"], LAYERS)),
    "layers recomputed": plan_of(*recompute_rows([""], LAYERS)),
}


@each_value_once
@pytest.mark.parametrize("plan", MLPS.values(), ids=list(MLPS))
@pytest.mark.parametrize("name", WRITING)
def test_a_backward_that_writes_into_what_it_saved(name: str, plan: MemoryPlan) -> None:
    """Catches a device copy that two tickets share although one of their nodes writes into it."""
    same_gradients(lambda: llama_with(WRITING[name], LAYERS), plan)


class _FusedLoss(torch.autograd.Function):
    """Cross-entropy that computes its gradient in forward and writes it over the logits, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits, labels)
        gradient = logits.softmax(-1)
        gradient[torch.arange(len(labels)), labels] -= 1
        logits.data.copy_(gradient / len(labels))
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (logits,) = ctx.saved_tensors
        logits.data.mul_(grad)
        return logits, None


def _fused_loss_step(model: nn.Module) -> None:
    ids = torch.arange(32).reshape(2, 16)
    logits = model(input_ids=ids).logits
    _FusedLoss.apply(logits.flatten(0, 1), ids.flatten()).backward()


@pytest.mark.parametrize("plan", quick_named(MLPS, ["fetched on use", "op", "layers recomputed"]))
def test_a_loss_that_writes_its_gradient_over_the_logits(plan: MemoryPlan) -> None:
    """Catches logits that were swapped before the loss overwrote them, and come back as they were."""
    same_gradients(tiny_llama, plan, _fused_loss_step)


class NoisySine(torch.autograd.Function):
    """Sine of its input and random noise; saves what it took the sine of, which has a storage of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: float) -> torch.Tensor:
        noisy = x + share * torch.rand_like(x)
        ctx.save_for_backward(noisy)
        return noisy.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (noisy,) = ctx.saved_tensors
        return grad * noisy.cos(), None


NOISY_BYTES = TOKENS * INNER * SIZE


def with_noise() -> nn.Module:
    return llama_with(lambda x: adapt_mem_func_wrapper(NoisySine, x, 0.1), LAYERS)


def test_a_wrapped_function_is_an_op_of_its_own() -> None:
    model, transfer = with_noise(), WatchingTransfer()
    assert "mlp.NoisySine" in {op.path for op in model_structure(model).layers[0].ops}
    on(model, plan_of(*swap_rows(["mlp.NoisySine"], [1], 5)), transfer)
    one_step(model)
    # what it saved of its own, and its output, which the projection saves
    assert transfer.sizes_bytes == [NOISY_BYTES, NOISY_BYTES]


@pytest.mark.parametrize("fate", ["swap", "recompute"])
def test_a_wrapped_function_keeps_its_gradients(fate: str) -> None:
    """Catches a second run with other random numbers, and one that never came."""
    paths, layers = ["mlp.NoisySine"], LAYERS
    rows = swap_rows(paths, layers, 5) if fate == "swap" else recompute_rows(paths, layers)
    stats = same_gradients(with_noise, plan_of(*rows))
    assert stats.recomputes == (0 if fate == "swap" else 2 * NUM_LAYERS)
    assert stats.offloads == (2 * 2 * NUM_LAYERS if fate == "swap" else 0)


def test_wrapping_changes_nothing_where_nobody_looks() -> None:
    x = torch.randn(4, requires_grad=True)
    found = []
    for call in (NoisySine.apply, partial(adapt_mem_func_wrapper, NoisySine)):
        torch.manual_seed(0)
        y = call(x, 0.5)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        found.append((type(y.grad_fn).__name__, y.detach(), gradient))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1:], found[1][1:]))
